"""Checks of request state: it depends on the history only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hardpoint.plugins import LogitsRequest, RequestFault
from hardpoint.plugins.requests import FinishedError
from hardpoint.testing.logits.batch import (
    ENDS_ADVICE,
    LOGITS_KINDS,
    BatchFixture,
    allowed_tokens,
    difference,
    make_logits,
    run_alone,
)
from hardpoint.testing.logits.subject import MAX_ROWS, RequestCase, Subject
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Violation, short_repr

_MOST_TOKENS = 48  # in which a request may end
_RESUME_ADVICE = (
    "let observe depend on its arguments alone, for apply never ran there; or set supports_resume "
    "to False"
)


def check_pure(subject: Subject, cases: list[RequestCase], seed: int) -> None:
    """Check that `apply` or `edits` is repeatable and changes nothing but its result."""
    batch = BatchFixture(subject, cases)
    logits = make_logits(
        seed, len(cases), subject.vocab_size, LOGITS_KINDS[seed % len(LOGITS_KINDS)]
    )
    method = batch.pipeline.method_name
    before = _observable_state(batch)
    first = batch.process(logits)
    after = _observable_state(batch)
    for (name, was), (_, now) in zip(before, after, strict=True):
        if was != now:
            raise Violation(
                f"{method} changed {name}",
                f"{method} may be called twice for a step, and for draft rows: change state only "
                f"in advance or advance_rows (in the batch form: in update_state)",
            )
    again = [batch.process(logits)]
    batch.process(logits, batch.requests[::-1])
    again.append(batch.process(logits))
    if not subject.is_batch_level:
        again.append(batch.process_row_by_row(logits))
    for row, case in enumerate(cases):
        for result in again:
            if (message := difference(result[row], first[row])) is not None:
                raise Violation(
                    f"{method}, called again on the same row, gave another result: {message}; "
                    f"for {case}",
                    f"let {method} keep nothing between calls but caches keyed by "
                    f"rows.version and by everything else that they depend on",
                )


def check_advance(subject: Subject, cases: list[RequestCase], tokens: list[int], seed: int) -> None:
    """Check that an advanced state equals one started on the whole history."""
    batch = BatchFixture(subject, cases)
    for token in tokens:
        batch.advance([case.token(token) for case in cases])
    logits = make_logits(seed, len(cases), subject.vocab_size)
    result = batch.process(logits)
    for row, case in enumerate(cases):
        expected = run_alone(subject, case, batch.outputs[row], logits[row])
        if (message := difference(result[row], expected)) is not None:
            raise Violation(
                f"started on outputs {list(case.outputs)} and advanced over "
                f"{batch.outputs[row][len(case.outputs) :]}, {message}; "
                f"expected is the result of start on all outputs; for {case}",
                "a preempted request starts again on all of its outputs: let start count "
                "request.output_token_ids exactly as advance counts tokens (likewise start_row "
                "and advance_rows)",
            )


def check_fork(subject: Subject, case: RequestCase, drafts: list[int], seed: int) -> None:
    """Check that advancing a forked state over drafts does not change the original."""
    batch, drafts = BatchFixture(subject, [case]), [case.token(draft) for draft in drafts]
    (request,) = batch.requests
    logits = make_logits(seed, 1, subject.vocab_size)
    result, before = batch.process(logits), _state_of(batch, request)
    _draft_rows(batch, [drafts])
    after, again = _state_of(batch, request), batch.process(logits)
    if before != after or difference(again[0], result[0]) is not None:
        raise Violation(
            f"the drafts {drafts} changed the request's own state, for {case}",
            "let fork copy everything that advance changes (the default is copy.deepcopy), or let "
            "advance return a new state and change none",
        )


def check_drafts(
    subject: Subject, cases: list[RequestCase], drafts: list[list[int]], seed: int
) -> None:
    """Check that a draft's row equals the row of a request that generated the draft."""
    batch = BatchFixture(subject, cases)
    drafts = [[case.token(n) for n in tokens] for case, tokens in zip(cases, drafts, strict=False)]
    drafts += [[]] * (len(cases) - len(drafts))
    rows = _draft_rows(batch, drafts)
    logits = make_logits(seed, len(rows), subject.vocab_size)
    result = batch.process(logits, rows)
    for index, view in enumerate(rows):
        row = (view.draft_of or view).row
        expected = run_alone(subject, cases[row], view.output_token_ids, logits[index])
        if (message := difference(result[index], expected)) is not None:
            generated = list(view.output_token_ids[len(cases[row].outputs) :])
            raise Violation(
                f"after the drafts {generated}, {message}; expected is the result for the same "
                f"tokens as outputs; for {cases[row]}",
                "use rows.requests[i].output_token_ids and rows.states()[i] of the row itself; "
                "in the batch form, leave supports_drafts False unless apply does not depend on "
                "the outputs",
            )


