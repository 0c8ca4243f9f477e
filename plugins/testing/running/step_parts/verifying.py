"""Steps with drafts for the worker half of a step part that verifies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from hardpoint.plugins import LogitsRequest, SamplingParams, SchedulerOutput
from hardpoint.testing.suite import short_repr

from . import rules

__all__ = ["check_verifier"]


class ScriptedRows:
    """The rows of a step with known tokens; see `DraftedStep`.

    Attributes:
        tokens: the sampled tokens, by row.
    """

    def __init__(
        self, drafts: Mapping[str, Sequence[int]], known: Mapping[str, Sequence[int]], in_turn: bool
    ) -> None:
        """Sample nothing yet.

        Args:
            drafts: drafts by request.
            known: tokens of each request: accepted drafts, then one more.
            in_turn: see `DraftedStep`.
        """
        params = SamplingParams()
        self.requests = [LogitsRequest(name, (), (), params, ()) for name in drafts]
        self.drafts, self.in_turn = list(drafts.values()), in_turn
        self._known = [known[name] for name in drafts]
        self.tokens: dict[tuple[int, int], int] = {}

    def sample(self, rows: Sequence[tuple[int, int]]) -> list[int | None]:
        """Return the known tokens; after them, some that are not drafts."""
        before, sampled = set(self.tokens), list[int | None]()
        for index, depth in rows:
            drafts, known = self.drafts[index], self._known[index]
            if not 0 <= depth <= len(drafts):
                raise IndexError(
                    f"the row {(index, depth)}, of a request with {len(drafts)} drafts"
                )
            if depth and (index, depth - 1) not in (before if self.in_turn else self.tokens):
                sampled.append(None)
                continue
            last = drafts[depth] if depth < len(drafts) else 0
            token = known[depth] if depth < len(known) else int(last == 0)
            self.tokens[index, depth] = token
            sampled.append(token)
        return sampled


def check_verifier(
    verify: Callable[[ScriptedRows], Any],
    plan: SchedulerOutput,
    known: Mapping[str, Sequence[int]],
) -> None:
    """Check the drafts that `verify_drafts` of a half accepts in a step.

    Args:
        verify: calls the half.
        plan: plan of the step.
        known: tokens of each request.

    Raises:
        Violation: it accepts wrong drafts, or did not sample the first row of a request.
    """
    drafts = {
        name: list(takewhile(lambda token: token != plan.NO_DRAFT, plan.draft_token_ids[name]))
        for name in plan.draft_token_ids
        if known.get(name)
    }
    for in_turn in (False, True) if drafts else ():
        rows = ScriptedRows(drafts, known, in_turn)
        accepted = verify(rows)
        if not isinstance(accepted, Sequence) or len(accepted) != len(drafts):
            raise rules.VERIFIED.violation(
                f"verify_drafts() returned {short_repr(accepted)} for {len(drafts)} requests"
            )
        for index, count in enumerate(accepted):
            request_drafts = rows.drafts[index]
            if type(count) is not int or not 0 <= count <= len(request_drafts):
                raise rules.VERIFIED.violation(
                    f"verify_drafts() returned {short_repr(count)} for a request with "
                    f"{len(request_drafts)} drafts"
                )
            tokens = [rows.tokens.get((index, depth)) for depth in range(count + 1)]
            if None in tokens or tokens[:-1] != request_drafts[:count]:
                raise rules.VERIFIED.violation(
                    f"verify_drafts() accepted {count} of the drafts {request_drafts}, and sampled "
                    f"{tokens} in their rows"
                )
