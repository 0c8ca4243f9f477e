"""The amounts that a step part counts, across plans that are lost and requests that are preempted.

The same requests run undisturbed, with lost plans, and with preemptions. Figures, statistics,
answers to calls, and the number of requests that pass the gate show the amounts of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.host.boundary.parts.gates import without_data
from hardpoint.plugins import EngineHalf, Request, RequestError
from hardpoint.plugins.requests.stats import PrefixCacheStats, SchedulerStats
from hardpoint.testing.running.request_scripts import RequestScript, with_id
from hardpoint.testing.scripted import ScriptedClock
from hardpoint.testing.suite import Rule

from .compared import compare, compare_by_place
from .session import CallTrace, StepPartSession

__all__ = ["AMOUNTS", "check_amounts"]

AMOUNTS = Rule(
    "amounts: lost plans change no amount that is counted, and preemptions return none",
    "count in result(), which each plan gets once, and not in begin() or mask(); let preempted() "
    "keep the counted amounts: the request goes on, its gate is not called again, and its tokens "
    "are not generated again",
)

Opened = Callable[..., AbstractContextManager[StepPartSession]]
Calls = Sequence[tuple[str, Mapping[str, Any]]]
Leaves = dict[str, Any]

_WAVES = 3  # in which all requests run, so that what each adds becomes much
_MOST_ADMITTED = 200
_GATE_CALLS = 3  # of a request that waits, at one time
_IDLE_SECONDS = 0.05
_CALL_SECONDS = 10.0
_LOST = range(0, 100_000, 2)


@dataclass
class _Counted:
    """The amounts after some requests.

    Attributes:
        traces: traces of the requests, by id.
        totals: statistics and answers, before and after, by path.
        figures: figures of each request in each of its steps, by path.
        admitted: how many further requests like each of the requests pass the gate.
    """

    traces: dict[str, CallTrace]
    totals: tuple[Leaves, Leaves]
    figures: dict[str, list[Leaves]]
    admitted: Leaves

    def comparable(self) -> dict[str, Any]:
        values: dict[str, Any] = {**self.totals[1], **self.admitted}
        for name, steps in self.figures.items():
            for number, leaves in enumerate(steps, 1):
                values |= {f"{path} of {name!r} in step {number}": x for path, x in leaves.items()}
        for name, trace in self.traces.items():
            for (key, position), row in trace.arrays.items():
                values[f"array {key!r} of {name!r} at {position}"] = row
        return values


def check_amounts(
    opened: Opened, scripts: Sequence[RequestScript], calls: Calls, *, seen: Callable[[], None]
) -> None:
    """Compare the amounts of undisturbed requests with the amounts of disturbed ones.

    Differences between two undisturbed runs, such as times, are not compared.

    Args:
        opened: opens a session of new halves; takes the clock of the engine's half.
        scripts: lives of requests, which run one after another.
        calls: calls that the part answers.
        seen: called if a request has run.

    Raises:
        Violation: amounts differ.
    """
    plain = _count(opened, scripts, calls)
    if not any(trace.tokens for trace in plain.traces.values()):
        return
    seen()
    lost = _count(opened, scripts, calls, lost=_LOST)
    for name, script in _named(scripts):
        where = "without lost plans", "with them"
        compare(script, plain.traces[name], lost.traces[name], AMOUNTS, *where)
    _check_lost(opened, scripts, calls, plain, lost)
    preempted = _count(opened, scripts, calls, preempts=True)
    for name, _ in _named(scripts):
        where = "without a preemption", "with one"
        compare_by_place(plain.traces[name], preempted.traces[name], AMOUNTS, *where)
    _check_preempted(opened, scripts, calls, plain, preempted)


def _check_lost(
    opened: Opened,
    scripts: Sequence[RequestScript],
    calls: Calls,
    plain: _Counted,
    lost: _Counted,
) -> None:
    before, after = plain.comparable(), lost.comparable()
    wrong = {
        amount for amount in before.keys() | after.keys() if before.get(amount) != after.get(amount)
    }
    if wrong:  # what changes from run to run is not counted
        again = _count(opened, scripts, calls).comparable()
        repeated = _count(opened, scripts, calls, lost=_LOST).comparable()
        for amount in sorted(wrong):
            plain_amount, other = before.get(amount), after.get(amount)
            if (plain_amount, other) == (again.get(amount), repeated.get(amount)):
                raise AMOUNTS.violation(
                    f"{amount} is {_described(other)} where every other plan is lost, expected "
                    f"{_described(plain_amount)}, as without lost plans"
                )


def _check_preempted(
    opened: Opened,
    scripts: Sequence[RequestScript],
    calls: Calls,
    plain: _Counted,
    preempted: _Counted,
) -> None:
    wrong = dict(_returned(plain, preempted))
    if wrong:
        again = _count(opened, scripts, calls)
        repeated = dict(_returned(again, _count(opened, scripts, calls, preempts=True)))
        for amount, (plain_amount, other) in wrong.items():
            if repeated.get(amount) == (plain_amount, other):
                raise AMOUNTS.violation(
                    f"{amount} is {_described(other)} where requests are preempted, expected "
                    f"{_described(plain_amount)}, as without preemptions: the amount "
                    f"was returned after it had been counted"
                )


def _returned(plain: _Counted, preempted: _Counted) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield amounts that are smaller than without preemptions, with both values.

    Tokens may be computed again, so an amount that grows may be larger.
    """
    for amount, plain_amount in plain.admitted.items():
        if preempted.admitted[amount] > plain_amount:
            yield amount, (plain_amount, preempted.admitted[amount])
    first, last = plain.totals
    for amount, plain_amount in last.items():
        other = preempted.totals[1].get(amount)
        if _is_short(first.get(amount, 0), plain_amount, other):
            yield amount, (plain_amount, other)
    for name, steps in plain.figures.items():
        others = preempted.figures.get(name, [])
        if not steps or len(others) != len(steps):
            continue
        for amount, plain_amount in steps[-1].items():
            values = [step.get(amount, 0) for step in steps]
            other = others[-1].get(amount)
            if all(map(_is_number, values)) and _is_short(_origin(values), plain_amount, other):
                yield f"{amount} of {name!r} at its end", (plain_amount, other)


