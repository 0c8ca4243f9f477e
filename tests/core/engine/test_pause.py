"""Pause, resume, sleep and wake-up of an engine core, without and with a loop."""

from __future__ import annotations

import time

import pytest
from support.core.engine_harness import (
    LoopRig,
    Rig,
    ScriptedExecutor,
    expected,
    request,
    worker_calls,
)

from hardpoint.core.engine.pause import PauseMode
from hardpoint.plugins import HardpointError, RequestError
from hardpoint.process.protocol import UtilityCall

ABORT, WAIT, KEEP = PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP
LONG = 60


def sleeps(rig):
    return [call for call in rig.executor.calls if call[0] in ("sleep", "wake_up")]


class Waits:
    """Has the core believe that a loop steps it, without one; the test reports when it is idle."""

    def __init__(self, rig):
        rig.core.enter_loop()
        self.rig = rig

    def run_until_idle(self):
        self.rig.run()
        self.rig.core.went_idle()


class TestWithoutALoop:
    def test_keep_holds_everybody_until_resumed(self):
        rig = Rig()
        rig.add("a", max_tokens=6)
        rig.step()
        assert rig.core.pause(KEEP).done()
        assert rig.core.is_paused()
        assert not rig.core.has_requests()
        assert rig.core.step() == ({}, False)
        rig.core.resume()
        assert not rig.core.is_paused()
        assert rig.run()["a"] == expected([1, 2, 3], 6)

    def test_abort_ends_everybody_and_the_next_step_reports_it(self):
        rig = Rig()
        rig.add("a", client_index=0)
        rig.add("b", client_index=0)
        rig.step()
        assert rig.core.pause(ABORT).done()
        rig.run()
        assert rig.ends == {"a": "abort", "b": "abort"}

    def test_after_an_abort_new_requests_wait(self):
        rig = Rig()
        rig.core.pause()
        rig.add("late", max_tokens=2)
        assert not rig.core.has_requests()
        rig.core.resume()
        assert rig.run()["late"] == expected([1, 2, 3], 2)

    def test_wait_cannot_be_had(self):
        rig = Rig()
        with pytest.raises(RequestError, match="mode: expected 'abort' or 'keep' in") as e:
            rig.core.pause(WAIT)
        assert isinstance(e.value, ValueError)
        assert not rig.core.is_paused()

    def test_an_unknown_mode_is_a_value_error(self):
        with pytest.raises(ValueError, match='mode: expected "abort" or "wait" or "keep", got'):
            Rig().core.pause("later")

    @pytest.mark.parametrize("clear", [True, False])
    def test_caches_are_cleared_unless_told_otherwise(self, clear):
        rig = Rig()
        rig.add("a", prompt=range(9), max_tokens=2)
        rig.run()
        rig.core.pause(KEEP, clear_cache=clear)
        rig.core.resume()
        rig.add("b", prompt=range(9), max_tokens=2)
        rig.run()
        assert (rig.core.scheduler_stats().prefix_cache.hit_tokens > 0) is not clear

    def test_steps_under_way_are_taken_first(self):
        rig = Rig(ScriptedExecutor(3, late=True))
        rig.executor.patient = True
        rig.add("a", max_tokens=6)
        rig.step()
        rig.step()
        rig.core.sleep(1, KEEP).result(0)
        assert rig.executor.pending == []
        rig.core.wake_up()
        assert rig.run()["a"] == expected([1, 2, 3], 6)


class TestWithALoop:
    def test_a_pause_is_over_once_nothing_is_left_to_do(self):
        rig = Rig()
        loop = Waits(rig)
        rig.add("a", max_tokens=4)
        rig.step()
        future = rig.core.pause(WAIT)
        rig.add("late", max_tokens=2)
        assert not future.done()
        loop.run_until_idle()
        assert future.result(0) is None
        assert rig.ends == {"a": "length"}

    def test_caches_are_cleared_then_and_not_before(self):
        rig = Rig()
        loop = Waits(rig)
        rig.add("a", prompt=range(9), max_tokens=2)
        rig.run()
        rig.add("b", prompt=range(9), max_tokens=4)
        rig.step()
        before = rig.cache.stats().hit_tokens
        assert before > 0
        resets = []
        original = rig.scheduler.reset_prefix_cache
        rig.scheduler.reset_prefix_cache = lambda **kw: (resets.append(kw), original(**kw))
        rig.core.pause(WAIT)
        rig.step()
        assert resets == []
        loop.run_until_idle()
        assert resets == [{"recompute_running": True}]

    def test_who_resumes_before_it_is_over_is_told_to_those_who_wait(self):
        rig = Rig()
        Waits(rig)
        rig.add("a", max_tokens=4)
        rig.step()
        future = rig.core.pause(WAIT)
        rig.core.resume()
        with pytest.raises(HardpointError, match="resumed before it was idle"):
            future.result(0)
        assert rig.run()["a"] == expected([1, 2, 3], 4)

    def test_a_reset_that_fails_reaches_the_future(self):
        rig = Rig()
        loop = Waits(rig)
        rig.scheduler.reset_prefix_cache = lambda **_: 1 / 0
        future = rig.core.pause(KEEP)
        loop.run_until_idle()
        with pytest.raises(ZeroDivisionError):
            future.result(0)

    def test_closing_fails_those_who_wait(self):
        rig = Rig()
        Waits(rig)
        rig.add("a")
        rig.step()
        future = rig.core.pause(WAIT)
        rig.core.close()
        with pytest.raises(HardpointError, match="the engine was closed"):
            future.result(0)


