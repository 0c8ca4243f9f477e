"""The engine core: its step, what it refuses, what it logs and what it passes on."""

from __future__ import annotations

import inspect
import logging
import sys

import pytest
from support.core.engine_harness import Rig, ScriptedExecutor, expected, interrupt_of_user, request

from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.core.engine.step import StepRunner
from hardpoint.core.engine.step_log import log_failure
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import EngineConfig, HardpointError, RequestError, SchedulerOutput
from hardpoint.plugins.requests.stats import PluginMeter


class TestStep:
    def test_without_requests_nothing_is_called(self):
        rig = Rig()
        assert rig.core.step() == ({}, False)
        assert rig.executor.calls == []

    def test_sampling_follows_a_forward_pass_that_gives_no_result(self):
        rig = Rig()
        rig.add("a", max_tokens=1)
        assert rig.step() is True
        assert rig.executor.calls == [("execute", 1), ("sample", 1)]
        assert rig.tokens["a"] == expected([1, 2, 3], 1)

    def test_a_step_that_only_tells_of_ended_requests_computes_nothing(self):
        rig = Rig()
        rig.add("a", max_tokens=1)
        rig.step()
        assert rig.core.has_requests()
        assert rig.step() is False
        assert rig.executor.calls[-1] == ("execute", 2)
        assert rig.executor.rows == {}
        assert not rig.core.has_requests()

    def test_outputs_are_by_client(self):
        rig = Rig()
        rig.add("a", client_index=0)
        rig.add("b", client_index=3)
        outputs, _ = rig.core.step()
        assert {c: [o.request_id for o in m.outputs] for c, m in outputs.items()} == {
            0: ["a"],
            3: ["b"],
        }

    def test_late_aborts_take_effect_before_the_update(self):
        rig = Rig()
        rig.add("a", max_tokens=3)
        rig.add("b", max_tokens=3)
        rig.step("a", "unknown")
        assert not rig.tokens.get("a")
        rig.run()
        assert not rig.tokens["a"]
        assert rig.ends == {"a": "abort", "b": "length"}
        assert rig.tokens["b"] == expected([1, 2, 3], 3)

    def test_late_aborts_are_asked_for_after_the_model_ran(self):
        rig = Rig()
        rig.add("a")
        seen = []
        rig.core.step(lambda: (seen.append(list(rig.executor.calls)), [])[1])
        assert seen == [[("execute", 1), ("sample", 1)]]


class TestRequests:
    def test_a_live_id_is_refused_and_the_first_one_goes_on(self):
        rig = Rig()
        rig.add("a", max_tokens=4)
        rig.step()
        with pytest.raises(RequestError, match="request_id: 'a' is the id of a live request"):
            rig.add("a", prompt=[9], max_tokens=2)
        assert rig.run()["a"] == expected([1, 2, 3], 4)

    def test_an_id_is_free_again_once_its_request_ended(self):
        rig = Rig()
        rig.add("a", max_tokens=1)
        rig.step()
        rig.add("a", prompt=[9], max_tokens=1)
        rig.run()
        assert rig.tokens["a"] == expected([1, 2, 3], 1) + expected([9], 1)

    def test_a_scheduler_that_shows_no_live_requests_can_be_used(self):
        class Shy(DefaultScheduler):
            contract = 1

            def live_request(self, request_id):
                raise NotImplementedError

        rig = Rig(scheduler=Shy)
        rig.add("a", max_tokens=2)
        assert rig.run()["a"] == expected([1, 2, 3], 2)

    def test_abort_of_unknown_ids_does_nothing(self):
        rig = Rig()
        rig.add("a", max_tokens=2)
        assert rig.core.abort_requests(["b", "b"]) == {}
        assert rig.run()["a"] == expected([1, 2, 3], 2)

    def test_abort_of_none_is_everybody(self):
        rig = Rig()
        rig.add("a")
        rig.add("b")
        rig.take(rig.core.abort_requests(None))
        assert rig.ends == {"a": "abort", "b": "abort"}
        assert rig.core.abort_requests(None) == {}

    def test_each_client_hears_of_its_aborted_ones_in_one_message(self):
        rig = Rig()
        for name, client in (("a", 0), ("b", 0), ("c", 2)):
            rig.add(name, client_index=client)
        rig.step()
        outputs = rig.core.abort_requests(None)
        assert {client: message.finished_requests for client, message in outputs.items()} == {
            0: {"a", "b"},
            2: {"c"},
        }
        for message in outputs.values():
            for output in message.outputs:
                assert (output.new_token_ids, str(output.finish_reason)) == ([], "abort")
        outputs, _ = rig.core.step()
        assert outputs == {}

    def test_those_that_end_by_themselves_are_in_no_set(self):
        rig = Rig()
        rig.add("a", max_tokens=1)
        outputs, _ = rig.core.step()
        assert outputs[0].finished_requests is None


