"""How fast engines compute prompts, as it is measured."""

from __future__ import annotations

_HALF_LIFE_S = 60.0


class PrefillRate:
    """Tokens of prompts that an engine computes in a second, while it has some to compute.

    The mean over the engines and the time that they were busy with prompts, of which a minute ago
    counts half as much as now. For one thread at a time.
    """

    def __init__(self) -> None:
        """Begin without a measurement."""
        self._tokens = self._seconds = 0.0

    @property
    def per_second(self) -> float | None:
        """The tokens per second; None before any were computed."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count tokens that an engine took so long for."""
        share = 0.5 ** (seconds / _HALF_LIFE_S)
        self._tokens = self._tokens * share + num_tokens
        self._seconds = self._seconds * share + seconds
