"""The token ids between which a model reasons."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ReasoningMarkers"]


@dataclass(frozen=True)
class ReasoningMarkers:
    """The token ids that start and end a model's reasoning; either may be empty."""

    start: Sequence[int]
    end: Sequence[int]

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last marker in a prompt ends the reasoning."""
        return self.thinking_since(token_ids) is None and _end_of_last(self.end, token_ids) > 0

    def thinking_since(self, token_ids: Sequence[int]) -> int | None:
        """Return the index after the start marker that a prompt leaves open; None without one.

        A prompt may contain several markers; the last one decides.
        """
        opened, closed = _end_of_last(self.start, token_ids), _end_of_last(self.end, token_ids)
        # If both end at the same index, one is a suffix of the other and the longer one counts.
        opens = opened > closed or (opened == closed > 0 and len(self.start) > len(self.end))
        return opened if opens else None


def _end_of_last(marker: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return the index after the marker's last occurrence; 0 if it does not occur."""
    if not marker:
        return 0
    needle, text = array("q", marker).tobytes(), array("q", token_ids).tobytes()
    width = array("q").itemsize
    found = text.rfind(needle)
    while found > 0 and found % width:  # a match that begins inside a token
        found = text.rfind(needle, 0, found + len(needle) - 1)
    return found // width + len(marker) if found >= 0 else 0
