"""The check that a processor has an effect at all, without which the others test nothing."""

from __future__ import annotations

import torch

from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.testing.logits.batch import LOGITS_KINDS, BatchFixture, make_logits
from hardpoint.testing.logits.subject import Case, Subject
from hardpoint.testing.suite import EndOfSearchError, Violation

RULE = "effect: the processor runs, changes logits and uses its state"

_FIX = (
    "draw other `arguments` and `params` (with token ids below vocab_size, and values that are "
    "not neutral), so that the suite has something to test; or "
)


class Effects:
    """What a processor did in any of the drawn cases.

    Attributes:
        ran: it was called.
        changed: a logit changed.
        used_state: it read its state, or declares none.
    """

    def __init__(self, subject: Subject) -> None:
        """Start with nothing seen."""
        cls = subject.cls
        self._subject = subject
        self._takes_arguments = cls.Arguments is not LogitsPlugin.Arguments
        self.ran = self.changed = False
        starts = cls.start is not LogitsPlugin.start
        self.used_state = subject.is_batch_level or not (
            starts or cls.device_state is not LogitsPlugin.device_state
        )

    def add(self, cases: list[Case], tokens: list[int], seed: int) -> None:
        """Run cases, each advanced over some tokens, and note what happens.

        Raises:
            EndOfSearchError: all was seen.
        """
        batch = BatchFixture(self._subject, cases)
        for token in tokens:
            batch.advance([case.token(token) for case in cases])
        kind = LOGITS_KINDS[seed % len(LOGITS_KINDS)]
        logits = make_logits(seed, len(cases), self._subject.vocab_size, kind)
        before = batch.pipeline.num_steps
        with batch.pipeline.watching_state(batch.requests) as read:
            result = batch.process(logits)
        can_run = self._takes_arguments or any(
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
                f"{_FIX}let uses() return True for the requests that it is for",
            )
        if not self.changed:
            raise Violation(
                f"{name} changed no logit, in none of the cases",
                f"{_FIX}let apply or edits change what the arguments say",
            )
        if not self.used_state:
            raise Violation(
                f"{name} declares state (start or device_state), but apply or edits never read it",
                "read rows.states() or rows.state_tensor(), or leave out start, advance and "
                "device_state",
            )
