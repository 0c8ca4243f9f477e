"""The busy loop of an engine process, in a thread, with queues in the place of sockets."""

from __future__ import annotations

import itertools
import queue
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from support.core.engine_harness import (
    PATIENCE_S,
    LoopRig,
    MidStep,
    ScriptedExecutor,
    expected,
    request,
)
from support.processes import ROOT

from hardpoint.errors import PluginFaultError
from hardpoint.plugins import RequestError
from hardpoint.process.engine.loop import Abort, LoopFailure, LoopOptions, Rejection
from hardpoint.process.protocol import UtilityCall

LONG = 150
ENDLESS = 3900  # tokens: more than a minute, where each step takes 0.02 s
ROOMY = {"blocks": 1024, "max_model_len": 4000}


class Slow(ScriptedExecutor):
    """Takes a moment for each step."""

    def __init__(self):
        super().__init__()
        self.during = lambda plan: time.sleep(0.02)


def lasts(rig):
    """The last outputs by request id."""
    return {
        output.request_id: output
        for _, message in rig.messages
        if hasattr(message, "outputs")
        for output in message.outputs
        if output.finished
    }


class TestInput:
    def test_requests_that_are_queued_together_share_a_step(self):
        rig = LoopRig()
        rig.send(request("a"), request("b"), request("c"))
        with rig:
            rig.until(lambda: len(rig.ends) == 3)
        assert rig.tokens == {name: expected([1, 2, 3], 4) for name in "abc"}
        steps = [call for call in rig.executor.calls if call[0] == "execute"]
        assert len(steps) <= 5

    def test_an_abort_right_behind_its_request_wins(self):
        rig = LoopRig()
        rig.send(request("a", max_tokens=LONG), ["a"])
        with rig:
            rig.until(lambda: rig.ends == {"a": "abort"})
        assert not rig.tokens["a"]

    def test_an_abort_in_mid_step_gives_no_token_of_it(self):
        rig = LoopRig()
        step = MidStep(rig.executor)
        with rig:
            rig.send(request("a", max_tokens=LONG))
            assert step.begun.wait(PATIENCE_S)
            rig.send(["a"])
            step.go_on.set()
            rig.until(lambda: rig.ends == {"a": "abort"})
        assert not rig.tokens["a"]

    def test_an_abort_that_was_handled_does_not_hit_the_next_request_of_that_id(self):
        rig = LoopRig()
        rig.send(request("a", prompt=[5], max_tokens=2), ["a"], request("a", max_tokens=3))
        with rig:
            rig.until(lambda: rig.ends == {"a": "length"})
        assert rig.tokens["a"] == expected([1, 2, 3], 3)

    @pytest.mark.parametrize("in_step", [False, True])
    def test_an_abort_ends_requests_of_its_client_alone(self, in_step):
        rig = LoopRig(clients=2)
        step = MidStep(rig.executor)
        rig.send(request("a"), request("b", client_index=1, max_tokens=LONG))
        if not in_step:
            rig.queues.abort(["a", "b"], 1)
        with rig:
            assert step.begun.wait(PATIENCE_S)
            if in_step:
                rig.queues.abort(["a", "b"], 1)
            step.go_on.set()
            rig.until(lambda: rig.ends == {"a": "length", "b": "abort"})
        assert rig.tokens["a"] == expected([1, 2, 3], 4)

    def test_aborts_that_come_in_mid_step_are_one_call(self):
        rig = LoopRig()
        step = MidStep(rig.executor)
        calls, finish = [], rig.scheduler.finish_requests
        rig.scheduler.finish_requests = lambda ids, why: (
            calls.append(list(ids)),
            finish(ids, why),
        )[1]
        rig.send(*[request(name, max_tokens=LONG) for name in "abc"])
        with rig:
            assert step.begun.wait(PATIENCE_S)
            rig.send(["a"], ["b", "unknown"], ["c"])
            step.go_on.set()
            rig.until(lambda: len(rig.ends) == 3)
            first = calls[0]
        assert first == ["a", "b", "unknown", "c"]

    def test_while_idle_the_fast_lane_is_emptied(self):
        with LoopRig() as rig:
            for _ in range(20):
                rig.send(["unknown"])
            rig.until(lambda: rig.queues.urgent_aborts.empty() and rig.queues.input.empty())
            rig.send(request("unknown"))
            rig.until(lambda: rig.ends == {"unknown": "length"})

    def test_a_second_live_id_is_refused_and_the_first_goes_on(self):
        rig = LoopRig(clients=2)
        rig.send(request("a", max_tokens=20), request("a", prompt=[9], client_index=1))
        with rig:
            rig.until(lambda: rig.tokens.get("a") == expected([1, 2, 3], 20))
        client, message = next(item for item in rig.messages if item[1].outputs[0].error)
        assert client == 1
        assert message.outputs[0].error == "request_id: 'a' is the id of a live request"
        assert message.outputs[0].error_kind == "RequestError"
        assert message.finished_requests == {"a"}

    def test_a_refusal_does_not_end_the_live_request_of_its_id(self, caplog):
        rig = LoopRig()
        rig.send(request("a", max_tokens=20), request("a", prompt=[9]))
        rig.send(Rejection("a", 0, RequestError("prompt: too odd")))
        with rig:
            rig.until(lambda: rig.ends == {"a": "length"})
        assert rig.tokens["a"] == expected([1, 2, 3], 20)
        assert not [o for _, message in rig.messages for o in message.outputs if o.error]
        dropped = "dropped a request of client 0 that has the id of its live request 'a': "
        words = [record.getMessage() for record in caplog.records]
        assert f"{dropped}request_id: 'a' is the id of a live request" in words
        assert f"{dropped}prompt: too odd" in words

    def test_what_was_refused_before_is_answered(self):
        with LoopRig() as rig:
            rig.send(Rejection("a", 0, RequestError("prompt: too odd")))
            rig.until(lambda: rig.ends == {"a": "error"})
        assert lasts(rig)["a"].error == "prompt: too odd"

    def test_requests_that_can_never_run_harm_nobody(self):
        with LoopRig() as rig:
            rig.send(request("big", prompt=range(500)), request("a"))
            rig.until(lambda: len(rig.ends) == 2)
        assert rig.ends == {"big": "error", "a": "length"}
        assert (
            "too long: 500 tokens; this model's maximum context length is 200 tokens"
            in lasts(rig)["big"].error
        )


