"""Checks of the resulting logits: changed, per request, valid, deterministic and as declared."""

from __future__ import annotations

import torch

from hardpoint.plugins import BatchLogitsProcessor, Phase
from hardpoint.plugins.requests import FinishedError
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.testing.logits.batch import (
    LOGITS_KINDS,
    BatchFixture,
    difference,
    make_logits,
)
from hardpoint.testing.logits.subject import RequestCase, Subject
from hardpoint.testing.suite import EndOfSearchError, Violation

EFFECT = "effect: the processor runs, changes logits and uses its state"

_NO_EFFECT = (
    "draw other `arguments` and `params` (with token ids below vocab_size, and values that are "
    "not neutral), so that the suite has something to test; or "
)


class Effects:
    """The effects of a processor in any of the drawn cases.

    Attributes:
        ran: it was called.
        changed: a logit changed, or a request ended.
        used_state: it read its state, or declares none.
    """

    def __init__(self, subject: Subject) -> None:
        cls = subject.cls
        self._subject = subject
        has_arguments = cls.Arguments is not LogitsPlugin.Arguments
        self._is_asked_for = has_arguments or bool(cls.params_fields)
        self.ran = self.changed = False
        starts = cls.start is not LogitsPlugin.start
        self.used_state = subject.is_batch_level or not (
            starts or cls.device_state is not LogitsPlugin.device_state
        )

    def add(self, cases: list[RequestCase], tokens: list[int], seed: int) -> None:
        """Run cases, each advanced over some tokens, and record the effects.

        Raises:
            EndOfSearchError: all was seen.
        """
        batch = BatchFixture(self._subject, cases)
        try:
            for token in tokens:
                batch.advance([case.token(token) for case in cases])
        except FinishedError:
            self.ran = self.changed = self.used_state = True
            raise EndOfSearchError from None
        kind = LOGITS_KINDS[seed % len(LOGITS_KINDS)]
        logits = make_logits(seed, len(cases), self._subject.vocab_size, kind)
        before = batch.pipeline.num_steps
        with batch.pipeline.watching_state(batch.requests) as read:
            result = batch.process(logits)
        can_run = self._is_asked_for or any(
            self._subject.used_by_default(case.params) for case in cases
        )
        self.ran = self.ran or (can_run and batch.pipeline.num_steps > before)
        self.used_state = self.used_state or bool(read)
        self.changed = self.changed or not torch.equal(result, logits)
        if self.ran and self.changed and self.used_state:
            raise EndOfSearchError

    def check(self) -> None:
        """Check that everything was seen.

        Raises:
            Violation: something was not.
        """
        name = self._subject.cls.__name__
        if not self.ran:
            raise Violation(
                f"{name} never ran: it takes no arguments by which a request could ask for it, and "
                f"uses() returned False for all requests",
                f"{_NO_EFFECT}let uses() return True for the requests that it is for",
            )
        if not self.changed:
            raise Violation(
                f"{name} changed no logit, in none of the cases",
                f"{_NO_EFFECT}let apply or edits follow the arguments",
            )
        if not self.used_state:
            raise Violation(
                f"{name} declares state (start or device_state), but apply or edits never read it",
                "read rows.states() or rows.state_tensor(), or leave out start, advance and "
                "device_state",
            )


def check_bystanders(subject: Subject, cases: list[RequestCase], seed: int) -> None:
    """Check that rows of requests that do not use the processor keep their bits."""
    batch = BatchFixture(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, "masked")
    result = batch.process(logits)
    _compare_bystanders(cases, result, logits)
    processor = batch.pipeline.processor
    if isinstance(processor, BatchLogitsProcessor):
        _compare_bystanders(cases, processor.apply(logits.clone()), logits)
    if bystanders := [case for case in cases if not case.uses]:
        _check_not_called(subject, bystanders, logits[: len(bystanders)])


def _check_not_called(
    subject: Subject, bystanders: list[RequestCase], logits: torch.Tensor
) -> None:
    batch = BatchFixture(subject, bystanders)
    num_steps = batch.pipeline.num_steps
    row_logits = logits.clone()
    returned = batch.pipeline.apply(row_logits, batch.requests)
    if returned is not row_logits or batch.pipeline.num_steps != num_steps:
        raise Violation(
            "it ran in a step in which no request uses it",
            "let the framework decide which requests use a processor: do not override name or "
            "arguments",
        )


