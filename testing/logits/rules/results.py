"""Rules on what comes out: of a row's own making, sound, the same each time, as claimed."""

from __future__ import annotations

import torch

from hardpoint.plugins import BatchLogitsProcessor, Phase
from hardpoint.testing.logits.batch import Desk, difference, make_logits
from hardpoint.testing.logits.subject import Case, Subject
from hardpoint.testing.suite import Violation


def check_bystanders(subject: Subject, cases: list[Case], seed: int) -> None:
    """Rows of requests that do not use the processor keep their very bits."""
    desk = Desk(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, "masked")
    steps = desk.stage.meter.steps
    result = desk.process(logits)
    _compare_bystanders(cases, result, logits)
    processor = desk.stage.processor
    if isinstance(processor, BatchLogitsProcessor):
        _compare_bystanders(cases, processor.apply(logits.clone()), logits)
    if any(case.uses for case in cases):
        return
    given = logits.clone()
    returned = desk.pipeline.apply(given, desk.requests)
    if returned is not given or desk.stage.meter.steps != steps:
        raise Violation(
            "it ran in a step in which no request uses it",
            "leave it to the framework who uses a processor: do not override name or arguments",
        )


def check_argmax_claim(subject: Subject, cases: list[Case], seed: int, kind: str) -> None:
    """Under `argmax_invariant = True` the likeliest token, the lowest of equals, never changes."""
    desk = Desk(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, kind)
    result = desk.process(logits)
    for case, before, after in zip(cases, logits, result, strict=True):
        if (was := _first_best(before)) != (now := _first_best(after)):
            raise Violation(
                f"argmax_invariant is True, but with {kind} logits the likeliest token changed "
                f"from {was} to {now}, for {case}",
                "say argmax_invariant = False, so that greedy requests do not skip the processor; "
                "or never lower the best logit, nor drop any token that equals it",
            )


def check_sound(subject: Subject, cases: list[Case], seed: int, kind: str) -> None:
    """A token can be chosen from every row, whatever the arguments."""
    desk = Desk(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, kind)
    if (repeats := seed % 3) and desk.requests:
        for step in range(repeats):  # states that have come a little way
            desk.advance(
                [(seed + step + row) % 7 % subject.vocab_size for row in range(len(cases))]
            )
    result = desk.process(logits)
    for case, row in zip(cases, result, strict=True):
        wrong = None
        if bool(row.isnan().any()):
            wrong = "NaN"
        elif bool((row == torch.inf).any()):
            wrong = "+inf"
        elif not bool((row > -torch.inf).any()) and kind != "masked":
            wrong = "no token that can be chosen"
        if wrong:
            raise Violation(
                f"from {kind} logits it made a row with {wrong}, for {case}",
                "an engine ends such a request with an error: keep at least one token, mind "
                "0 * inf, inf - inf and division by zero, or refuse the arguments in prepare",
            )


def check_deterministic(subject: Subject, cases: list[Case], seed: int) -> None:
    """Two fresh instances make the same of the same."""
    logits = make_logits(seed, len(cases), subject.vocab_size)
    results = []
    for _ in range(2):
        desk = Desk(subject, cases)
        desk.advance([row % subject.vocab_size for row in range(len(cases))])
        results.append(desk.process(logits))
    for case, first, second in zip(cases, *results, strict=True):
        if (differs := difference(second, first)) is not None:
            raise Violation(
                f"two fresh instances made different logits of the same row: {differs}; for {case}",
                "depend on logits, arguments, state and options alone: no random numbers, no "
                "clock, no order of a set, no state outside of the instance",
            )


def check_masks_stay(subject: Subject, cases: list[Case], seed: int) -> None:
    """A token at -inf, forbidden by a mask before, stays there."""
    if subject.cls.phase is Phase.FORCE:
        return
    desk = Desk(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, "masked")
    result = desk.process(logits)
    for case, before, after in zip(cases, logits, result, strict=True):
        back = ((before == -torch.inf) & (after != -torch.inf)).nonzero().view(-1)
        if len(back):
            token = int(back[0])
            raise Violation(
                f"token {token} was forbidden (-inf) and came back as {float(after[token]):.9g}, "
                f"for {case}",
                "masks and grammars run before: add to logits or scale them rather than set them, "
                "keep -inf where it is, or run in Phase.FORCE",
            )


def _compare_bystanders(cases: list[Case], result: torch.Tensor, logits: torch.Tensor) -> None:
    for row, case in enumerate(cases):
        if case.uses:
            continue
        if (differs := difference(result[row], logits[row])) is not None:
            raise Violation(
                f"row {row} of {len(cases)} belongs to a request that does not use the processor, "
                f"and changed: {differs}",
                "change only the rows of requests that use the processor; in the batch form, keep "
                "books of who does (RowMap) and leave all other rows as they are",
            )


def _first_best(row: torch.Tensor) -> int:
    """Return the lowest id of the largest logit; -1 if there is none, as in a row of NaN."""
    best = (row == row.amax()).nonzero().view(-1)
    return int(best[0]) if len(best) else -1
