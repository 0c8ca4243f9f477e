"""The collection of cyclic garbage in an engine's process."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger("hardpoint")

_FULL_COLLECTION_AFTER = 1000
"""Collections of the middle generation; Python's own number is 10."""


def settle_heap(long_seconds: float = 0.0) -> None:
    """Leave all objects that there are out of collections, and let full ones be rare.

    Args:
        long_seconds: collections that take longer are logged; 0 logs none.
    """
    gc.collect()
    gc.freeze()  # these objects live as long as the engine
    # A full collection visits every request that waits, which stops all others; cycles of garbage
    # are found by the collections of young objects, but for those that live long.
    gc.set_threshold(*gc.get_threshold()[:2], _FULL_COLLECTION_AFTER)
    if long_seconds > 0:
        gc.callbacks.append(LongCollections(long_seconds))


class LongCollections:
    """A callback of the garbage collector that logs collections which take long."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Log collections that take longer than `seconds`."""
        self._seconds, self._clock = seconds, clock
        self._began: float | None = None

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        """Note the beginning of a collection, or log its end."""
        if phase == "start":
            self._began = self._clock()
            return
        began, self._began = self._began, None
        if began is not None and (seconds := self._clock() - began) > self._seconds:
            _log.warning(
                "a garbage collection of generation %d took %.3f s, and found %d objects "
                "(engine.long_collection_seconds)",
                info["generation"],
                seconds,
                info["collected"],
            )