class TestIdle:
    def test_an_idle_loop_waits_without_a_step(self):
        with LoopRig() as rig:
            rig.send(request("a", max_tokens=1))
            rig.until(lambda: rig.ends)
            rig.until(lambda: not rig.core.has_requests())
            rig.send(UtilityCall(0, 5, "is_paused"))
            rig.until(lambda: 5 in rig.answers)  # so the step that found no more is over
            calls = len(rig.executor.calls)
            time.sleep(0.05)
            assert len(rig.executor.calls) == calls

    @pytest.mark.parametrize("unfinished", [1, 0])  # none: a connector saves what ended
    def test_where_nothing_can_be_executed_it_sleeps_a_little(self, unfinished):
        rig = LoopRig()
        steps = []
        rig.core.step = lambda late_aborts: (steps.append(time.perf_counter()), ({}, False))[1]
        rig.core.num_unfinished_requests = lambda: unfinished if len(steps) < 20 else 0
        rig.core.has_requests = lambda: len(steps) < 20
        with rig:
            rig.until(lambda: len(steps) >= 20)
        gaps = [later - first for first, later in itertools.pairwise(steps)]
        assert min(gaps) >= 0.001

    def test_after_a_step_that_executed_it_does_not_sleep(self, monkeypatch):
        naps = []
        monkeypatch.setattr(
            "hardpoint.process.engine.loop.time", SimpleNamespace(sleep=naps.append)
        )
        rig = LoopRig()
        rig.send(request("a", max_tokens=50))
        rig.loop.request_shutdown()
        rig.loop._options = LoopOptions(drain_seconds=600)
        rig.loop.run()
        rig.collect()
        assert naps == []


