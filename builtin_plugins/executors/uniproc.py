"""The executor that runs one worker in the engine's process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hardpoint.plugins import (
    ConfigError,
    Executor,
    ExecutorContext,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
)
from hardpoint.plugins.executor import open_worker
from hardpoint.toolkit.workers.joining import worker_method

from .worker_thread import WorkerThread

if TYPE_CHECKING:
    from hardpoint.plugins.process.executor import WorkerInfo

T = TypeVar("T")


class UniprocExecutor(Executor):
    """Calls one worker: directly, or in a thread of its own if several steps are to be in flight.

    Directly, every returned future is done.
    """

    contract = 2
    overlaps_steps = True

    def __init__(self, context: ExecutorContext) -> None:
        """Create the worker; `start` loads its model.

        Raises:
            ConfigError: the configuration asks for several workers.
        """
        super().__init__(context)
        if (count := context.parallel.world_size) > 1:
            raise ConfigError(
                f"executor.use: {context.name!r} runs one worker, parallel asks for {count} "
                f"(tensor {context.parallel.tensor} x pipeline {context.parallel.pipeline}); "
                f"'multiproc' runs several"
            )
        self._thread: WorkerThread | None = None
        launch = context.launch(0)
        if context.num_batches > 1:
            self._thread = WorkerThread()
            launch = dataclasses.replace(launch, on_forward=self._thread.hand_out)
        self._worker = open_worker(launch, context.progress)
        # Of another package, it may wrap a worker and have the methods of an earlier version.
        self._begin_sampling = getattr(self._worker, "begin_sampling", self._worker.sample_tokens)

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most, as many as the context asks for."""
        return self.context.num_batches

    def start(self) -> list[WorkerInfo]:
        """Load the model, in the thread that will run the steps: torch has settings for each."""
        return [self._call(self._worker.load_model)]

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        self._call(functools.partial(self._worker.initialize_cache, num_blocks))

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Run the model."""
        if self._thread is not None:
            return self._thread.submit(lambda: self._worker.execute_model(plan), overlaps=True)
        return _done(lambda: self._worker.execute_model(plan))

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample from the model's last logits."""
        if self._thread is not None:
            return self._thread.submit_late(lambda: self._begin_sampling(plan, bitmask))
        return _done(lambda: _sampled(self._worker.sample_tokens(plan, bitmask)))

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        timeout: float | None = None,  # noqa: ARG002
    ) -> list[Any]:
        """Call a method of the worker; `timeout` is ignored."""
        return [self._call(functools.partial(worker_method(self._worker, method), *args))]

    def close(self) -> None:
        """Release the worker, after the calls under way, and end its thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            self._worker.close()
        else:
            thread.close(self._worker.close)

    def _call(self, call: Callable[[], T]) -> T:
        return call() if self._thread is None else self._thread.submit(call).result()


def _sampled(output: ModelRunnerOutput | None) -> ModelRunnerOutput:
    assert output is not None, "the only rank samples"
    return output


def _done(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future
