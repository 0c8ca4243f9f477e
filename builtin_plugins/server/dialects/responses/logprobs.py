"""Log-probabilities of the texts of a response, by token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from hardpoint.builtin_plugins.server.dialects.chat.logprobs import TokenLogprob

_MAX_OCCURRENCES = 16
"""Occurrences of a text that are searched for one at the beginning of a token."""


class TextPositions:
    """The positions of an output's tokens, divided among its texts.

    Text lags behind its tokens while a stop string or a marker may begin in it. Between the texts
    are the tokens of markers, reasoning and calls.
    """

    def __init__(self, positions: Iterable[TokenLogprob] = ()) -> None:
        self._positions: list[TokenLogprob] = []
        self._starts: list[int] = []  # of each position, counted from the first byte of the output
        self._bytes = bytearray()
        self._base = 0  # start of `_bytes`, counted likewise
        self._next = 0  # first position of no text yet
        self._at = 0  # first byte of no text yet; a part of a position of a text, perhaps
        self._is_open, self._has_gaps, self._has_unknown = False, False, False
        self.add(positions)

    def add(self, positions: Iterable[TokenLogprob]) -> None:
        """Add the positions of new tokens."""
        for position in positions:
            self._positions.append(position)
            self._starts.append(self._base + len(self._bytes))
            self._bytes += bytes(position.bytes)

    def pop(self, text: str) -> list[TokenLogprob]:
        """Return the positions of new text; all if it is not there, such as parts of characters.

        Text that continues another also has the tokens between them.
        """
        begin = self._find(text)
        continues, self._is_open = self._is_open, True
        if begin is None:
            self._has_gaps = True
            return self.pop_rest()
        if not continues:
            self._next = max(self._next, bisect_right(self._starts, begin) - 1)
        elif begin != self._at:
            self._has_gaps = True
        return self._until(begin + len(text.encode()))

    def end(self) -> list[TokenLogprob]:
        """End the open text; return the rest of the positions if it was not found as it is."""
        rest = self.pop_rest() if self._has_gaps else []
        self._is_open = self._has_gaps = False
        return rest

    def pop_rest(self) -> list[TokenLogprob]:
        """Return the positions of no text yet."""
        rest = self._positions[self._next :]
        self._next, self._at = len(self._positions), self._base + len(self._bytes)
        self._forget()
        return rest

    def skip(self, text: str) -> None:
        """Leave out the tokens of reasoning or of a call."""
        begin = self._find(text)
        if begin is None:
            self._has_unknown = True
        else:
            self._until(begin + len(text.encode()))

    def leave_out_unknown(self) -> None:
        """Leave out all tokens so far if `skip` did not find some of them."""
        if self._has_unknown:
            self.pop_rest()
            self._has_unknown = False

    def _find(self, text: str) -> int | None:
        """Return the start of the next occurrence, if possible at the beginning of a token."""
        content, at = text.encode(), self._at - self._base
        first = begin = self._bytes.find(content, at)
        for _ in range(_MAX_OCCURRENCES):
            index = bisect_left(self._starts, begin + self._base)
            if begin <= at or self._starts[index : index + 1] == [begin + self._base]:
                break
            begin = self._bytes.find(content, begin + 1)
        else:
            begin = first
        begin = first if begin < 0 else begin
        return None if begin < 0 else begin + self._base

    def _until(self, end: int) -> list[TokenLogprob]:
        last = bisect_left(self._starts, end)
        positions = self._positions[self._next : last]
        self._next, self._at = max(self._next, last), end
        self._forget()
        return positions

    def _forget(self) -> None:
        """Free the memory of positions that are taken, once they are the greater part."""
        if 2 * self._next >= len(self._positions):
            del self._positions[: self._next], self._starts[: self._next]
            del self._bytes[: self._at - self._base]
            self._base, self._next = self._at, 0