class TestFailures:
    def fail(self, caplog, error, step=2):
        rig = Rig()
        rig.executor.fail_at[step] = error
        rig.add("secret prompt", prompt=[4321, 4322], max_tokens=5)
        with caplog.at_level(logging.ERROR, "hardpoint"), pytest.raises(type(error)) as caught:
            rig.run()
        assert caught.value is error
        return rig

    def test_plan_and_statistics_are_logged_once_and_the_error_goes_on(self, caplog):
        rig = self.fail(caplog, ValueError("CUDA error"))
        (record,) = caplog.records
        words = record.getMessage()
        assert "step 2 failed: ValueError: CUDA error" in words
        assert "'num_scheduled_tokens': {'secret prompt': 1}" in words
        assert "'cached': {'secret prompt': 2}" in words
        assert "SchedulerStats(num_running=1" in words
        rig.executor.fail_at.clear()
        assert rig.run()["secret prompt"] == expected([4321, 4322], 5)

    def test_contents_of_prompts_are_not_written(self, caplog):
        self.fail(caplog, ValueError("x"), step=1)
        assert "'prompt': 2" in caplog.text
        assert "4321" not in caplog.text

    def test_an_interrupt_is_no_failure(self, caplog):
        rig = self.fail(caplog, interrupt_of_user())
        assert caplog.records == []
        rig.executor.fail_at.clear()
        assert rig.run()["secret prompt"] == expected([4321, 4322], 5)

    def test_options_of_plugins_are_not_written(self, caplog):
        config = EngineConfig(model="m", plugin={"redis": {"password": "hunter2"}})
        log_failure(ValueError("x"), SchedulerOutput(step=3), config, lambda: "fine")
        assert "'model': 'm'" in caplog.text
        assert "['redis']" in caplog.text
        assert "hunter2" not in caplog.text

    def test_what_cannot_be_shown_hinders_nothing(self, caplog):
        def broken():
            raise RuntimeError("no statistics")

        log_failure(ValueError("x"), object(), None, broken, lambda: {"fair": {"shares": 2}})
        assert "plugins: {'fair': {'shares': 2}}" in caplog.text
        assert "statistics: cannot be shown (RuntimeError: no statistics)" in caplog.text
        assert "plan: cannot be shown (AttributeError" in caplog.text

    def test_an_error_that_cannot_be_shown_hinders_nothing(self):
        class SilentError(Exception):
            def __str__(self):
                raise RuntimeError

        log_failure(SilentError(), SchedulerOutput(), None, lambda: "fine")


class TestCaches:
    def test_the_prefix_cache_is_forgotten(self):
        rig = Rig()
        for name in ("a", "b"):
            rig.core.reset_prefix_cache()
            rig.add(name, prompt=range(9), max_tokens=2)
            rig.run()
        assert rig.core.scheduler_stats().prefix_cache.hit_tokens == 0

    def test_a_missing_encoder_cache_cannot_be_reset(self):
        with pytest.raises(HardpointError, match="there is no encoder cache"):
            Rig().core.reset_encoder_cache()

    def test_unfinished_requests_are_warned_of(self, caplog):
        rig = Rig()
        rig.core.reset_prefix_cache()
        assert caplog.records == []
        rig.add("a")
        rig.add("b")
        rig.core.reset_prefix_cache()
        words = [record.getMessage() for record in caplog.records]
        assert words == ["the prefix cache was reset; unfinished requests: 2"]

    def test_a_refused_reset_is_not_logged(self, caplog):
        rig = Rig()
        rig.add("a")
        with pytest.raises(HardpointError, match="there is no"):
            rig.core.reset_encoder_cache()
        assert caplog.records == []

    def test_a_prefix_cache_that_cannot_be_reset_is_not_logged(self, caplog):
        class Without(DefaultScheduler):
            contract = 1

            def reset_prefix_cache(self, *, recompute_running=False):
                raise self._lacks("has no prefix cache to reset")

        rig = Rig(scheduler=Without)
        rig.add("a")
        with pytest.raises(NotImplementedError, match="has no prefix cache to reset"):
            rig.core.reset_prefix_cache()
        assert caplog.records == []


