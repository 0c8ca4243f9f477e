"""Interfaces of scheduling: schedulers, scheduling policies, step costs and step records."""

from .policy import (
    Load,
    PolicyContext,
    SchedulingPolicy,
)
from .scheduler import (
    BlockTransfers,
    EncoderCache,
    Gates,
    Grammars,
    PauseState,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
)
from .step_cost import StepCost
from .step_record import (
    LiveRequest,
    StepRecord,
    WaitingFor,
    WaitReason,
)

__all__ = [
    "BlockTransfers",
    "EncoderCache",
    "Gates",
    "Grammars",
    "LiveRequest",
    "Load",
    "PauseState",
    "PolicyContext",
    "Scheduler",
    "SchedulerContext",
    "SchedulerLimits",
    "SchedulingPolicy",
    "StepCost",
    "StepRecord",
    "WaitReason",
    "WaitingFor",
]
