"""Shortest first, with ageing: who waits gets shorter."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint import plugins
from hardpoint.plugins import Annotated, Load, Meta, Request, SchedulingPolicy


class AgeingShortestFirst(SchedulingPolicy):
    """Runs the shortest prompt first; each second of waiting is worth some tokens.

    A key is read once, so that ageing has to be the same for all: of two requests, the later one
    starts with the tokens that the other has aged by then. No request starves: one of n tokens is
    overtaken for n / `tokens_per_second` seconds at most.

    Source: the highest response ratio of Brinch Hansen (1971), with a linear term for its quotient.
    """

    contract = 1

    class Options(plugins.Options):
        """`tokens_per_second`: prompt tokens that a second of waiting is worth."""

        tokens_per_second: Annotated[float, Meta(gt=0)] = 200.0

    options: Options

    def key(self, request: Request) -> float:
        """Order by prompt tokens, plus the aging of earlier requests by then."""
        return request.num_prompt_tokens + self.options.tokens_per_second * request.arrival_time

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the request that would run last, ties the latest admitted."""
        return max(reversed(running), key=self.key)
