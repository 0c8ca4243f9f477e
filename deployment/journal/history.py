"""The history of one request in a journal; no engine is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hardpoint.plugins import EngineCoreRequest

from .frames import JournalError
from .records import Arrival, Event, Keyframe, PlanRecord
from .run import Journal, request_of

_MAX_LISTED = 20
"""Requests that the error of an unknown id lists."""


def history(journal: Journal, name: str) -> Iterator[str]:
    """Yield the history of a request, line by line.

    Args:
        journal: the journal.
        name: its id, as users or as the engine know it; all completions of a user's id are shown.

    Raises:
        JournalError: no request has that id.
    """
    chosen: dict[str, _History] = {}
    reasons: dict[str, str] = {}  # of all requests, for the error
    now = start = journal.header.clock
    for number, record in enumerate(journal.records()):
        live = record.live if isinstance(record, Keyframe) else ()
        for state in live:
            for request in _named([state.arrival], name):
                chosen.setdefault(request.request_id, _History(len(state.output_token_ids)))
        reasons |= {request_of(state.arrival).request_id: "" for state in live}
        if not isinstance(record, Event):
            continue
        reasons |= {request_of(arrival).request_id: "" for arrival in record.arrivals}
        reasons |= {ended.request_id: ended.reason for ended in record.ended}
        for arrival in record.arrivals:
            for request in _named([arrival], name):
                chosen[request.request_id] = _History()
                how = f"is refused: {record.failure.text}" if record.failure else "arrives"
                place = _place(record.arrived(arrival, now) - start, number)
                yield f"{place} {request.request_id} {how}, {_described(request)}"
        now = record.clock[-1] if record.clock else now
        place = _place(now - start, number)
        for request_id, known in chosen.items():
            for line in known.lines(record, request_id):
                yield f"{place} {request_id} {line}"
    if not chosen:
        where = f"journal {str(journal.path)!r}"
        raise JournalError(f"{where}: no request has the id {name!r}; {_listed(reasons)}")


def _listed(reasons: dict[str, str]) -> str:
    """Return the ids of requests with their finish reasons, failed requests first."""
    failed_first = sorted(reasons, key=lambda request_id: reasons[request_id] != "error")
    shown = [f"{request_id} ({reasons[request_id] or 'live'})" for request_id in failed_first]
    more = f" and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return f"it has {', '.join(shown[:_MAX_LISTED]) or 'none'}{more}"


def _place(seconds: float, number: int) -> str:
    return f"{seconds:10.6f} s  event {number:<6}"


def _named(arrivals: Sequence[Arrival], name: str) -> list[EngineCoreRequest]:
    requests = [request_of(arrival) for arrival in arrivals]
    return [
        request for request in requests if name in (request.request_id, request.external_req_id)
    ]


def _described(request: EngineCoreRequest) -> str:
    params = request.params
    return (
        f"{len(request.prompt_token_ids)} tokens of prompt, max_tokens {params.max_tokens}, "
        f"temperature {params.temperature:g}, seed {params.seed}, priority {request.priority}"
    )


class _History:
    """A request, and its outputs so far."""

    def __init__(self, num_outputs: int = 0) -> None:
        self._num_outputs = num_outputs
        self._is_over = False

    def lines(self, event: Event, request_id: str) -> Iterator[str]:
        if self._is_over:
            return
        if event.call == "abort" and (event.request_ids is None or request_id in event.request_ids):
            yield "is aborted"
        if request_id in event.late_aborts:
            yield "is aborted while the step runs"
        for plan in event.plans:
            yield from self._planned(plan, request_id)
        for result in event.results:
            tokens = result.tokens.get(request_id) if isinstance(result.tokens, dict) else None
            if tokens:
                first, self._num_outputs = self._num_outputs, self._num_outputs + len(tokens)
                yield f"step {result.step}: output {first} is {', '.join(map(str, tokens))}"
            if request_id in result.faults:
                yield f"step {result.step}: fault: {result.faults[request_id][0]}"
        for ended in event.ended:
            if ended.request_id == request_id:
                self._is_over = True
                error = f": {ended.error}" if ended.error else ""
                yield f"ends: {ended.reason}{error}"

    def _planned(self, plan: PlanRecord, request_id: str) -> Iterator[str]:
        if request_id in plan.preempted:
            yield f"step {plan.step}: is preempted"
        for row in plan.new:
            if row.request_id == request_id:
                again = "runs again" if row.resumed else "begins to run"
                self._num_outputs = row.num_outputs
                yield (
                    f"step {plan.step}: {again}, {row.num_computed} tokens need no computing, "
                    f"blocks {', '.join(str(list(ids)) for ids in row.block_ids)}"
                )
        count = (plan.scheduled or {}).get(request_id, 0)
        if count:
            drafts = plan.drafts.get(request_id, ())
            shown = f", {len(drafts)} of them drafts" if drafts else ""
            yield f"step {plan.step}: {count} tokens are scheduled{shown}"