class TestWorkers:
    def test_calls_reach_every_worker(self):
        rig = Rig()
        rig.executor.rpc["plugin_meters"] = {"top_k": PluginMeter(steps=3)}
        assert rig.core.collective_rpc("plugin_meters") == [{"top_k": PluginMeter(steps=3)}] * 2
        assert rig.core.plugin_meters()["top_k"].steps == 3

    def test_a_limit_is_passed_on_only_if_given(self):
        rig = Rig()
        rig.core.collective_rpc("plugin_meters")
        rig.core.collective_rpc("plugin_meters", 2.5)
        assert rig.executor.calls == [("plugin_meters",), ("plugin_meters", 2.5)]

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (("close",), "method: expected one of plugin_meters, .*stop_profile, got 'close'"),
            (("stop_porfile",), r"method: .*got 'stop_porfile' \(did you mean 'stop_profile'\?\)$"),
            (("sleep", None, [1]), "method: .*got 'sleep'"),
            (("__init__",), "method: .*got '__init__'"),
            (("stop_profile", None, [1, 2]), "expected 0 arguments, got 2"),
            (("plugin_meters", 0.0), "timeout: expected a number > 0, got 0"),
            (("plugin_meters", float("nan")), "timeout: expected a number > 0, got nan"),
        ],
    )
    def test_what_is_not_declared_is_refused(self, call, words):
        rig = Rig()
        with pytest.raises(RequestError, match=words):
            rig.core.collective_rpc(*call)
        assert rig.executor.calls == []

    def test_profiles(self):
        rig = Rig()
        rig.executor.rpc["stop_profile"] = "/there/x.json"
        rig.core.start_profile()
        assert rig.core.stop_profile() == ["/there/x.json"] * 2
        assert rig.executor.calls == [("start_profile",), ("stop_profile",)]


def test_closing_closes_the_executor_whatever_fails():
    class Fragile(DefaultScheduler):
        contract = 1

        def close(self):
            raise RuntimeError("the scheduler does not close")

    rig = Rig(ScriptedExecutor(), scheduler=Fragile)
    rig.core.add_request(request("a"))
    with pytest.raises(PluginFaultError, match="its close failed: RuntimeError: the sched"):
        rig.core.close()
    assert rig.executor.calls == [("close",)]


class Interrupter:
    """Raises KeyboardInterrupt at a line of the core's own code, as a signal may."""

    def __init__(self, at):
        self.left = at
        self.file = inspect.getsourcefile(StepRunner)

    def __call__(self, frame, event, _arg):
        if frame.f_code.co_filename != self.file:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted_at(line, depth, rig):
    """Take one step that is interrupted at its n-th line; whether it came to that."""
    tracing = sys.gettrace()
    sys.settrace(Interrupter(line))
    try:
        rig.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracing)
    return False


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_at_any_line_of_a_step_loses_no_plan(depth):
    line, interrupted = 0, True
    while interrupted:
        rig = Rig(ScriptedExecutor(depth))
        rig.add("a", max_tokens=6)
        rig.add("b", max_tokens=2)
        rig.step()
        rig.step()  # "b" has ended, which the next plan tells
        interrupted = interrupted_at(line, depth, rig)
        rig.run()
        assert rig.ends["a"] == "length", f"line {line}"
        assert rig.executor.rows == {}, f"line {line}"
        assert rig.cache.num_free_blocks == rig.cache.num_usable_blocks
        line += 1
    assert line > 10


@pytest.mark.parametrize("error", [ValueError("the first error"), KeyboardInterrupt("first")])
def test_who_breaks_a_step_is_told_though_the_plan_cannot_be_given_up(error, caplog):
    class Broken(DefaultScheduler):
        contract = 1

        def update(self, plan, result):
            raise error

        def plan_lost(self, plan):
            raise ValueError("the second error")

    rig = Rig(scheduler=Broken)
    rig.add("a")
    with pytest.raises(type(error), match="first"):
        rig.step()
    (record,) = [r for r in caplog.records if r.getMessage().startswith("the scheduler cannot")]
    assert record.getMessage() == "the scheduler cannot drop step 1"
    assert str(record.exc_info[1]) == "the second error"
