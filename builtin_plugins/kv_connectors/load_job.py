"""A load that threads work on, part by part."""

from __future__ import annotations

import threading

from .jobs import Load


class LoadJob:
    """A load that is under way.

    Attributes:
        load: what to load.
        deadline: on the monotonic clock.
        lock: held while a block is copied into the KV cache.
        first_bad: index of the first block that could not be loaded.
        left: parts of blocks that are not done, by group of layers.
        ended: whether nothing is written any more.
    """

    def __init__(self, load: Load, num_groups: int, deadline: float) -> None:
        self.load = load
        self.deadline = deadline
        self.lock = threading.Lock()
        self.first_bad = len(load.hashes)
        self.left = [len(load.hashes)] * num_groups
        self.ended = False

    @property
    def is_done(self) -> bool:
        """Whether all parts are loaded or given up."""
        return self.ended or not any(self.left)

    @property
    def bad_blocks(self) -> list[int]:
        """The blocks that could not be loaded, and those after them."""
        return self.load.block_ids[self.first_bad :]

    def has_loaded(self, group: int) -> bool:
        """Return whether a group of layers is loaded or given up."""
        return self.ended or not self.left[group]

    def fails_from(self, index: int) -> None:
        """Record that a block could not be loaded; without the first one, the load has ended."""
        with self.lock:
            self.first_bad = min(self.first_bad, index)
            self.ended = self.ended or not index

    def give_up(self) -> None:
        """Write no further block; those that are not there could not be loaded."""
        with self.lock:
            if any(self.left):
                self.first_bad = 0
            self.ended = True
