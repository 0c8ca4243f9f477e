"""An engine process without progress counts as hung after a stated time, and not before."""

from __future__ import annotations

import pytest

from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.hang_watch import HangWatch
from hardpoint.plugins.component import Source


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def checks(watch, clock, seconds, do=lambda: None):
    """Check every second for so long; return the first finding."""
    for _ in range(seconds):
        clock.now += 1
        do()
        if (found := watch.check()) is not None:
            return found
    return None


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def activity():
    return Activity()


def test_a_process_without_a_sign_of_life_hangs(activity, clock):
    watch = HangWatch(activity, 10, 0, clock)
    assert checks(watch, clock, 10) is None
    message = "hangs: it gave no sign of life for 10 s (engine.hung_process_seconds)"
    assert checks(watch, clock, 1) == message


def test_one_that_runs_never_does(activity, clock):
    watch = HangWatch(activity, 10, 0, clock)
    assert checks(watch, clock, 1000, activity.beat) is None


def test_a_long_step_is_not_a_process_without_a_sign_of_life(activity, clock):
    watch = HangWatch(activity, 10, 100, clock)
    activity.turn()
    assert checks(watch, clock, 100, activity.beat) is None


def test_a_step_that_does_not_end_hangs_and_the_plugin_is_named(activity, clock):
    watch = HangWatch(activity, 10, 100, clock)
    activity.turn()
    calls = PluginCalls(activity, "samplers", Source.of_module("slow", "acme:Slow", "default"))
    activity.cells[0] = calls.number("sample")
    message = (
        "hangs: a step takes longer than 100 s (engine.hung_step_seconds), in sample() of plugin "
        "'slow' (acme:Slow)"
    )
    assert checks(watch, clock, 102, activity.beat) == message


def test_a_worker_in_another_thread_has_a_call_of_its_own(activity):
    source = Source.of_module("slow", "acme:Slow", "default")
    engine = PluginCalls(activity, "scheduling_policies", source)
    worker = PluginCalls(activity.of_worker_thread(), "models", source)

    def running():
        call = activity.snapshot().call
        return call and call.method

    engine.cells[0] = engine.number("key")
    worker.cells[0] = worker.number("forward")
    assert running() == "key"
    engine.cells[0] = 0
    assert running() == "forward"
    worker.cells[0] = 0
    assert running() is None


def test_many_steps_and_no_step_are_progress(activity, clock):
    watch = HangWatch(activity, 0, 10, clock)
    assert checks(watch, clock, 50, lambda: (activity.turn(), activity.turn())) is None
    assert checks(watch, clock, 50) is None  # idle
    assert checks(watch, clock, 50, lambda: [activity.turn() for _ in range(3)]) is None


def test_the_time_of_a_program_that_did_not_run_itself_does_not_count(activity, clock):
    watch = HangWatch(activity, 10, 10, clock)
    activity.turn()
    clock.now += 1000
    assert watch.check() is None


def test_without_limits_nothing_is_checked(activity):
    assert HangWatch(activity, 0, 0).interval_s is None
    assert HangWatch(activity, 300, 1800).interval_s == 1.0
    assert HangWatch(activity, 0, 1).interval_s == 0.25
