"""Spans of prompts with bidirectional attention."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import EngineCoreRequest, LogitsRequest

from .packed_step import IntArray

__all__ = ["Spans"]


class Spans:
    """Bidirectional attention spans of prompts, such as the tokens of an image."""

    def __init__(self) -> None:
        self._of: dict[str, Sequence[range]] = {}

    def add(self, request: EngineCoreRequest) -> None:
        """Add the spans of a request, if it has any."""
        if spans := [range(f.offset, f.end) for f in request.features if f.sees_itself]:
            self._of[request.request_id] = spans

    def remove(self, request_id: str) -> None:
        """Remove the spans of a request."""
        self._of.pop(request_id, None)

    def last_seen(
        self,
        requests: Sequence[LogitsRequest],
        starts: IntArray,
        query_starts: IntArray,
        positions: IntArray,
    ) -> IntArray | None:
        """Return the last position that each token of a step sees; None if each sees its own.

        Args:
            requests: requests of the step.
            starts: tokens of each that were computed before.
            query_starts: first token of each, and the number of all tokens.
            positions: position of each token.
        """
        sees: IntArray | None = None
        for index, request in enumerate(requests if self._of else ()):
            first, begin = int(starts[index]), int(query_starts[index])
            end = first + int(query_starts[index + 1]) - begin
            for span in self._of.get(request.request_id, ()):
                seen = range(max(span.start, first), min(span.stop, end))
                if seen:
                    sees = positions.copy() if sees is None else sees
                    sees[begin + seen.start - first : begin + seen.stop - first] = seen.stop - 1
        return sees