class TestShutdown:
    def test_an_idle_loop_ends_at_a_signal(self):
        with LoopRig() as rig:
            time.sleep(0.02)
            rig.loop.request_shutdown()
            rig.join()
        assert rig.error is None

    def test_without_time_to_drain_requests_are_aborted_and_told(self):
        with LoopRig(Slow(), **ROOMY) as rig:
            rig.send(request("a", max_tokens=ENDLESS))
            rig.until(lambda: rig.tokens.get("a"))
            rig.loop.request_shutdown()
            rig.join()
        assert rig.ends == {"a": "abort"}

    def test_an_abort_in_the_last_step_is_told(self):
        rig = LoopRig()
        step = MidStep(rig.executor)
        with rig:
            rig.send(request("a", max_tokens=LONG))
            assert step.begun.wait(PATIENCE_S)
            rig.send(["a"])
            rig.loop.request_shutdown()
            step.go_on.set()
            rig.join()
        assert rig.ends == {"a": "abort"}

    def test_with_time_to_drain_they_end_by_themselves(self):
        rig = LoopRig(options=LoopOptions(drain_seconds=600))
        step = MidStep(rig.executor)
        with rig:
            rig.send(request("a", max_tokens=40))
            assert step.begun.wait(PATIENCE_S)
            rig.loop.request_shutdown()
            step.go_on.set()
            rig.join()
        assert rig.ends == {"a": "length"}
        assert rig.tokens["a"] == expected([1, 2, 3], 40)

    def test_the_limit_is_enforced(self):
        with LoopRig(Slow(), options=LoopOptions(drain_seconds=0.1), **ROOMY) as rig:
            rig.send(request("a", max_tokens=ENDLESS))
            rig.until(lambda: rig.tokens.get("a"))
            began = time.monotonic()
            rig.loop.request_shutdown()
            rig.join()
            assert 0.1 <= time.monotonic() - began < PATIENCE_S / 2
        assert rig.ends == {"a": "abort"}

    def test_a_second_signal_ends_at_once(self):
        with LoopRig(Slow(), options=LoopOptions(drain_seconds=600), **ROOMY) as rig:
            rig.send(request("a", max_tokens=ENDLESS))
            rig.until(lambda: rig.tokens.get("a"))
            rig.loop.request_shutdown()
            time.sleep(0.05)
            assert rig.is_running
            rig.loop.request_shutdown()
            rig.join()
        assert rig.ends == {"a": "abort"}

    def test_requests_that_a_pause_holds_do_not_hold_the_end(self):
        rig = LoopRig(options=LoopOptions(drain_seconds=600))
        rig.send(request("a", max_tokens=LONG), UtilityCall(0, 1, "pause", ["keep"]))
        with rig:
            rig.until(lambda: 1 in rig.answers)
            rig.loop.request_shutdown()
            rig.join()
        assert rig.ends == {"a": "abort"}

    def test_whoever_comes_during_the_shutdown_gets_an_answer(self):
        rig = LoopRig(options=LoopOptions(drain_seconds=600))
        step = MidStep(rig.executor)
        with rig:
            rig.send(request("a", max_tokens=40))
            assert step.begun.wait(PATIENCE_S)
            rig.loop.request_shutdown()
            rig.send(request("late"), UtilityCall(0, 7, "scheduler_stats"))
            next_step = MidStep(rig.executor)
            step.go_on.set()
            rig.until(lambda: "late" in rig.ends and 7 in rig.answers)
            next_step.go_on.set()
            rig.join()
        assert lasts(rig)["late"].error == "the engine is shutting down"
        assert lasts(rig)["late"].error_kind == "EngineDeadError"
        assert rig.answers[7].failure == "the engine is shutting down"
        assert rig.tokens["a"] == expected([1, 2, 3], 40)

    def test_whoever_came_after_the_signal_and_was_not_seen_gets_one_too(self):
        rig = LoopRig()
        rig.loop.request_shutdown()
        rig.send(request("late"), UtilityCall(0, 7, "scheduler_stats"))
        rig.loop.run()
        rig.collect()
        assert rig.ends == {"late": "error"}
        assert rig.answers[7].failure == "the engine is shutting down"

    def test_who_waits_for_a_pause_is_told(self):
        with LoopRig(Slow(), **ROOMY) as rig:
            rig.send(request("a", max_tokens=ENDLESS))
            rig.until(lambda: rig.tokens.get("a"))
            rig.send(UtilityCall(0, 1, "pause", ["wait"]))
            time.sleep(0.1)
            rig.collect()
            assert 1 not in rig.answers
            rig.loop.request_shutdown()
            rig.loop.request_shutdown()
            rig.join()
        assert "the engine is shutting down" in rig.answers[1].failure


