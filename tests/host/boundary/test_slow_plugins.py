"""Records of an engine about the plugins that it runs: which is slow, and which was running."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from support.driving import FINAL
from support.fault_cases import run_all

from hardpoint import SamplingParams, plugins
from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary import activity, guard
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.logits import processor_runner
from hardpoint.plugins import (
    EvictionPolicy,
    KVEventPublisher,
    LogitsProcessor,
    Phase,
    SchedulingPolicy,
    StatSink,
    hookimpl,
)
from hardpoint.plugins.component import Source
from hardpoint.replicas.restarts import RestartBudget
from hardpoint.testing.scripted import ScriptedModel

HERE = __name__
SECONDS = 0.03
now = 0.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, **FINAL)
SOURCE = Source("x", "pkg:X", "dist", "1.0", "default")


def wait(*_, seconds=SECONDS):
    global now
    now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let only the plugins that wait take time: a busy machine would slow others."""
    counter = SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic)
    for module in (activity, guard, processor_runner):
        monkeypatch.setattr(module, "time", counter)


class Waits(LogitsProcessor):
    """Waits in the method that the request names; a third of the time in each of three calls."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        where: str

    def start(self, request):
        if (where := request.arguments[self.name].where) == "start":
            wait()
        return where

    def advance(self, state, token):
        if state == "advance":
            wait(seconds=SECONDS / 3)
        return state

    def apply(self, logits, rows):
        if rows.arguments()[0].where == "apply":
            wait()
        return logits


class WaitingPolicy(SchedulingPolicy):
    contract = 1
    key = wait


class WaitingEviction(EvictionPolicy):
    contract = 1

    def released(self, blocks):
        pass

    taken = dropped = released

    def evict(self, count):
        wait()
        yield from ()


class WaitingPublisher(KVEventPublisher):
    contract = 1
    publish = wait


class WaitingSink(StatSink):
    contract = 1
    record = wait


class WaitingHook:
    contract = 1

    @hookimpl
    def step_planned(self, record):
        wait()


class QuickHook:
    contract = 1

    @hookimpl
    def step_planned(self, record):
        pass


def engine_with(open_engine, *enable, slow_seconds=SECONDS * 0.8, **config):
    enabled = [f"{HERE}:{name}" for name in enable]
    return open_engine({"plugins": {"enable": enabled, "slow_seconds": slow_seconds}, **config})


@pytest.mark.parametrize("where", ["start", "advance", "apply"])
def test_a_slow_logits_processor_is_named_in_health(open_engine, where):
    engine = engine_with(open_engine, "Waits")
    args = {"waits": {"where": where}}
    used = SamplingParams(max_tokens=3, ignore_eos=True, plugin_args=args, **FINAL)
    run_all(engine, [(f"r{index}", [index + 1], used) for index in range(3)])
    slow = engine.health().slow["waits"]
    assert slow.count == (1 if where == "start" else 3)
    assert slow.message.startswith("plugin 'waits'")
    assert "more than plugins.slow_seconds" in slow.message


def test_slow_plugins_of_the_other_kinds_are_named_in_health(open_engine):
    engine = engine_with(
        open_engine,
        "WaitingHook",
        "QuickHook",
        max_model_len=64,
        scheduler={"policy": f"{HERE}:WaitingPolicy"},
        kv_cache={"num_blocks": 4, "eviction": f"{HERE}:WaitingEviction"},
        kv_events={"publishers": [f"{HERE}:WaitingPublisher"]},
        stats={"sinks": [f"{HERE}:WaitingSink"]},
    )
    for index in range(3):
        run_all(engine, [("r", [index] * 40, GREEDY)])
    slow = engine.health().slow
    engine.close()
    expected = ("policy", "eviction", "publisher", "sink", "hook")
    assert set(slow) == {f"waiting_{name}" for name in expected}
    assert "plugin 'waiting_hook'" in slow["waiting_hook"].message


def test_without_a_limit_nothing_is_slow(open_engine):
    engine = engine_with(open_engine, "WaitingHook", slow_seconds=0)
    run_all(engine, [("r", "x", GREEDY)])
    assert engine.health().slow == {}


def test_an_engine_that_fails_in_this_process_names_the_requests_of_the_step(
    open_engine, monkeypatch
):
    engine = engine_with(open_engine, "Waits")
    used = SamplingParams(ignore_eos=True, plugin_args={"waits": {"where": ""}})
    for request_id, params in (("a", used), ("b", GREEDY), ("c", used)):
        engine.add_request(request_id, "x", params)
    engine.step()
    monkeypatch.setattr(ScriptedModel, "forward", lambda *_: 1 / 0)
    with pytest.raises(EngineDeadError) as error:
        engine.step()
    users = "requests of that step that used third-party plugins: 'a' (waits), 'c' (waits)"
    assert str(error.value).endswith(f"ZeroDivisionError: division by zero; {users}")


# The record


def test_another_process_reads_the_innermost_method_and_the_step(tmp_path):
    written = Activity.create(tmp_path)
    read = Activity.open(tmp_path)
    assert (read.snapshot().call, read.snapshot().in_step) == (None, frozenset())
    outer, inner = PluginCalls(written, "models", SOURCE), PluginCalls(written, "hooks", SOURCE)
    seen = []

    def look():
        seen.append(read.snapshot())

    written.begin_step(["a", "b"])
    outer.run("forward", lambda: (inner.run("attend", look), look()))
    assert [snapshot.call.method for snapshot in seen] == ["attend", "forward"]
    assert str(seen[0].call) == "attend() of plugin 'x' (dist 1.0, pkg:X)"
    assert seen[0].in_step == {"a", "b"}
    written.end_step()
    assert (read.snapshot().call, read.snapshot().in_step) == (None, frozenset())
    written.begin_step(["a" * 1000] * 1000)
    assert read.snapshot().in_step is None  # too many: it may be any
    written.begin_step(["c"])
    assert read.snapshot().in_step == {"c"}


def test_two_deaths_count_only_within_a_minute():
    now = [0.0]
    budget = RestartBudget(enabled=True, max_per_minute=9, clock=lambda: now[0])
    calls = Activity()
    calls.number("hooks", SOURCE, "step_planned")
    calls.cells[0] = 1
    call = calls.snapshot().call
    assert not budget.died_in(call)
    now[0] = 61.0
    assert not budget.died_in(call)
    now[0] = 120.0
    assert budget.died_in(call)
