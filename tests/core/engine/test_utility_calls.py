"""Calls by name: what may be called, with what, and how they are answered."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from support.core.engine_harness import Rig

from hardpoint import typed
from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.utility_calls import UTILITIES
from hardpoint.host.system.control_calls import (
    AsyncCaller,
    SyncCaller,
    convert_arguments,
    returned_type,
    utility,
)
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.plugins import OverloadedError, RequestError, SchedulerStats, WaitReason
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.requests import LoRARequest
from hardpoint.process.cache_changes import CacheReports
from hardpoint.process.protocol import UtilityCall, UtilityOutput
from hardpoint.process.utility_calls import call_utility, result_type


@pytest.fixture
def core():
    return Rig().core


def ask(core, method, *args):
    answers = []
    reports = CacheReports(None, core.cached_blocks)
    call_utility(core, reports, UtilityCall(0, 3, method, list(args)), answers.append)
    (answer,) = answers
    assert answer.call_id == 3
    return answer


class TestWhatMayBeCalled:
    def test_every_one_is_a_method_with_declared_types(self):
        for name in UTILITIES:
            method = getattr(EngineCore, name).run
            result_type(name)
            for parameter in list(inspect.signature(method).parameters.values())[1:]:
                assert parameter.annotation is not inspect.Parameter.empty, name

    @pytest.mark.parametrize(
        "method", ["close", "step", "_abort", "__class__", "add_request", "abort_requests", "", "x"]
    )
    def test_nothing_else_can_be(self, core, method):
        answer = ask(core, method)
        assert answer.failure.startswith("method: expected one of call_part, collective_rpc, ")
        close = {"step": "sleep", "add_request": "live_requests", "abort_requests": "live_requests"}
        near = f" (did you mean {close[method]!r}?)" if method in close else ""
        assert answer.failure.endswith(f"why_waiting, got {method!r}{near}")
        assert answer.kind == "RequestError"

    @pytest.mark.parametrize(
        ("method", "args", "words"),
        [
            ("reset_prefix_cache", ["yes"], "recompute_running: expected true or false, got 'yes'"),
            (
                "reset_prefix_cache",
                [True, 1],
                "reset_prefix_cache: expected 0 to 1 arguments, got 2",
            ),
            ("why_waiting", [], "why_waiting: expected 1 arguments, got 0"),
            ("why_waiting", [[1]], "request_ids[0]: expected"),
            ("pause", ["soon"], 'mode: expected "abort" or "wait" or "keep", got'),
            ("sleep", [1.5], "level: expected"),
            ("wake_up", ["weights"], "tags: expected"),
            ("live_change", ["prepare", {"manifest": {"hardpoint": "x"}}], "change."),
            ("live_change", ["prepare"], "change: expected one to prepare, got None"),
            ("live_change", ["begin"], "action: expected"),
        ],
    )
    def test_wrong_arguments_fail_the_call_alone(self, core, method, args, words):
        assert words in ask(core, method, *args).failure
        assert ask(core, "scheduler_stats").failure is None

    def test_arguments_become_what_is_declared(self):
        def method(self, lora: LoRARequest, ids: list[int], size: float = 1.0) -> None: ...

        given = [{"name": "poems", "id": 2}, [1]]
        assert convert_arguments(method, given, RequestError) == [LoRARequest("poems", 2), [1]]

    def test_of_live_requests_only_those_asked_for_are_looked_at(self, monkeypatch):
        rig = Rig()
        other = SimpleNamespace(source=SimpleNamespace(external_req_id="other"))  # and no more
        monkeypatch.setattr(rig.scheduler, "live_requests", lambda: [other, other])
        answer = ask(rig.core, "live_requests", ["mine"])
        assert (answer.failure, answer.result.value) == (None, [])

    def test_a_structure_comes_as_a_table(self, core, monkeypatch):
        used = []
        changes = SimpleNamespace(run=lambda *given: used.append(given) or [])
        monkeypatch.setattr(core, "_changes", changes)
        table = {"manifest": {"hardpoint": "x", "entries": []}, "asked": {"origin": "me"}}
        answer = ask(core, "live_change", "prepare", table | {"config": {"model": "m"}})
        assert (answer.failure, answer.result.value) == (None, [])
        ((action, change),) = used
        assert (action, change.asked.origin, change.config.model) == ("prepare", "me", "m")
        assert change.manifest == Manifest(hardpoint="x", entries=())

    @pytest.mark.parametrize(
        ("table", "words"),
        [
            ({"hardpoint": "x"}, "change.manifest.entries: "),
            ({"hardpoint": 2, "entries": []}, "change.manifest.hardpoint: expected"),
            ({"hardpoint": "x", "entries": [1]}, "change.manifest.entries[0]: expected"),
            ("x", "change.manifest: expected a table, got 'x'"),
            (None, "change.manifest: expected a table, got None"),
        ],
    )
    def test_a_table_is_checked_by_its_names(self, core, table, words):
        change = {"asked": {"origin": "me"}, "config": {}, "manifest": table}
        failure = ask(core, "live_change", "prepare", change).failure
        assert failure.startswith(words), failure
        assert core._parts.executor.calls == []


class TestAnswers:
    def test_a_result_travels_and_is_what_the_method_declares(self, core):
        encoded = Encoder().encode(ask(core, "scheduler_stats"))
        answer = Decoder(UtilityOutput).decode(encoded)
        stats = typed.convert(answer.result.value, result_type("scheduler_stats"), path="it")
        assert isinstance(stats, SchedulerStats)

    def test_none_is_a_result(self, core):
        answer = ask(core, "reset_prefix_cache")
        assert answer.failure is None
        assert answer.result.value is None

    def test_errors_of_the_tree_keep_class_and_words(self, core):
        core.resume = lambda: (_ for _ in ()).throw(OverloadedError("too many"))
        answer = ask(core, "resume")
        assert (answer.kind, answer.failure) == ("OverloadedError", "too many")

    def test_other_errors_name_the_call_that_failed(self, core):
        core.resume = lambda: 1 / 0
        assert ask(core, "resume").failure == (
            "Call to resume method failed: ZeroDivisionError: division by zero"
        )

    def test_declared_types_of_futures_are_those_of_their_results(self):
        assert typed.convert(None, returned_type(EngineCore.pause.run), path="pause") is None
        assert returned_type(EngineCore.why_waiting.run) == list[WaitReason | None]


class Table:
    """A table with one utility, as ControlCalls has many."""

    @utility()
    def repeat(self: object, text: str, count: int = 2, *, upper: bool = False) -> Future[str]:
        """Return a text several times."""
        future = Future()
        future.set_result((text.upper() if upper else text) * count)
        return future


class Local(Table):
    """Runs what is declared, as EngineCore does."""


class Sync(Table, SyncCaller):
    """Notes what is sent, as LLM sends it."""

    def _call_utility(self, method, *args):
        return (method, *args)


class Async(Table, AsyncCaller):
    """The same, as AsyncLLM does."""

    async def _call_utility(self, method, *args):
        return (method, *args)


class TestOneDeclaration:
    def test_is_run_where_the_engine_is(self):
        assert Local().repeat("ab", upper=True).result() == "ABAB"
        assert Local.repeat.run_on(Local(), ["ab", 1, True]).result() == "AB"

    def test_is_sent_by_position_with_its_defaults(self):
        assert Sync().repeat("ab") == ("repeat", "ab", 2, False)
        assert Sync().repeat("ab", count=3, upper=True) == ("repeat", "ab", 3, True)
        assert asyncio.run(Async().repeat("ab", 3)) == ("repeat", "ab", 3, False)

    def test_is_sent_for_a_frontend_that_has_no_such_method(self):
        assert Table.repeat.call(Sync()._call_utility, "ab") == ("repeat", "ab", 2, False)
        sent = Table.repeat.call_async(Async()._call_utility, "ab")
        assert asyncio.run(sent) == ("repeat", "ab", 2, False)

    @pytest.mark.parametrize("caller", [Sync, Async])
    def test_shows_its_signature_and_documentation(self, caller):
        assert inspect.getdoc(caller.repeat) == "Return a text several times."
        signature = "(self, text: 'str', count: 'int' = 2, *, upper: 'bool' = False) -> 'str'"
        assert str(inspect.signature(caller.repeat)) == signature
        assert inspect.iscoroutinefunction(caller.repeat) is (caller is Async)

    def test_refuses_what_a_method_would_refuse(self):
        with pytest.raises(TypeError, match=r"repeat\(\): too many positional arguments"):
            Sync().repeat("ab", 2, True)
        with pytest.raises(TypeError, match=r"repeat\(\): missing a required argument: 'text'"):
            Sync().repeat()

    def test_a_class_may_replace_it(self):
        class Own(Sync):
            def repeat(self):
                return "my own"

        assert Own().repeat() == "my own"


class TestFutures:
    def ask(self, core, future):
        answers = []
        core.pause = lambda: future
        reports = CacheReports(None, core.cached_blocks)
        call_utility(core, reports, UtilityCall(0, 3, "pause"), answers.append)
        return answers

    def test_it_is_answered_when_it_is_done(self, core):
        future = Future()
        answers = self.ask(core, future)
        assert answers == []
        future.set_result([1, 2])
        assert answers == [UtilityOutput.succeeded(3, [1, 2])]

    def test_one_that_is_done_is_answered_at_once(self, core):
        future = Future()
        future.set_result(5)
        assert self.ask(core, future) == [UtilityOutput.succeeded(3, 5)]

    def test_one_inside_another_is_waited_for(self, core):
        outer, inner = Future(), Future()
        answers = self.ask(core, outer)
        outer.set_result(inner)
        assert answers == []
        inner.set_result("at last")
        assert answers == [UtilityOutput.succeeded(3, "at last")]

    def test_its_error_is_told(self, core):
        future = Future()
        answers = self.ask(core, future)
        future.set_exception(ValueError("no"))
        assert answers[0].failure == "Call to pause method failed: ValueError: no"

    def test_an_error_of_the_inner_one_too(self, core):
        outer, inner = Future(), Future()
        answers = self.ask(core, outer)
        outer.set_result(inner)
        inner.set_exception(OverloadedError("full"))
        assert (answers[0].kind, answers[0].failure) == ("OverloadedError", "full")

    def test_a_cancelled_one_is_a_failure(self, core):
        future = Future()
        answers = self.ask(core, future)
        future.cancel()
        assert "CancelledError" in answers[0].failure
