"""Rules on state: who may change it, and that every way to the same history ends the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.core.worker.sampling.drafts import with_drafts
from hardpoint.plugins import LogitsRequest
from hardpoint.testing.logits.batch import KINDS, Desk, alone, difference, make_logits
from hardpoint.testing.logits.subject import MAX_ROWS, Case, Subject
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Violation


def check_pure(subject: Subject, cases: list[Case], seed: int) -> None:
    """`apply` or `edits`, called twice, gives the same and changes nothing but its result."""
    desk = Desk(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, KINDS[seed % len(KINDS)])
    what = desk.stage.method_name
    before = _belongings(desk)
    first = desk.process(logits)
    after = _belongings(desk)
    for (thing, was), (_, now) in zip(before, after, strict=True):
        if was != now:
            raise Violation(
                f"{what} changed {thing}",
                f"{what} may be called twice for a step, and for draft rows: change state only in "
                f"advance or advance_rows (in the batch form: in update_state)",
            )
    again = [desk.process(logits)]
    desk.process(logits, desk.requests[::-1])
    again.append(desk.process(logits))
    if not subject.batchwise:
        again.append(desk.process_apart(logits))
    for row, case in enumerate(cases):
        for result in again:
            if (differs := difference(result[row], first[row])) is not None:
                raise Violation(
                    f"{what}, called again on the same row, gave another result: {differs}; "
                    f"for {case}",
                    f"let {what} remember nothing from call to call but caches keyed by "
                    f"rows.version and by all that they depend on",
                )


def check_advance(subject: Subject, cases: list[Case], tokens: list[int], seed: int) -> None:
    """A state carried on token by token is as good as one started on the whole history."""
    desk = Desk(subject, cases)
    for token in tokens:
        desk.advance([token] * len(cases))
    logits = make_logits(seed, len(cases), subject.vocab_size)
    result = desk.process(logits)
    for row, case in enumerate(cases):
        wanted = alone(subject, case, desk.outputs[row], logits[row])
        if (differs := difference(result[row], wanted)) is not None:
            raise Violation(
                f"started on outputs {list(case.outputs)} and advanced over {tokens}, {differs}; "
                f"wanted is what start on all of the outputs gives; for {case}",
                "a preempted request starts again on all that it had said: let start count "
                "request.output_token_ids exactly as advance counts tokens (likewise start_row "
                "and advance_rows)",
            )


def check_fork(subject: Subject, case: Case, drafts: list[int], seed: int) -> None:
    """A forked state, advanced over drafts, leaves the original alone."""
    desk = Desk(subject, [case])
    (request,) = desk.requests
    logits = make_logits(seed, 1, subject.vocab_size)
    result, before = desk.process(logits), _state_of(desk, request)
    _draft_rows(desk, [drafts])
    after, again = _state_of(desk, request), desk.process(logits)
    if before != after or difference(again[0], result[0]) is not None:
        raise Violation(
            f"the drafts {drafts} changed the request's own state, for {case}",
            "let fork copy all that advance changes (the default is copy.deepcopy), or let "
            "advance return a new state and change none",
        )


def check_drafts(subject: Subject, cases: list[Case], drafts: list[list[int]], seed: int) -> None:
    """The row of a draft is that of the request which has said the draft."""
    desk = Desk(subject, cases)
    drafts = drafts[: len(cases)] + [[]] * (len(cases) - len(drafts))
    rows = _draft_rows(desk, drafts)
    logits = make_logits(seed, len(rows), subject.vocab_size)
    result = desk.process(logits, rows)
    for place, view in enumerate(rows):
        row = (view.draft_of or view).row
        wanted = alone(subject, cases[row], view.output_token_ids, logits[place])
        if (differs := difference(result[place], wanted)) is not None:
            said = list(view.output_token_ids[len(cases[row].outputs) :])
            raise Violation(
                f"after the drafts {said}, {differs}; wanted is what the same tokens give when "
                f"they were really said; for {cases[row]}",
                "look at rows.requests[i].output_token_ids and rows.states()[i] of the row itself; "
                "in the batch form, leave supports_drafts False unless apply does not depend on "
                "the outputs",
            )


def check_swaps(
    subject: Subject, cases: list[Case], swaps: list[tuple[int, int]], seed: int
) -> None:
    """Requests that change places keep what is theirs."""
    desk = Desk(subject, cases)
    for first, second in swaps:
        one, two = first % len(cases), second % len(cases)
        if one != two:
            desk.swap(one, two)
        desk.advance([(first + second + row) % subject.vocab_size for row in range(len(cases))])
    logits = make_logits(seed, len(cases), subject.vocab_size)
    result = desk.process(logits)
    for place, case in enumerate(cases):
        wanted = alone(subject, case, desk.outputs[place], logits[place])
        if (differs := difference(result[place], wanted)) is not None:
            raise Violation(
                f"after the swaps {swaps}, {differs}; for {case}",
                "in update_state apply removed, then added, then moved; a move of direction SWAP "
                "exchanges both rows (hardpoint.plugins.RowMap does all this)",
            )


def _draft_rows(desk: Desk, drafts: Sequence[Sequence[int]]) -> list[LogitsRequest]:
    try:
        return with_drafts(desk.requests, drafts, desk.pipeline, MAX_ROWS)
    except Exception as cause:
        raise Violation(
            f"fork, or advance on a forked state, raised {type(cause).__name__}: {cause}",
            "fork must copy every state that start or advance returns",
        ) from cause


def _belongings(desk: Desk) -> list[tuple[str, Any]]:
    """Return what `apply` and `edits` must leave as it is, by name."""
    named: list[tuple[str, Any]] = []
    for request in desk.requests:
        named += [
            ("the state of a request", snapshot(request.state.get(desk.subject.name))),
            ("a request's device state", _device_state_of(desk, request)),
            ("the list of a request's output ids", snapshot(request.output_token_ids)),
            ("the list of a request's prompt ids", snapshot(request.prompt_token_ids)),
            ("the arguments of a request", snapshot(request.arguments)),
        ]
    return named


def _state_of(desk: Desk, request: LogitsRequest) -> Any:
    return snapshot(request.state.get(desk.subject.name)), _device_state_of(desk, request)


def _device_state_of(desk: Desk, request: LogitsRequest) -> Any:
    state = desk.stage.device_state
    if not state or not request.arguments:
        return None
    names = desk.stage.processor.device_state()
    return snapshot({name: state.gather(name, [request]) for name in names})
