"""Executors: start and call the workers, in this process or others."""

from .process.executor import (
    Executor,
    ExecutorContext,
    WorkerLaunch,
    open_worker,
)
from .process.executor import LaunchWorker as LaunchWorker
from .process.executor import StartProcess as StartProcess
from .process.executor import Worker as Worker
from .process.executor import WorkerInfo as WorkerInfo
from .process.executor import WorkerProcess as WorkerProcess
from .process.executor import max_step_tokens as max_step_tokens

__all__ = ["Executor", "ExecutorContext", "WorkerLaunch", "open_worker"]