def check_observed_drafts(
    subject: Subject, case: RequestCase, drafts: list[int], seed: int
) -> None:
    """Check that states after drafts equal the states after the same tokens."""
    batch, alone = BatchFixture(subject, [case]), BatchFixture(subject, [case])
    drafts = [case.token(draft) for draft in drafts]
    (source,) = batch.requests
    before = _state_of(batch, source)
    for depth, draft in enumerate(drafts):
        logits = make_logits(seed + depth, 1, subject.vocab_size)
        result, expected = batch.process(logits, [source])[0], alone.process(logits)[0]
        if (message := difference(result, expected)) is not None:
            raise Violation(
                f"after the drafts {drafts[:depth]}, {message}; expected is the result for a "
                f"request that generated them; for {case}",
                "let apply and edits depend on rows.states() and the rows' own outputs, and "
                "observe on its arguments alone",
            )
        (token,) = allowed_tokens(batch.pipeline, result.unsqueeze(0), [draft])
        try:
            source = batch.pipeline.draft_view(source, token, MAX_ROWS + depth, result)
        except FinishedError:
            raise
        except Exception as cause:
            raise Violation(
                f"fork, or observe on a forked state, raised {type(cause).__name__}: {cause}",
                "fork must copy every state that start or observe returns",
            ) from cause
        alone.advance([token], logits=logits)
    if _state_of(batch, batch.requests[0]) != before:
        raise Violation(
            f"the drafts {drafts} changed the request's own state, for {case}",
            "let observe return a new state and change none",
        )


def check_resumed(subject: Subject, case: RequestCase, tokens: list[int], seed: int) -> None:
    """Check that tokens and their logprobs are all that another engine needs for the state."""
    batch, observed = BatchFixture(subject, [case]), []
    for depth, token in enumerate(tokens):
        logits = make_logits(seed + depth, 1, subject.vocab_size)
        processed = batch.process(logits)
        (chosen,) = allowed_tokens(batch.pipeline, processed, [case.token(token)])
        observed.append(float(processed.log_softmax(-1)[0, chosen]))
        batch.advance([chosen], logits=logits)
    elsewhere = BatchFixture(subject, [])
    request = case.request(subject, "r0", list(batch.outputs[0]), 0)
    if (fault := elsewhere.pipeline.start(request, observed)) is not None:
        problem = fault.message if isinstance(fault, RequestFault) else f"it ends: {fault.reason}"
        raise Violation(f"in another engine, {problem}", _RESUME_ADVICE)
    was, now = _state_of(batch, batch.requests[0]), _state_of(elsewhere, request)
    if was != now:
        raise Violation(
            f"after {batch.outputs[0]}, another engine has the state {short_repr(now)} instead of "
            f"{short_repr(was)}, for {case}",
            _RESUME_ADVICE,
        )


def check_ends(subject: Subject, cases: list[RequestCase], tokens: list[int], seed: int) -> None:
    """Check that a request ends at the same token alone, in a batch, and over drafts.

    Alone it is preempted once, if the processor does not observe.
    """
    numbers = [tokens[place % len(tokens)] for place in range(_MOST_TOKENS)]
    batch = BatchFixture(subject, cases)
    together = dict.fromkeys(range(len(cases)), len(numbers))
    running = list(range(len(cases)))
    for place, number in enumerate(numbers):
        for row in list(running):
            try:
                batch.advance([cases[row].token(number)], [batch.requests[row]])
            except FinishedError:
                together[row] = place
                running.remove(row)
    for row, case in enumerate(cases):
        alone = _end_alone(subject, case, numbers, seed)
        if alone != together[row]:
            where = [
                f"after {n} tokens" if n < len(numbers) else "never" for n in (together[row], alone)
            ]
            raise Violation(
                f"in a batch of {len(cases)}, it ends {where[0]}, and alone, over drafts and after "
                f"a preemption, {where[1]}; for {case}",
                ENDS_ADVICE,
            )


