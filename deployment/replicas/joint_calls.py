"""Control calls to several engines: one answer of several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from operator import attrgetter
from threading import Lock
from typing import Any, cast

import msgspec

from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.host.boundary.errors import error_of, kind_of
from hardpoint.host.registry.blame import faults_as
from hardpoint.plugins import HardpointError, SchedulerStats, StepPart, WaitReason
from hardpoint.plugins.requests.stats import (
    EngineReport,
    Health,
    PluginMeter,
    PluginReport,
    StepFault,
)
from hardpoint.plugins.scheduling.step_record import LiveRequest

from .choice import EngineChoice
from .replica import Replica
from .replicas import Replicas
from .statistics import added_structs, merged_stats

Merge = Callable[[list[Any]], Any]
"""Makes one answer of the engines' answers, in the order of their ranks, at least one."""

MergeByRank = Callable[[Mapping[int, Any]], Any]
"""The same, of the answers by rank."""


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _joined(answers: list[list[Any]]) -> list[Any]:
    return [item for answer in answers for item in answer]


def _live_requests(answers: list[list[LiveRequest]]) -> list[LiveRequest]:
    return sorted(_joined(answers), key=attrgetter("age_seconds"), reverse=True)


def _meters(answers: list[dict[str, PluginMeter]]) -> dict[str, PluginMeter]:
    names = dict.fromkeys(name for answer in answers for name in answer)
    merged = {}
    for name in names:
        meters = [answer[name] for answer in answers if name in answer]
        merged[name] = added_structs(meters)
        merged[name].slowest_step = max(meter.slowest_step for meter in meters)
    return merged


def _states(answers: list[dict[str, Any]]) -> dict[str, Any]:
    if len(answers) == 1:
        return dict(answers[0])
    names = dict.fromkeys(name for answer in answers for name in answer)
    return {
        name: {str(place): states[name] for place, states in enumerate(answers) if name in states}
        for name in names
    }


def merged_faults(answers: Iterable[Mapping[str, StepFault]]) -> dict[str, StepFault]:
    """Return the faults of all engines by plugin, with the first message of each."""
    merged: dict[str, StepFault] = {}
    for answer in answers:
        for name, fault in answer.items():
            before = merged.get(name, StepFault(0, fault.message))
            merged[name] = StepFault(before.count + fault.count, before.message)
    return merged


def _reports(answers: list[PluginReport]) -> PluginReport:
    stats = [report.scheduler for report in answers if report.scheduler is not None]
    return PluginReport(
        meters=_meters([report.meters for report in answers]),
        health=Health(
            {},
            {},
            merged_faults(report.health.fallbacks for report in answers),
            merged_faults(report.health.slow for report in answers),
        ),
        scheduler=merged_stats(stats) if stats else None,
        sleep_level=min(report.sleep_level for report in answers),
    )


_MERGES: dict[str, Merge] = {
    "collective_rpc": _joined,
    "is_paused": all,
    "is_sleeping": all,
    "live_change": _joined,
    "live_requests": _live_requests,
    "plugin_meters": _meters,
    "plugin_report": _reports,
    "plugin_states": _states,
    "scheduler_stats": merged_stats,
    "slow_plugins": merged_faults,
    "step_faults": merged_faults,
    "stop_profile": _joined,
}
"""Of calls whose answers are not the same from all engines."""


_PAUSING = frozenset({"pause", "sleep"})
_CHANGING = _PAUSING | {"resume", "wake_up"}
"""Calls after which an engine may be paused, or is not any more."""


