"""Simulation: the real schedulers, caches and balancers of many engines on a virtual clock."""

from .fleet import Fleet
from .measures import DecisionTimes, FleetReport, Objective, Percentiles
from .stepping import SteppedScheduler
from .synthetic import Lengths, SyntheticLoad
from .traces import TraceError, read_bailian, read_mooncake
from .workload import Segment, SimulatedRequest, sped_up

__all__ = [
    "DecisionTimes",
    "Fleet",
    "FleetReport",
    "Lengths",
    "Objective",
    "Percentiles",
    "Segment",
    "SimulatedRequest",
    "SteppedScheduler",
    "SyntheticLoad",
    "TraceError",
    "read_bailian",
    "read_mooncake",
    "sped_up",
]