def _end_alone(subject: Subject, case: RequestCase, numbers: list[int], seed: int) -> int:
    fixture = BatchFixture(subject, [case])
    for place, number in enumerate(numbers):
        (request,), token = fixture.requests, case.token(number)
        logits = torch.zeros(1, subject.vocab_size)
        processed = fixture.process(logits)
        (token,) = allowed_tokens(fixture.pipeline, processed, [token])
        drafted = advanced = False
        if subject.cls.supports_drafts:
            try:
                shown = processed[0] if subject.observes else None
                fixture.pipeline.draft_view(request, token, MAX_ROWS, shown)
            except FinishedError:
                drafted = True
        try:
            fixture.advance([token])
        except FinishedError:
            advanced = True
        if drafted != advanced and subject.cls.supports_drafts:
            problem = "a draft ends the request, and the same token does not"
            if advanced:
                problem = "a token ends the request, and the same token as a draft does not"
            raise Violation(f"after {fixture.outputs[0]}, {problem}; for {case}", ENDS_ADVICE)
        if advanced:
            return place
        if place == seed % len(numbers) and not subject.observes:  # it is preempted
            outputs = tuple(fixture.outputs[0])
            fixture = BatchFixture(subject, [replace(case, outputs=outputs)])
    return len(numbers)


def check_swaps(
    subject: Subject, cases: list[RequestCase], swaps: list[tuple[int, int]], seed: int
) -> None:
    """Check that requests that exchange rows keep their state."""
    batch = BatchFixture(subject, cases)
    for first, second in swaps:
        first_row, two = first % len(cases), second % len(cases)
        if first_row != two:
            batch.swap(first_row, two)
        batch.advance([case.token(min(first - second + row, 3)) for row, case in enumerate(cases)])
    logits = make_logits(seed, len(cases), subject.vocab_size)
    result = batch.process(logits)
    for row, case in enumerate(cases):
        if subject.observes:
            alone = BatchFixture(subject, [case])
            for token in batch.outputs[row]:
                alone.advance([token])
            expected = alone.process(logits[row : row + 1])[0]
        else:
            expected = run_alone(subject, case, batch.outputs[row], logits[row])
        if (message := difference(result[row], expected)) is not None:
            raise Violation(
                f"after the swaps {swaps}, {message}; for {case}",
                "in update_state apply removed, then added, then moved; a move of direction SWAP "
                "exchanges both rows (hardpoint.plugins.RowMap does all this)",
            )


def _draft_rows(batch: BatchFixture, drafts: Sequence[Sequence[int]]) -> list[LogitsRequest]:
    try:
        rows: list[LogitsRequest] = []
        scratch = itertools.count(MAX_ROWS)
        for request, tokens in zip(batch.requests, drafts, strict=True):
            rows.append(request)
            for token in tokens:
                rows.append(batch.pipeline.draft_view(rows[-1], token, next(scratch)))
        return rows
    except FinishedError:
        raise
    except Exception as cause:
        raise Violation(
            f"fork, or advance on a forked state, raised {type(cause).__name__}: {cause}",
            "fork must copy every state that start or advance returns",
        ) from cause


def _observable_state(batch: BatchFixture) -> list[tuple[str, Any]]:
    """Return the named values that `apply` and `edits` must not change."""
    named: list[tuple[str, Any]] = []
    for request in batch.requests:
        named += [
            ("the state of a request", snapshot(request.state.get(batch.subject.name))),
            ("a request's device state", _device_state_of(batch, request)),
            ("the list of a request's output ids", snapshot(request.output_token_ids)),
            ("the list of a request's prompt ids", snapshot(request.prompt_token_ids)),
            ("the arguments of a request", snapshot(request.arguments)),
        ]
    return named


def _state_of(batch: BatchFixture, request: LogitsRequest) -> Any:
    return snapshot(request.state.get(batch.subject.name)), _device_state_of(batch, request)


def _device_state_of(batch: BatchFixture, request: LogitsRequest) -> Any:
    return snapshot(batch.pipeline.device_state(request))
