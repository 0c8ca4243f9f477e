"""The entry point of the process of an engine that steps together with others."""

from __future__ import annotations

from hardpoint.core.engine.core import EngineInputs
from hardpoint.core.engine.step import EngineCoreParts
from hardpoint.process.child_processes.child import ParentWatch
from hardpoint.process.engine import run

from .core import WaveCore


class _Waves(EngineInputs):
    """Makes cores that step together."""

    def core(self, parts: EngineCoreParts) -> WaveCore:
        return WaveCore.of(parts, self.spec)


def run_engine(data: bytes, watch: ParentWatch) -> None:
    """Serve until a signal, or the end of the parent; see core's function of this name."""
    run.run_engine(data, watch, _Waves)
