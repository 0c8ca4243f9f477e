"""A token bucket: it fills at a rate, up to a limit, and each use empties it."""

from __future__ import annotations


class Bucket:
    """A token bucket, full at first.

    Source: Turner, "New Directions in Communications", IEEE Communications Magazine 24(10), 1986.
    """

    def __init__(self, rate: float, size: float, now: float) -> None:
        """Fill it.

        Args:
            rate: tokens per second.
            size: tokens that it holds.
            now: seconds on any clock, the same in all calls.
        """
        self._rate, self._size = rate, size
        self._tokens, self._filled = size, now

    def level(self, now: float) -> float:
        """Return how many tokens are in it."""
        grown = self._tokens + max(now - self._filled, 0.0) * self._rate
        self._tokens, self._filled = min(grown, self._size), now
        return self._tokens

    def withdraw(self, tokens: float, now: float) -> bool:
        """Take tokens if there are enough; return whether they were taken."""
        if self.level(now) < tokens:
            return False
        self._tokens -= tokens
        return True

    def put_back(self, tokens: float, now: float) -> None:
        """Return tokens that were taken and not used."""
        self._tokens = min(self.level(now) + tokens, self._size)