class TestFailures:
    def test_a_step_that_fails_ends_the_loop_with_its_error(self):
        with LoopRig() as rig:
            rig.executor.fail_at[2] = ValueError("CUDA error")
            rig.send(request("a"))
            rig.join()
        assert rig.error is rig.executor.fail_at[2]

    def test_an_executor_that_fails_beside_a_step_ends_it_too(self):
        with LoopRig() as rig:
            cause = OSError("worker 3 was killed")
            rig.until(lambda: rig.is_running)
            rig.executor.lost(cause)
            rig.join()
        assert isinstance(rig.error, PluginFaultError)
        assert str(rig.error) == "the executor failed: OSError: worker 3 was killed"
        assert rig.error.__cause__ is cause

    def test_a_failure_of_a_thread_ends_it_too(self):
        with LoopRig() as rig:
            rig.send(LoopFailure(OSError("too many open files")))
            rig.join()
        assert str(rig.error) == "too many open files"


class TestCalls:
    def test_a_call_is_answered_between_steps(self):
        with LoopRig(Slow(), **ROOMY) as rig:
            rig.send(request("a", max_tokens=ENDLESS))
            rig.until(lambda: rig.tokens.get("a"))
            rig.send(UtilityCall(0, 5, "scheduler_stats"))
            rig.until(lambda: 5 in rig.answers)
            assert rig.answers[5].result.value.num_running == 1

    def test_a_future_does_not_block_the_loop(self):
        future = Future()
        with LoopRig() as rig:
            rig.core.pause = lambda: future
            rig.send(UtilityCall(0, 5, "pause"), request("a"))
            rig.until(lambda: rig.ends == {"a": "length"})
            assert 5 not in rig.answers
            future.set_result(None)
            rig.until(lambda: 5 in rig.answers)
            assert rig.answers[5].result.value is None

    def test_a_call_that_fails_harms_nobody(self):
        with LoopRig() as rig:
            rig.send(UtilityCall(0, 5, "close"), UtilityCall(0, 6, "why_waiting", [["x"]]))
            rig.send(request("a"))
            rig.until(lambda: rig.ends and len(rig.answers) == 2)
        assert rig.answers[5].failure.startswith("method: expected one of call_part, ")
        assert "'x' is not a live request" in rig.answers[6].failure


def test_an_abort_is_void_once_delivered_in_whatever_order_the_queues_have_them():
    """Several threads put aborts: the urgent ones need not be in the order of the input."""
    rig = LoopRig()
    rig.add("before")  # so that the loop steps at once: one that waits drops urgent aborts
    first, second = Abort(["a"], 0), Abort(["b"], 0)
    for abort in (second, first):
        rig.queues.urgent_aborts.put(abort)
    rig.send(request("a", prompt=[9]), first, request("a"), request("b"))
    with rig:
        rig.until(lambda: rig.ends == {"before": "length", "a": "length", "b": "abort"})
    assert rig.tokens["a"] == expected([1, 2, 3], 4)


def test_signals_may_come_while_the_queue_is_being_read():
    rig = LoopRig()
    assert isinstance(rig.queues.input, queue.SimpleQueue)  # whose put can be interrupted by itself


HANGS = """
import sys
from pathlib import Path
from support.core.engine_harness import LoopRig, request
from support.waiting import wait_until
from hardpoint.process.engine.loop import LoopOptions

report = Path(sys.argv[1])
rig = LoopRig(options=LoopOptions(watchdog_seconds=0.5, watchdog_exits={exits}))
step = rig.core.step
def hang_here(late_aborts):
    rig.core.step = step
    wait_until(lambda: "in hang_here" in report.read_text(), what="the report")
    return step(late_aborts)
rig.core.step = hang_here
with rig:
    rig.send(request("a"))
    rig.until(lambda: rig.ends)
print("went on")
"""


@pytest.mark.parametrize("exits", [False, True])
def test_a_step_that_hangs_is_reported_with_all_stacks(exits, tmp_path):
    code = HANGS.format(exits=exits)
    with (tmp_path / "stderr").open("w") as stderr:
        run = subprocess.run(
            [sys.executable, "-c", code, stderr.name],
            cwd=ROOT / "tests",
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=300,
            check=False,
        )
    report = (tmp_path / "stderr").read_text()
    assert "in hang_here" in report
    assert report.count("Thread 0x") >= 2
    assert (run.returncode, run.stdout.strip()) == ((1, "") if exits else (0, "went on"))
