"""Interfaces of scheduling: schedulers, scheduling policies, step costs and step records."""

from .policy import (
    Load,
    PolicyContext,
    SchedulingPolicy,
)
from .scheduler import BlockTransfers as BlockTransfers
from .scheduler import EncoderCache as EncoderCache
from .scheduler import Gates as Gates
from .scheduler import (
    PauseState,
    Scheduler,
    SchedulerContext,
)
from .scheduler import SchedulerLimits as SchedulerLimits
from .step_cost import StepCost
from .step_record import LiveRequest as LiveRequest
from .step_record import (
    StepRecord,
    WaitingFor,
    WaitReason,
)

__all__ = [
    "Load",
    "PauseState",
    "PolicyContext",
    "Scheduler",
    "SchedulerContext",
    "SchedulingPolicy",
    "StepCost",
    "StepRecord",
    "WaitReason",
    "WaitingFor",
]
