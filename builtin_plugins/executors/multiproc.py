"""The executor that runs a process per worker on this host."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import (
    Executor,
    ExecutorContext,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
)

from .multiproc_calls import make_sender
from .multiproc_group import RankProcesses

if TYPE_CHECKING:
    from hardpoint.plugins.process.executor import WorkerInfo

_log = logging.getLogger("hardpoint")


class MultiprocExecutor(Executor):
    """Runs each rank in a process of its own, and sends all of them each call."""

    contract = 2
    overlaps_steps = True

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._group: RankProcesses | None = None
        self._callback: Callable[[BaseException], None] | None = None
        self._forward: tuple[int, Future[Any]] | None = None
        """Of the last plan, whose sampling has not come."""

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most, as many as the context asks for."""
        return self.context.num_batches

    def start(self) -> list[WorkerInfo]:
        """Start the processes and load the model in all of them."""
        context = self.context
        sender = make_sender(context.parallel.world_size)
        group = self._group = RankProcesses(context, sender)
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
        """Run the model in every worker.

        With one stage, the future is done at once, so that `sample_tokens` is sent while the model
        runs; an error of the model, or a result, is then returned by `sample_tokens`.
        """
        forward = self._started.step("execute_model", (plan,)).future
        if self.max_concurrent_batches > 1 or not plan.total_num_scheduled_tokens:
            return forward
        self._forward = plan.step, forward
        begun: Future[ModelRunnerOutput | None] = Future()
        begun.set_result(None)
        return begun

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample in the output rank, with the help of the other ranks of its stage."""
        sampling = self._started.step("sample_tokens", (plan, bitmask)).future
        step, forward = self._forward or (None, None)
        if forward is None or step != plan.step:
            return sampling
        self._forward = None
        return _after(forward, sampling)

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
    def _started(self) -> RankProcesses:
        assert self._group is not None, "start() comes first"
        return self._group


def _after(forward: Future[Any], sampling: Future[Any]) -> Future[Any]:
    """Return the future of a step: the outcome of `forward`, or else of `sampling`."""
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()

    def copy(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(future.result())

    def forwarded(future: Future[Any]) -> None:
        if future.exception() is None and future.result() is None:
            sampling.add_done_callback(copy)
        else:
            copy(future)

    forward.add_done_callback(forwarded)
    return result