class JointCalls:
    """Makes control calls to several engines."""

    def __init__(self, choice: EngineChoice, replicas: Replicas) -> None:
        """Begin.

        Args:
            choice: has the faults of the balancer, which are reported with those of the engines.
            replicas: the engines; they have the totals of those that have ended, too.
        """
        self._choice, self._replicas = choice, replicas
        self._pauses = _Pauses(replicas)
        self._answered: dict[str, dict[Replica, Any]] = {}  # by call

    def call(
        self,
        replicas: Sequence[Replica],
        owner_of: Callable[[str, Replica], Replica | None],
        method: str,
        args: Sequence[Any],
        *,
        is_for_all: bool = True,
    ) -> Future[Any]:
        """Call a utility of engines; return the future of the one answer.

        Args:
            replicas: the engines that serve.
            owner_of: returns the engine of a request by its id, None while it has none; its second
                argument, if no such request is in flight.
            method: name of the utility.
            args: its arguments.
            is_for_all: whether all engines are meant, also those that have died.

        Raises:
            RequestError: the arguments cannot be encoded.
        """
        if not replicas:
            none: Future[Any] = Future()
            none.set_exception(EngineDeadError("the engine does not serve at the moment"))
            return none
        if method == "why_waiting" and len(args) == 1:
            return self._why_waiting(replicas, owner_of, args[0])
        if method == "call_part" and len(args) >= 2:
            return self._call_part(replicas, args)
        calls = {replica.rank: _sent(replica, method, *args) for replica in replicas}
        for replica in replicas:
            self._pauses.follow(replica, method, calls[replica.rank])
        merge = self._merge_of(method, replicas if is_for_all else ())
        return JointCall(calls, merge).future

    def _merge_of(self, method: str, replicas: Sequence[Replica]) -> MergeByRank:
        merge = _MERGES.get(method, _first)
        match method if replicas else "":
            case "step_faults":
                return lambda answers: merge([*answers.values(), self._choice.faults()])
            case "slow_plugins":
                return lambda answers: merge([*answers.values(), self._choice.slow()])
            case "plugin_states":
                return lambda answers: merge([*answers.values()]) | self._choice.states()
            case "scheduler_stats":
                return lambda answers: self._stats(replicas, answers)
            case "plugin_report":
                return lambda answers: self._report(replicas, answers)
        return lambda answers: merge(list(answers.values()))

    def _stats(
        self, replicas: Sequence[Replica], answers: Mapping[int, SchedulerStats | None]
    ) -> SchedulerStats:
        return self._replicas.stats(
            {replica: answers[replica.rank] for replica in replicas if replica.rank in answers}
        )

    def _report(
        self, replicas: Sequence[Replica], answers: Mapping[int, PluginReport]
    ) -> PluginReport:
        health = Health({}, {}, self._choice.faults(), self._choice.slow())
        merged = _reports([*answers.values(), PluginReport(health=health)])
        stats = self._stats(replicas, {rank: report.scheduler for rank, report in answers.items()})
        totals = self._replicas.totals
        restarts, resumes = totals.num_restarts, totals.num_resumes
        engines = {
            rank: EngineReport(
                restarts=restarts[rank],
                num_resumes=resumes[rank],
                sleep_level=answers[rank].sleep_level if rank in answers else None,
            )
            for rank in sorted({*answers, *restarts, *resumes})
        }
        return msgspec.structs.replace(
            merged,
            scheduler=stats,
            engines=engines,
            sleep_level=min(report.sleep_level for report in answers.values()),
        )

    def _why_waiting(
        self,
        replicas: Sequence[Replica],
        owner_of: Callable[[str, Replica], Replica | None],
        request_ids: Sequence[str],
    ) -> Future[Any]:
        ids_by_rank = {
            replica.rank: [name for name in request_ids if owner_of(name, replica) is replica]
            for replica in replicas
        }
        calls = {
            replica.rank: _sent(replica, "why_waiting", ids_by_rank[replica.rank])
            for replica in replicas
        }

        def merge(answers: Mapping[int, list[WaitReason | None]]) -> list[WaitReason | None]:
            reasons: dict[str, WaitReason | None] = {}
            for rank, answer in answers.items():
                reasons |= dict(zip(ids_by_rank[rank], answer, strict=True))
            return [reasons.get(name) for name in request_ids]

        return JointCall(calls, merge).future

    def _call_part(self, replicas: Sequence[Replica], args: Sequence[Any]) -> Future[Any]:
        """Call a step part; after the answer None, only the engines that gave it are asked again.

        So a call that is repeated until it is done is done once by each engine. The successor of an
        engine that died is asked, too.
        """
        part, method, *_ = args
        key = repr(args)
        before = self._answered.pop(key, {})
        by_rank = {replica.rank: replica for replica in replicas}
        entry = self._choice.plugins.find("step_parts", part) if isinstance(part, str) else None

        def merge(answers: Mapping[int, Any]) -> Any:
            known = {by_rank[rank]: answer for rank, answer in answers.items()}
            if len(self._answered) < _MOST_REPEATED and None in known.values():
                self._answered[key] = {r: a for r, a in known.items() if a is not None}
                return None
            listed = [known[replica] for replica in sorted(known, key=attrgetter("rank"))]
            if entry is None:
                return listed[0]
            target = cast(type[StepPart], self._choice.plugins.target(entry))
            source = f"{entry.source}: its merge_answers"
            with faults_as(PluginFaultError, source, passing=(HardpointError,)):
                return target.merge_answers(method, listed)

        calls = {
            replica.rank: _completed(before[replica])
            if replica in before
            else _sent(replica, "call_part", *args)
            for replica in replicas
        }
        return JointCall(calls, merge).future


