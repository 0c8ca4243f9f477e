"""Executors, hooks and commands with one mistake each fail their rule; correct ones pass."""

from __future__ import annotations

import inspect
import re

import pytest
from support.broken import executors
from support.searching import kit_examples

from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.testing import ExecutorSuite
from hardpoint.testing import suite as kit_suite
from hardpoint.testing.running import executor_suite

pytest_plugins = ["hardpoint.testing"]

SEED = 20_240_601

# component, test that it fails, rule, pattern of the message
EXECUTORS = [
    (executors.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (executors.Drops, "results", "results", "got 0 tokens, the worker sampled 1"),
    (executors.Doubles, "results", "results", "got 2 tokens, the worker sampled 1"),
    (executors.OffByOne, "results", "results", r"got token \d+; a worker that ran each step once"),
    (executors.RunsTwice, "results", "results", r"got token \d+; a worker that ran each step once"),
    (executors.Late, "results", "results", "was to sample step 1 when step 0 had run last"),
    (executors.NoFuture, "results", "futures", "execute_model returned ModelRunnerOutput"),
    (executors.NeverEnds, "results", "futures", "of sample_tokens was not done after 0.2 s"),
    (executors.NoResults, "calls", "collective_rpc", r"1 workers returned .*_rpc returned \[\]"),
    (executors.CallsTwice, "calls", "collective_rpc", r"returned \[{0, 1000}, {0, 1000}\]"),
    (executors.SwallowsErrors, "errors", "errors", "whose worker raised WorkerFailure gave a res"),
    (executors.RenamesErrors, "errors", "errors", "raised RuntimeError: a worker failed"),
    (executors.NeverSleeps, "sleep", "sleep", r"after sleep\(1,\) a worker is not at level 1"),
    (executors.ClaimsTwo, "pipeline", "pipeline", "is 2, but execute_model returned only when its"),
    (executors.ClaimsNone, "pipeline", "pipeline", "max_concurrent_batches is 0"),
    (executors.ReportsClose, "failure", "failure", "close called the callback with RuntimeError"),
    (executors.Silent, "failure", "failure", "a worker was lost, and the callback was not called"),
    (executors.LeaksThread, "close", "close", r"there are more threads \(\d+, before \d+\)"),
    (executors.LeaksFile, "close", "close", r"there are more open files \(\d+, before \d+\)"),
    (executors.ClosesOnce, "close", "exceptions", "RuntimeError: closed already"),
    (executors.KeepsWorkers, "close", "close", r"workers of ranks \[0\] are not closed"),
    (executors.OffByOne, "tokens", "tokens", r"request 'r\d' got \[.*, with uniproc it gets \["),
]  # fmt: skip


class TestUniproc(ExecutorSuite):
    executor = UniprocExecutor
    examples = kit_examples()


class TestThreaded(ExecutorSuite):
    """A pipeline that wraps uniproc."""

    executor = executors.Threaded
    examples = kit_examples()

    def lose_worker(self, executor):
        executor.lose()


@pytest.fixture
def brief(monkeypatch):
    """Wait little, and stop at the first failing case instead of shrinking it."""
    monkeypatch.setattr(kit_suite, "_SHRINKING_SECONDS", -1.0)
    monkeypatch.setattr(executor_suite, "_SECONDS", 0.2)
    monkeypatch.setattr(executor_suite, "_CLOSE_SECONDS", 0.1)


def outcome(suite, attributes, test):
    """Return the message with which a test fails; None if it passes or is skipped."""
    instance = type("TestBroken", (suite,), {**attributes, "replay_seed": SEED})()
    try:
        getattr(instance, f"test_{test}")()
    except pytest.skip.Exception:
        return None
    except pytest.fail.Exception as failure:
        return str(failure)
    return None


def check(suite, attributes, test, rule, pattern):
    message = outcome(suite, attributes, test)
    assert message is not None, f"{test} let it pass"
    assert re.search(f" breaks a rule.\n  rule: (?:{rule})", message), message
    assert re.search(pattern, message), message
    assert "\n  fix: " in message


def name(value):
    return getattr(value, "__name__", None) or (value if str(value).isidentifier() else "")


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("cls", "test", "rule", "pattern"), EXECUTORS, ids=name)
def test_a_broken_executor_fails_its_rule(cls, test, rule, pattern):
    lose = {"lose_worker": lambda _self, executor: executor.lose()} if "lose" in dir(cls) else {}
    check(ExecutorSuite, {"executor": cls, **lose}, test, rule, pattern)


@pytest.mark.parametrize(
    ("suite", "broken_ones"), [(ExecutorSuite, EXECUTORS)], ids=name
)
def test_every_test_catches_a_component(suite, broken_ones):
    tests = {test for test, _ in inspect.getmembers(suite) if test.startswith("test_")}
    assert {f"test_{test}" for _, test, _, _ in broken_ones} == tests
