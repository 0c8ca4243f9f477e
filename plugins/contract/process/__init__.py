"""Interfaces of engine processes: executors, communicators, devices and load balancers."""

from .balancer import (
    BalancerContext,
    EngineView,
    LoadBalancer,
)
from .executor import (
    Executor,
    ExecutorContext,
    Worker,
    WorkerInfo,
    WorkerLaunch,
    WorkerProcess,
    open_worker,
)
from .parallel import (
    Communicator,
    CommunicatorContext,
    Parallel,
    Placement,
    SingleRank,
)

__all__ = [
    "BalancerContext",
    "Communicator",
    "CommunicatorContext",
    "EngineView",
    "Executor",
    "ExecutorContext",
    "LoadBalancer",
    "Parallel",
    "Placement",
    "SingleRank",
    "Worker",
    "WorkerInfo",
    "WorkerLaunch",
    "WorkerProcess",
    "open_worker",
]
