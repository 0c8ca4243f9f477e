"""The executor that runs a process per worker on this host."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from hardpoint.plugins import (
    Executor,
    ExecutorContext,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)

from .multiproc_calls import make_sender
from .multiproc_group import WorkerGroup

_log = logging.getLogger("hardpoint")

_MAX_BATCHES = 7


class MultiprocExecutor(Executor):
    """Runs each rank in a process of its own, and sends all of them each call."""

    contract = 1

    def __init__(self, context: ExecutorContext) -> None:
        """Start nothing yet."""
        super().__init__(context)
        self._group: WorkerGroup | None = None
        self._callback: Callable[[BaseException], None] | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """One per stage."""
        return min(self.context.parallel.pipeline, _MAX_BATCHES)

    def start(self) -> list[WorkerInfo]:
        """Start the processes and load the model in all of them."""
        context = self.context
        sender = make_sender(context.parallel.world_size)
        group = self._group = WorkerGroup(context, sender)
        self._release = weakref.finalize(self, group.close)
        _log.info(
            "starting %d worker processes, which get calls by %s",
            context.parallel.world_size,
            sender.describes,
        )
        group.start(context)
        if self._callback is not None:
            group.on_failure(self._callback)
        return group.call("load_model", progress=context.progress)

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache in every worker."""
        self._started.call("initialize_cache", (num_blocks,))

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Run the model in every worker."""
        return self._started.step("execute_model", (plan,)).future

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample in the output rank, with the help of those of its stage."""
        return self._started.step("sample_tokens", (plan, bitmask)).future

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        return self._started.call(method, args, timeout)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register the callback for the loss of a worker."""
        self._callback = callback
        if self._group is not None:
            self._group.on_failure(callback)

    def close(self) -> None:
        """End the processes."""
        if self._group is not None:
            self._group.close()

    @property
    def _started(self) -> WorkerGroup:
        assert self._group is not None, "start() comes first"
        return self._group
