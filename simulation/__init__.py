"""Simulation: the real schedulers, caches and balancers of many engines on a virtual clock."""

from .calibration import calibrate
from .fleet import Fleet
from .pace import PacedExecutor
from .reports import DecisionTimes, FleetReport, Objective, Percentiles
from .runs import Load, simulate
from .step_costs import CostFile, read_cost, write_cost
from .stepping import SteppedScheduler
from .synthetic import Lengths, SyntheticLoad
from .traces import TraceError, read_bailian, read_guidellm, read_mooncake, read_trace
from .workload import Segment, SimulatedRequest, sped_up

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
