"""An index of texts: where the longest end of a sequence of tokens stands in them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_END = -1
"""After each text; no token id."""

_Tokens = NDArray[np.int32]


class CorpusIndex:
    """The places of texts, ordered by the tokens before them, nearest first: 8 bytes a token.

    The places with most of the last tokens of a sequence are then next to where its own end would
    be.

    Attributes:
        num_bytes: bytes that it occupies.
    """

    def __init__(self, texts: Sequence[Sequence[int]], longest: int) -> None:
        """Order the places of texts by the `longest` tokens before each."""
        self._longest = longest
        joined = array("i")
        for text in texts:
            joined.extend(text)
            joined.append(_END)
        tokens: _Tokens = np.array(joined, dtype=np.int32)
        # Before the first place there is an end, too.
        padded = np.concatenate([np.full(longest, _END, np.int32), tokens])
        before = [padded[longest - back : len(padded) - back] for back in range(1, longest + 1)]
        # The order goes on through the text before an _END, which `_common` does not.
        order = np.lexsort(before[::-1]).astype(np.int32)
        self._places: _Tokens = order[tokens[order] != _END]
        self._tokens = tokens
        self.num_bytes = self._tokens.nbytes + self._places.nbytes

    def after(self, newest: Sequence[int], shortest: int, limit: int) -> list[int]:
        """Return up to `limit` tokens that follow the longest end of a sequence.

        Args:
            newest: end of the sequence.
            shortest: tokens that have to be the same; below, there are none.
            limit: tokens, at most.
        """
        wanted = list(newest[: -self._longest - 1 : -1])
        at = bisect_left(self._places, wanted, key=self._before)
        near = [int(place) for place in self._places[max(0, at - 1) : at + 1]]
        common, place = max(((self._common(p, wanted), p) for p in near), default=(0, 0))
        if common < shortest:
            return []
        following: list[int] = self._tokens[place : place + limit].tolist()
        return following[: following.index(_END)] if _END in following else following

    def _before(self, place: int) -> list[int]:
        """Return the tokens before a place, the nearest first."""
        start = max(0, int(place) - self._longest)
        before: list[int] = self._tokens[start:place][::-1].tolist()
        return before + [_END] * (self._longest - len(before))

    def _common(self, place: int, wanted: Sequence[int]) -> int:
        """Return how many tokens before a place equal the wanted ones."""
        count = 0
        for mine, other in zip(self._before(place), wanted, strict=False):
            if mine != other:
                break
            count += 1
        return count
