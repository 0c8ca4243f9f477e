"""Draft verification: drafts are accepted that equal the tokens sampled at their positions."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint.plugins.sampling.rows import DraftedStep


class DraftVerification:
    """Accepts the drafts of each request up to the first wrong one.

    A sampled token depends on logits, seed and position only. So a draft is right if it equals the
    token that is sampled at its position.
    """

    def verify_drafts(self, step: DraftedStep) -> list[int]:
        """Return how many drafts of each request are accepted.

        All rows are sampled at once. The rows of a wrong draft must not end a request: if anything
        fails for one with drafts, the rows are sampled in turn.
        """
        if step.in_turn:
            return _verify_in_turn(step)
        rows = [
            (index, n) for index, drafts in enumerate(step.drafts) for n in range(1 + len(drafts))
        ]
        tokens = iter(step.sample(rows))
        accepted = []
        for drafts in step.drafts:
            sampled = list(islice(tokens, 1 + len(drafts)))
            if drafts and None in sampled:
                return _verify_in_turn(step)
            pairs = zip(sampled, drafts, strict=False)
            accepted.append(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
        return accepted


def _verify_in_turn(step: DraftedStep) -> list[int]:
    """Sample the rows of each request one after the other, up to the first wrong draft.

    Rows of different requests are sampled together. A row that fails after a right draft ends
    nothing: the next step meets it again, unless the request ends before.
    """
    accepted, live, depth = [0] * len(step.requests), list(range(len(step.requests))), 0
    while live:
        tokens = step.sample([(index, depth) for index in live])
        following = []
        for index, token in zip(live, tokens, strict=True):
            if token is not None:
                accepted[index] = depth
                if list(step.drafts[index][depth : depth + 1]) == [token]:
                    following.append(index)
        live, depth = following, depth + 1
    return accepted
