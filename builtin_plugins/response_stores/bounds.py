"""The bounds of a store."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.plugins import RequestError


@dataclass(frozen=True)
class Bounds:
    """How much a store keeps, and for how long.

    Attributes:
        seconds: how long a response is kept.
        max_bytes: size of all responses together.
        max_response_bytes: size of one.
    """

    seconds: float
    max_bytes: int
    max_response_bytes: int

    def check(self, content: bytes) -> None:
        """Check the size of a response.

        Raises:
            RequestError: it is too large.
        """
        limit = min(self.max_response_bytes, self.max_bytes)
        if len(content) > limit:
            raise RequestError(
                f"store: expected a conversation of at most {limit} bytes to be stored on this "
                f"server, got {len(content)}; begin a new one, or send store = false"
            )
