"""Simulation: the real schedulers, caches and balancers of many engines on a virtual clock.

Loads and reports are imported with it; what simulates is imported on use, because it needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .loads import SimulatedLoad
from .reports import DecisionTimes, FleetReport, Objective, Percentiles
from .synthetic import Lengths, SyntheticLoad
from .traces import TraceError, read_bailian, read_guidellm, read_mooncake, read_trace
from .workload import Segment, SimulatedRequest, sped_up

if TYPE_CHECKING:
    from .calibration import calibrate
    from .fleet import Fleet
    from .pace import PacedExecutor
    from .runs import simulate
    from .step_costs import CostFile, read_cost, write_cost
    from .stepping import SteppedScheduler

__all__ = [
    "CostFile",
    "DecisionTimes",
    "Fleet",
    "FleetReport",
    "Lengths",
    "Load",
    "Objective",
    "PacedExecutor",
    "Percentiles",
    "Segment",
    "SimulatedLoad",
    "SimulatedRequest",
    "SteppedScheduler",
    "SyntheticLoad",
    "TraceError",
    "calibrate",
    "read_bailian",
    "read_cost",
    "read_guidellm",
    "read_mooncake",
    "read_trace",
    "simulate",
    "sped_up",
    "write_cost",
]

Load = SimulatedLoad
"""Name of `SimulatedLoad` in programs."""

_ON_USE = {
    "CostFile": "step_costs",
    "Fleet": "fleet",
    "PacedExecutor": "pace",
    "SteppedScheduler": "stepping",
    "calibrate": "calibration",
    "read_cost": "step_costs",
    "simulate": "runs",
    "write_cost": "step_costs",
}
"""Modules of the names that are imported on use."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _ON_USE:
        return getattr(importlib.import_module(f"{__name__}.{_ON_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