def _completed(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def _sent(replica: Replica, method: str, *args: Any) -> Future[Any]:
    """Call a utility of an engine; a dead engine counts as dead before it answers."""
    try:
        return replica.open_client.call(method, *args)
    except EngineDeadError as error:
        gone: Future[Any] = Future()
        gone.set_exception(error)
        return gone


class _Pauses:
    """Notes which engines are paused, so that balancers leave them out."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def follow(self, replica: Replica, method: str, call: Future[Any]) -> None:
        """Note the effect of a control call; once answered, ask the engine whether it is paused.

        Args:
            method: name of the utility.
            call: its answer.
        """
        if method not in _CHANGING:
            return
        if method in _PAUSING:
            self._replicas.set_paused(replica, paused=True)
        call.add_done_callback(lambda _: self._ask(replica))

    def _ask(self, replica: Replica) -> None:
        with contextlib.suppress(HardpointError):  # it is dead
            answer = replica.open_client.call("is_paused")
            answer.add_done_callback(lambda answer: self._answered(replica, answer))

    def _answered(self, replica: Replica, answer: Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._replicas.set_paused(replica, paused=answer.result())


_MOST_REPEATED = 1024  # calls whose answers of some engines are kept


class JointCall:
    """A control call that several engines answer; `future` has the one answer, or the error.

    It is an error if an engine fails; the message names the engine, unless all fail. An engine that
    dies in the meantime is left out, unless it is the last.
    """

    def __init__(self, calls: Mapping[int, Future[Any]], merge: MergeByRank) -> None:
        """Wait for the answers.

        Args:
            calls: by rank.
            merge: makes one answer of those that engines gave, by rank.
        """
        self.future: Future[Any] = Future()
        self._calls, self._merge = dict(calls), merge
        self._missing = len(calls)
        self._lock = Lock()
        self.future.add_done_callback(self._cancel)
        for call in list(calls.values()):
            call.add_done_callback(self._answered)

    def _cancel(self, future: Future[Any]) -> None:
        if future.cancelled():
            for call in self._calls.values():
                call.cancel()

    def _answered(self, _: Future[Any]) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._answer())
        except BaseException as error:
            self.future.set_exception(error)

    def _answer(self) -> Any:
        errors = {
            rank: error for rank, call in self._calls.items() if (error := _error(call)) is not None
        }
        answers = {
            rank: future.result() for rank, future in self._calls.items() if rank not in errors
        }
        failed = {r: e for r, e in errors.items() if not isinstance(e, EngineDeadError)}
        if failed:
            raise _joint_error(failed, len(self._calls))
        if not answers:
            raise next(iter(errors.values()))
        return self._merge(answers)


def _error(call: Future[Any]) -> BaseException | None:
    return EngineDeadError("the call was cancelled") if call.cancelled() else call.exception()


def _joint_error(failed: Mapping[int, BaseException], num_engines: int) -> BaseException:
    first = next(iter(failed.values()))
    messages = dict.fromkeys(map(str, failed.values()))
    if len(failed) == num_engines and len(messages) == 1:
        return first
    if not isinstance(first, HardpointError):
        return first
    texts = (f"engine {rank}: {error}" for rank, error in failed.items())
    done = num_engines - len(failed)
    rest = f"; {done} of {num_engines} engines succeeded" if done else ""
    joint = error_of(kind_of(first), "; ".join(texts) + rest)
    joint.__cause__ = first
    return joint