class TestSleep:
    def test_level_0_only_pauses(self):
        rig = Rig()
        rig.add("a", prompt=range(9), max_tokens=2)
        rig.run()
        rig.core.sleep(0, KEEP).result(0)
        assert rig.core.is_paused()
        assert not rig.core.is_sleeping()
        assert sleeps(rig) == []
        rig.core.wake_up(["scheduling"])
        assert not rig.core.is_paused()
        rig.add("b", prompt=range(9), max_tokens=2)
        rig.run()
        assert rig.core.scheduler_stats().prefix_cache.hit_tokens > 0

    @pytest.mark.parametrize("level", [1, 2])
    def test_workers_are_told_and_everything_goes_on_after(self, level):
        rig = Rig()
        rig.add("a", prompt=range(9), max_tokens=6)
        rig.step()
        rig.step()
        rig.core.sleep(level, KEEP).result(0)
        assert rig.core.is_sleeping()
        assert sleeps(rig) == [("sleep", level)]
        rig.add("b", max_tokens=2)
        assert not rig.core.has_requests()
        rig.core.wake_up()
        assert sleeps(rig)[1:] == [("wake_up", ["weights", "kv_cache"])]
        assert not rig.core.is_sleeping()
        assert not rig.core.is_paused()
        rig.run()
        assert rig.tokens == {"a": expected(range(9), 6), "b": expected([1, 2, 3], 2)}

    def test_waking_some_tags_does_not_resume_scheduling(self):
        rig = Rig()
        rig.core.sleep().result(0)
        rig.add("a", max_tokens=2)
        rig.core.wake_up(["weights"])
        assert rig.core.is_sleeping()
        assert rig.core.is_paused()
        assert not rig.core.has_requests()
        with pytest.raises(HardpointError, match=r"the engine sleeps \(kv_cache\)"):
            rig.core.resume()
        with pytest.raises(HardpointError, match="cannot be resumed while kv_cache is asleep"):
            rig.core.wake_up(["scheduling"])
        rig.core.wake_up(["kv_cache"])
        assert sleeps(rig)[1:] == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
        assert rig.run()["a"] == expected([1, 2, 3], 2)

    def test_waking_what_does_not_sleep_changes_nothing(self):
        rig = Rig()
        rig.core.pause(KEEP)
        rig.core.wake_up(["weights"])
        assert rig.core.is_paused()
        assert sleeps(rig) == []

    def test_while_it_sleeps_a_pause_lets_nobody_run(self):
        rig = Rig()
        loop = Waits(rig)
        rig.add("a", max_tokens=6)
        rig.step()
        rig.core.sleep(1, KEEP)
        loop.run_until_idle()
        rig.core.pause(WAIT)
        assert not rig.core.has_requests()

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda core: core.sleep(3), "level: expected 0, 1 or 2, got 3"),
            (lambda core: core.sleep(-1), "level: expected 0, 1 or 2, got -1"),
            (lambda core: core.wake_up(["model"]), "tags: expected some of weights, kv_cache, sch"),
        ],
    )
    def test_what_is_unknown_is_refused(self, call, words):
        rig = Rig()
        with pytest.raises(RequestError, match=words):
            call(rig.core)
        assert not rig.core.is_paused()

    def test_a_level_that_workers_cannot_do_ends_nobody(self):
        rig = Rig(sleep_levels=(2,))
        rig.add("a", max_tokens=3)
        rig.step()
        with pytest.raises(RequestError, match="level: expected 0 or 2, got 1, which the workers"):
            rig.core.sleep(1)
        assert not rig.core.is_paused()
        assert rig.run()["a"] == expected([1, 2, 3], 3)

    def test_sleeping_twice_is_refused(self):
        rig = Rig()
        rig.core.sleep(1)
        with pytest.raises(HardpointError, match=r"sleeps already \(weights, kv_cache\)"):
            rig.core.sleep(2)

    def test_a_second_sleep_before_the_first_one_began_is_refused(self):
        rig = Rig()
        loop = Waits(rig)
        rig.add("a", max_tokens=3)
        rig.step()
        first = rig.core.sleep(1, WAIT)
        with pytest.raises(HardpointError, match="is about to sleep already, once it is idle"):
            rig.core.sleep(2, ABORT)
        loop.run_until_idle()
        assert first.result(0) is None
        assert rig.ends == {"a": "length"}
        assert sleeps(rig) == [("sleep", 1)]

    def test_one_that_was_given_up_is_not_in_the_way(self):
        rig = Rig()
        loop = Waits(rig)
        rig.add("a", max_tokens=3)
        rig.step()
        rig.core.sleep(1, WAIT).cancel()
        given_up = rig.core.sleep(2, WAIT)
        rig.core.resume()
        assert isinstance(given_up.exception(0), HardpointError)
        rig.core.sleep(1, WAIT)
        loop.run_until_idle()
        assert sleeps(rig) == [("sleep", 1)]

    def test_a_worker_that_cannot_is_told_and_the_engine_can_go_on(self):
        rig = Rig()
        rig.executor.rpc["sleep"] = HardpointError("level: expected 0 or 2, got 1")
        future = rig.core.sleep(1)
        with pytest.raises(HardpointError, match="expected 0 or 2"):
            future.result(0)
        assert rig.core.is_paused()
        assert not rig.core.is_sleeping()
        rig.core.resume()
        rig.add("a", max_tokens=2)
        assert rig.run()["a"] == expected([1, 2, 3], 2)


