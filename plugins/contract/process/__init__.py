"""Interfaces of engine processes: executors, communicators, devices and load balancers."""

from .balancer import (
    BalancerContext,
    EngineView,
    LoadBalancer,
)
from .executor import (
    Executor,
    ExecutorContext,
    WorkerLaunch,
    open_worker,
)
from .executor import Worker as Worker
from .executor import WorkerInfo as WorkerInfo
from .executor import WorkerProcess as WorkerProcess
from .parallel import (
    Communicator,
    CommunicatorContext,
    Placement,
)
from .parallel import Parallel as Parallel
from .parallel import SingleRank as SingleRank

__all__ = [
    "BalancerContext",
    "Communicator",
    "CommunicatorContext",
    "EngineView",
    "Executor",
    "ExecutorContext",
    "LoadBalancer",
    "Placement",
    "WorkerLaunch",
    "open_worker",
]
