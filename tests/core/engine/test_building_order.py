"""In which order the parts of an engine core are built and closed."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.builtin_plugins.policies import FirstComeFirstServed
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.testing import scripted_engine

HERE = __name__


class Notes:
    """Notes when a component is built and closed."""

    seen: ClassVar[list] = []

    def __init__(self, context):
        self.note("built")
        super().__init__(context)

    def note(self, *what):
        self.seen.append((type(self).__name__, *what))

    def close(self):
        self.note("closed")
        super().close()


class Executor(Notes, UniprocExecutor):
    contract = 1

    def start(self):
        self.note("start")
        return super().start()

    def initialize_cache(self, num_blocks):
        self.note("cache", num_blocks)
        super().initialize_cache(num_blocks)

    def collective_rpc(self, method, args=(), timeout=None):
        self.note(method, *args)
        return super().collective_rpc(method, args, timeout)

    def on_failure(self, callback):
        self.note("on_failure")


class Scheduler(Notes, DefaultScheduler):
    contract = 1


class Policy(Notes, FirstComeFirstServed):
    contract = 1


class Eviction(Notes, LeastRecentlyUsed):
    contract = 1


def opened(folder, **extra):
    Notes.seen.clear()
    tables = {
        "executor": {"use": f"{HERE}:Executor"},
        "scheduler": {"use": f"{HERE}:Scheduler", "policy": f"{HERE}:Policy"},
        "kv_cache": {"eviction": f"{HERE}:Eviction", "num_blocks": 40},
    }
    tables["kv_cache"] |= extra.pop("kv_cache", {})
    return scripted_engine(folder, tables | extra)


def test_the_model_is_loaded_and_the_cache_there_before_the_scheduler_is_built(scripted):
    engine = opened(scripted)
    assert Notes.seen == [
        ("Policy", "built"),
        ("Eviction", "built"),
        ("Executor", "built"),
        ("Executor", "start"),
        ("Executor", "cache", 40),
        ("Scheduler", "built"),
        ("Executor", "on_failure"),
    ]
    engine.close()


def test_the_executor_is_closed_first(scripted):
    engine = opened(scripted)
    Notes.seen.clear()
    engine.close()
    assert Notes.seen == [
        ("Executor", "closed"),
        ("Scheduler", "closed"),
        ("Policy", "closed"),
        ("Eviction", "closed"),
    ]


def test_a_context_that_was_fitted_is_told_to_the_workers_before_the_cache(scripted):
    engine = opened(scripted, max_model_len="auto", kv_cache={"num_blocks": 3})
    assert Notes.seen[Notes.seen.index(("Executor", "start")) + 1 :] == [
        ("Executor", "set_max_model_len", 48),
        ("Executor", "cache", 3),
        ("Scheduler", "built"),
        ("Executor", "on_failure"),
    ]
    engine.close()


@pytest.mark.parametrize("length", ["auto", None, 128])
def test_one_that_was_not_is_not(scripted, length):
    engine = opened(scripted, max_model_len=length)
    assert not [note for note in Notes.seen if note[1] == "set_max_model_len"]
    engine.close()
