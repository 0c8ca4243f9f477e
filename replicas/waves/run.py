"""The entry point of the process of an engine that steps together with others."""

from __future__ import annotations

from hardpoint.core.engine_process import run
from hardpoint.system.process.child import ParentWatch

from .core import WaveCore


def run_engine(data: bytes, watch: ParentWatch) -> None:
    """Serve until a signal, or the end of the parent; see core's function of this name."""
    run.run_engine(data, watch, WaveCore.of)
