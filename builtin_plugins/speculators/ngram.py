"""Speculator by n-gram lookup: drafts the continuation of an earlier match in the request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import DraftRequest, Meta, Speculator

_MOST_PLACES = 16
"""Places that are compared, so that no text makes a search long."""


class NGram(Speculator):
    """Drafts from the request's own prompt and output (prompt lookup decoding).

    It searches for earlier occurrences of the last `shortest` tokens, and drafts what followed the
    longest match, or the latest of equal ones (A. Saxena, "Prompt Lookup Decoding", 2023). In a
    prompt with embeddings, it searches the part after the last one.
    """

    contract = 1
    is_quick = True

    class Options(plugins.Options):
        """Options.

        Attributes:
            shortest: minimum length of a match in tokens.
            longest: maximum number of compared tokens.
        """

        shortest: Annotated[int, Meta(ge=1, le=16)] = 2
        longest: Annotated[int, Meta(ge=1, le=256)] = 16

        def __post_init__(self) -> None:
            """Check that the two fit together."""
            if self.shortest > self.longest:
                raise ValueError(f"expected shortest <= longest ({self.longest})")

    options: Options

    def start(self, request: DraftRequest) -> NGramIndex:
        """Return the index of the prompt."""
        index = NGramIndex(self.options.shortest)
        index.extend(request.last_prompt_ids)
        index.num_prompt = len(index)
        return index

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[list[int]]:  # noqa: ARG002
        """Return the tokens that followed the newest ones of each request before."""
        return [self._after(request) for request in requests]

    def _after(self, request: DraftRequest) -> list[int]:
        index: NGramIndex = request.state
        known = len(index) - index.num_prompt
        index.extend(request.output_token_ids[known:])
        return index.after(self.options.longest, request.limit)


class NGramIndex:
    """Tokens, and where each run of a few of them stood: 16 to 100 bytes a token.

    Runs are found by a dictionary of the latest place of each, and the place before each place.

    Attributes:
        num_prompt: tokens of the prompt; the others are output.
    """

    def __init__(self, length: int) -> None:
        self._length, self.num_prompt = length, 0
        self._tokens = array("i")
        self._latest: dict[tuple[int, ...], int] = {}  # of the token after each run
        self._before = array("i")  # the place before each place, -1 if there is none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        known, latest, length = self._tokens, self._latest, self._length
        for token in tokens:
            place, earlier = len(known), -1
            if place >= length:
                run = tuple(known[place - length :])
                earlier = latest.get(run, -1)
                latest[run] = place
            self._before.append(earlier)
            known.append(token)

    def after(self, longest: int, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the last ones before; empty if none did.

        Tokens after the end follow from the drafts themselves: a text that repeats
        itself is drafted on.
        """
        place = self._best(longest)
        if place is None:
            return []
        drafts = list(self._tokens[place : place + limit])
        while len(drafts) < limit:
            drafts.append(drafts[len(drafts) - (len(self._tokens) - place)])
        return drafts

    def _best(self, longest: int) -> int | None:
        tokens, size = self._tokens, len(self._tokens)
        place = self._latest.get(tuple(tokens[size - self._length :]), -1)
        best, best_length = None, 0
        for _ in range(_MOST_PLACES):
            if place < 0:
                break
            length = self._length
            while length < min(longest, place) and tokens[place - length - 1] == tokens[~length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._before[place]
        return best