class TestUpdatesOfWeights:
    """A user and an update, which pause an engine at the same time."""

    def began(self, **fields):
        """A rig with a request that has begun, of a loop that the test runs."""
        rig = Rig(updates=True)
        rig.add("a", max_tokens=6, **fields)
        loop = Waits(rig)
        rig.step()
        return rig, loop

    def call(self, rig, method, **arguments):
        return rig.core.call_part("weight_updates", method, arguments)

    def prepare(self, rig, version, mode, *, recompute=True):
        how = {"ticket": int(version), "mode": str(mode), "recompute": recompute}
        self.call(rig, "prepare", updates=[], version=version, **how)
        return how

    def use(self, rig, version, mode, *, recompute=True):
        return self.call(rig, "use", **self.prepare(rig, version, mode, recompute=recompute))

    def test_an_engine_that_is_about_to_sleep_refuses_it(self):
        rig, loop = self.began()
        how = self.prepare(rig, "1", KEEP)
        asleep = rig.core.sleep(1, WAIT)
        for call in (
            lambda: self.call(rig, "use", **how),
            lambda: self.prepare(rig, "1", KEEP),
        ):
            with pytest.raises(HardpointError, match="the engine is about to sleep already"):
                call()
        loop.run_until_idle()
        assert asleep.result(0) is None
        assert rig.tokens["a"] == expected([1, 2, 3], 6)
        rig.add("b", max_tokens=2)
        assert not rig.core.has_requests()
        rig.core.wake_up()
        assert rig.run()["b"] == expected([1, 2, 3], 2)

    def test_a_sleep_that_follows_waits_for_it(self):
        rig, loop = self.began()
        used, asleep = self.use(rig, "1", WAIT), rig.core.sleep(1, KEEP)
        loop.run_until_idle()
        assert (used.result(0), asleep.result(0)) == (True, None)
        names = worker_calls(rig.executor)
        assert names.index("UseWeights") < names.index("sleep")
        assert not rig.core.has_requests()
        rig.core.wake_up()
        assert rig.run()["a"] == expected([1, 2, 3], 6)

    @pytest.mark.parametrize("drops", [True, False])
    def test_one_that_is_given_up_is_over_before_the_next(self, drops):
        rig, loop = self.began()
        first = self.use(rig, "1", WAIT, recompute=False)
        if drops:
            self.call(rig, "drop")
            assert not rig.core.is_paused()
        second = self.use(rig, "2", ABORT)
        with pytest.raises(HardpointError, match="the update of the weights was given up"):
            first.result(0)
        loop.run_until_idle()
        assert second.result(0) is True
        assert worker_calls(rig.executor).count("UseWeights") == 1
        assert not rig.core.is_paused()
        rig.add("b", max_tokens=2)
        assert rig.run()["b"] == expected([1, 2, 3], 2)

    def test_a_pause_that_comes_meanwhile_stays(self):
        rig, loop = self.began()
        used, paused = self.use(rig, "1", WAIT), rig.core.pause(KEEP)
        loop.run_until_idle()
        assert (used.result(0), paused.result(0)) == (True, None)
        assert rig.core.is_paused()
        assert not rig.core.has_requests()
        assert len(rig.tokens["a"]) < 6
        rig.core.resume()
        assert rig.run()["a"] == expected([1, 2, 3], 6)

    @pytest.mark.parametrize("pauses", [True, False])
    def test_resuming_does_not_end_it(self, pauses):
        rig, loop = self.began()
        paused = rig.core.pause(WAIT) if pauses else None
        used = self.use(rig, "1", WAIT)
        rig.core.resume()
        assert not rig.core.is_paused()
        if paused is not None:
            with pytest.raises(HardpointError, match="resumed before it was idle"):
                paused.result(0)
        rig.add("late", max_tokens=2)
        loop.run_until_idle()
        assert used.result(0) is True
        assert (rig.tokens["a"], rig.ends) == (expected([1, 2, 3], 6), {"a": "length"})
        assert rig.run()["late"] == expected([1, 2, 3], 2)

    def test_requests_that_a_pause_holds_stay_held(self):
        rig, loop = self.began()
        rig.core.pause(KEEP)
        loop.run_until_idle()
        before = list(rig.tokens["a"])
        used = self.use(rig, "1", WAIT)
        loop.run_until_idle()
        assert used.result(0) is True
        assert rig.tokens["a"] == before
        assert rig.core.is_paused()
        rig.core.resume()
        assert rig.run()["a"] == expected([1, 2, 3], 6)

    def test_a_pause_that_waits_for_running_requests_goes_on_waiting(self):
        rig, loop = self.began()
        paused, used = rig.core.pause(WAIT), self.use(rig, "1", KEEP)
        rig.core.went_idle()
        assert used.result(0) is True
        assert not paused.done()
        loop.run_until_idle()
        assert paused.result(0) is None
        assert rig.ends == {"a": "length"}


