"""Simulation: the real schedulers, caches and balancers of many engines on a virtual clock."""

from .fleet import Fleet
from .measures import DecisionTimes, FleetReport, Objective, Percentiles
from .stepping import SteppedScheduler
from .workload import Segment, SimulatedRequest

__all__ = [
    "DecisionTimes",
    "Fleet",
    "FleetReport",
    "Objective",
    "Percentiles",
    "Segment",
    "SimulatedRequest",
    "SteppedScheduler",
]
