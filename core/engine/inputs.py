"""The record/replay hook of an engine core: everything that the core reads from its environment."""

from __future__ import annotations

from collections.abc import Callable

from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.parts.gates import PartTransfers
from hardpoint.plugins import StepRecord
from hardpoint.plugins.scheduling.scheduler import BlockTransfers, Gates

from .core import EngineCore
from .step import EngineCoreParts

Clock = Callable[[], float]
"""Returns seconds."""

RecordStep = Callable[[StepRecord], None]
"""Receives the record of a step."""


class EngineInputs:
    """Returns the inputs of an engine core unchanged. Subclasses record or replay them.

    Attributes:
        spec: specification of the engine's workers.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    def clock(self, clock: Clock) -> Clock:
        """Return the clock of the scheduler, the caches and the step parts."""
        return clock

    def gates(self, gates: Gates) -> Gates:
        """Return the gates of step parts for the scheduler."""
        return gates

    def transfers(self, transfers: PartTransfers | None) -> BlockTransfers | None:
        """Return the block transfers of a step part for the scheduler; None if there are none."""
        return transfers

    def recorder(self, record: RecordStep | None) -> RecordStep | None:
        """Return the receiver of step records; None if no records are needed."""
        return record

    def core(self, parts: EngineCoreParts) -> EngineCore:
        """Return the core, which gets the requests, aborts and control calls."""
        return EngineCore(parts)


OpenInputs = Callable[[WorkerSpec], EngineInputs]