def check_argmax_claim(subject: Subject, cases: list[RequestCase], seed: int, kind: str) -> None:
    """Check that the most likely token, the lowest of equals, does not change."""
    batch = BatchFixture(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, kind)
    result = batch.process(logits)
    for case, before, after in zip(cases, logits, result, strict=True):
        if (first := _argmax(before)) != (now := _argmax(after)):
            raise Violation(
                f"argmax_invariant is True, but with {kind} logits the most likely token changed "
                f"from {first} to {now}, for {case}",
                "declare argmax_invariant = False, so that greedy requests do not skip the "
                "processor; or never lower the best logit, nor drop any token that equals it",
            )


def check_valid_logits(subject: Subject, cases: list[RequestCase], seed: int, kind: str) -> None:
    """Check that a token can be chosen from every row, for any arguments."""
    batch = BatchFixture(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, kind)
    if (repeats := seed % 3) and batch.requests:
        for step in range(repeats):  # states that have advanced
            batch.advance(
                [case.token((seed + step + row) % 7 - 3) for row, case in enumerate(cases)]
            )
    result = batch.process(logits)
    for case, row in zip(cases, result, strict=True):
        problem = None
        if bool(row.isnan().any()):
            problem = "NaN"
        elif bool((row == torch.inf).any()):
            problem = "+inf"
        elif not bool((row > -torch.inf).any()) and kind != "masked":
            problem = "no token that can be chosen"
        if problem:
            raise Violation(
                f"from {kind} logits it made a row with {problem}, for {case}",
                "an engine ends such a request with an error: keep at least one token, avoid "
                "0 * inf, inf - inf and division by zero, or reject the arguments in prepare",
            )


def check_deterministic(subject: Subject, cases: list[RequestCase], seed: int) -> None:
    """Check that two new instances give equal logits for equal inputs."""
    logits = make_logits(seed, len(cases), subject.vocab_size)
    results = []
    for _ in range(2):
        batch = BatchFixture(subject, cases)
        batch.advance([case.token(row - 2) for row, case in enumerate(cases)])
        results.append(batch.process(logits))
    for case, first, second in zip(cases, *results, strict=True):
        if (message := difference(second, first)) is not None:
            raise Violation(
                f"two new instances gave different logits for the same row: {message}; for {case}",
                "depend on logits, arguments, state and options alone: no random numbers, no "
                "clock, no order of a set, no state outside the instance",
            )


def check_masks_stay(subject: Subject, cases: list[RequestCase], seed: int) -> None:
    """Check that a token at -inf, masked before, stays at -inf."""
    if subject.cls.phase is Phase.FORCE:
        return
    batch = BatchFixture(subject, cases)
    logits = make_logits(seed, len(cases), subject.vocab_size, "masked")
    result = batch.process(logits)
    for case, before, after in zip(cases, logits, result, strict=True):
        unmasked = ((before == -torch.inf) & (after != -torch.inf)).nonzero().view(-1)
        if len(unmasked):
            token = int(unmasked[0])
            raise Violation(
                f"token {token} was masked (-inf) and became {float(after[token]):.9g}, for {case}",
                "masks and grammars run before: add to logits or scale them rather than set them, "
                "keep -inf where it is, or run in Phase.FORCE",
            )


def _compare_bystanders(
    cases: list[RequestCase], result: torch.Tensor, logits: torch.Tensor
) -> None:
    for row, case in enumerate(cases):
        if case.uses:
            continue
        if (message := difference(result[row], logits[row])) is not None:
            raise Violation(
                f"row {row} of {len(cases)} belongs to a request that does not use the processor, "
                f"and changed: {message}",
                "change only the rows of requests that use the processor; in the batch form, track "
                "which do (RowMap) and leave all other rows unchanged",
            )


def _argmax(row: torch.Tensor) -> int:
    """Return the lowest id of the largest logit; -1 for a row of NaN."""
    best = (row == row.amax()).nonzero().view(-1)
    return int(best[0]) if len(best) else -1