def _origin(values: Sequence[Any]) -> Any:
    """Return the value from which an amount has come; its last one if it goes up and down."""
    falls, rises = sorted(values, reverse=True), sorted(values)
    if list(values) == rises:
        return min(values[0], 0)
    return values[0] if list(values) == falls else values[-1]


def _is_short(first: Any, last: Any, other: Any) -> bool:
    if not all(map(_is_number, (first, last, other))):
        return False
    return bool(other < last) if last > first else bool(last < first and other > last)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(
    opened: Opened,
    scripts: Sequence[RequestScript],
    calls: Calls,
    *,
    lost: Sequence[int] = (),
    preempts: bool = False,
) -> _Counted:
    clock = ScriptedClock(now=1000.0)
    with opened(clock=clock, lost=lost) as session:
        session.idle = lambda: clock.advance(_IDLE_SECONDS)
        before = _totals(session.half, calls)
        for name, script in _named(scripts):
            after = script.preempted_after if preempts else 0
            session.play([with_id(script, name, preempted_after=after)])
        traces = dict(session.traces)
        figures = {
            name: [dict(_leaves("figure", step)) for step in trace.figures]
            for name, trace in traces.items()
        }
        totals = before, _totals(session.half, calls)
        admitted = {
            f"the number of requests like {script.request.request_id!r} that pass the gate at "
            f"once": _count_admitted(session, script)
            for script in scripts
        }
    return _Counted(traces, totals, figures, admitted)


def _named(scripts: Sequence[RequestScript]) -> Iterator[tuple[str, RequestScript]]:
    for wave in range(_WAVES):
        for script in scripts:
            name = f"{script.request.request_id} of wave {wave}"
            run = with_id(script, name, arrives=0, ends="finish", outputs=())
            yield name, run


def _totals(half: EngineHalf, calls: Calls) -> Leaves:
    stats = SchedulerStats(
        num_running=0, num_waiting=0, kv_cache_usage=0.0, prefix_cache=PrefixCacheStats()
    )
    half.add_stats(stats)
    totals = dict(_leaves("statistic", msgspec.to_builtins(stats)))
    for method, arguments in calls:
        answer = half.call(method, arguments)
        if isinstance(answer, Future):
            answer = answer.result(_CALL_SECONDS)
        totals |= _leaves(f"answer of call({method!r})", msgspec.to_builtins(answer))
    return totals


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers in plain data by their path, and the number of items of lists.

    Texts and items may have the numbers of steps in them, which lost plans change.
    """
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(f"{path} {name!r}", part)
    elif isinstance(value, list | tuple):
        yield f"number of items of {path}", len(value)
    elif _is_number(value):
        yield path, value


def _count_admitted(session: StepPartSession, script: RequestScript) -> int:
    """Return how many requests pass the gate at one time; all end then."""
    half, names, count = session.half, list[str](), 0
    while count < _MOST_ADMITTED:
        source = with_id(script, f"{script.request.request_id} after {count}").request
        if not session.is_used_by(source):
            break
        try:
            half.check(source)
        except RequestError:
            half.refused(source.request_id)
            break
        names.append(source.request_id)
        if not _passes(half, Request(without_data(source))):
            break
        count += 1
    for name in names:
        half.ended(name)
    return count


def _passes(half: EngineHalf, request: Request) -> bool:
    try:
        return any(half.gate(request) is None for _ in range(_GATE_CALLS))
    except RequestError:
        return False


def _described(value: Any) -> str:
    return "not there" if value is None else repr(value)[:80]
