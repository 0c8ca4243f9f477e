"""The seam between an engine core and all that comes to it from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardpoint.core.weights.worker_spec import WorkerSpec

from .core import EngineCore
from .step import EngineCoreParts


class Outside:
    """Hands an engine core what comes from outside, as it is; layers above may do otherwise.

    Attributes:
        spec: specification of the engine's workers.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return the clock of the engine: scheduler, caches and step parts read it."""
        return clock

    def for_scheduler(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the scheduler's context, from which it gets all else."""
        return fields

    def core(self, parts: EngineCoreParts) -> EngineCore:
        """Return the core, which is called with requests, aborts and control calls."""
        return EngineCore(parts)


OpenOutside = Callable[[WorkerSpec], Outside]
