"""Who has to step: the waves of engines that need each other in every step."""

from __future__ import annotations


class Coordinator:
    """Knows which wave it is, and whether it runs. For one thread at a time.

    A wave begins when an engine without work gets some, and ends once all engines have agreed that
    none has any; then the next one has its number plus 1. Messages of a wave may come late: those
    of one that has ended change nothing.

    Attributes:
        wave: number of the wave that runs, or runs next.
        is_running: whether it runs.
    """

    def __init__(self) -> None:
        """Begin before wave 0."""
        self.wave = 0
        self.is_running = False

    def started(self, wave: int) -> bool:
        """Note that an engine has started a wave; return whether the others have to be notified."""
        if wave < self.wave or (wave == self.wave and self.is_running):
            return False
        self.wave, self.is_running = wave, True
        return True

    def completed(self, wave: int) -> None:
        """Note that all engines have ended a wave."""
        if wave >= self.wave:
            self.wave, self.is_running = wave + 1, False