class TestInABusyLoop:
    def call(self, rig, number, method, *args):
        rig.send(UtilityCall(0, number, method, list(args)))

    def answer(self, rig, number):
        rig.until(lambda: number in rig.answers)
        return rig.answers[number]

    def test_abort_tells_every_client_concerned_before_the_answer(self):
        with LoopRig(clients=2) as rig:
            rig.send(request("a", max_tokens=LONG), request("b", client_index=1, max_tokens=LONG))
            self.call(rig, 1, "pause", "abort")
            assert self.answer(rig, 1).failure is None
            assert rig.ends == {"a": "abort", "b": "abort"}
            assert {client for client, _ in rig.messages} == {0, 1}

    def test_wait_answers_when_the_running_ones_have_ended(self):
        with LoopRig() as rig:
            rig.executor.during = lambda plan: rig.tokens  # nothing, in every step
            rig.send(request("a", max_tokens=LONG))
            rig.until(lambda: rig.tokens.get("a"))
            self.call(rig, 1, "pause", "wait")
            rig.send(request("late", max_tokens=2))
            assert self.answer(rig, 1).failure is None
            assert rig.ends == {"a": "length"}
            self.call(rig, 2, "is_paused")
            assert self.answer(rig, 2).result.value is True
            self.call(rig, 3, "resume")
            rig.until(lambda: "late" in rig.ends)

    def test_a_request_that_a_pause_holds_times_out(self):
        with LoopRig() as rig:
            self.call(rig, 1, "pause", "keep")
            self.answer(rig, 1)
            rig.send(request("a", timeout=5.0))
            rig.now = time.monotonic() + 100.0  # by the clock that its arrival is read from
            rig.until(lambda: rig.ends == {"a": "timeout"})

    def test_sleep_fails_by_its_answer(self):
        with LoopRig() as rig:
            rig.executor.rpc["sleep"] = HardpointError("no")
            self.call(rig, 1, "sleep", 2, "keep")
            assert (self.answer(rig, 1).failure, self.answer(rig, 1).kind) == (
                "no",
                "HardpointError",
            )
            self.call(rig, 2, "sleep", 7)
            assert "level: expected 0, 1 or 2, got 7" in self.answer(rig, 2).failure
