"""An executor with threads as workers: several ranks in one process, to look at or to debug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import (
    Executor,
    ExecutorContext,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
)
from hardpoint.plugins.executor import open_worker
from hardpoint.toolkit.workers.joining import (
    are_out_of_step,
    first_error_or,
    results_of,
    worker_method,
)

if TYPE_CHECKING:
    from hardpoint.plugins.process.executor import Worker, WorkerInfo


class ThreadExecutor(Executor):
    """Runs each rank in a thread of its own."""

    contract = 2

    def __init__(self, context: ExecutorContext) -> None:
        """Start nothing yet."""
        super().__init__(context)
        self._threads: list[ThreadPoolExecutor] = []  # each calls one worker, in order
        self._opened: list[Future[Worker]] = []
        self._failure: Exception | None = None
        self._callback: Callable[[BaseException], None] | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most, as many as the context asks for."""
        return self.context.num_batches

    def start(self) -> list[WorkerInfo]:
        """Open the workers, then load the models of all at the same time."""
        for rank in range(self.context.parallel.world_size):
            thread = ThreadPoolExecutor(1, f"Worker-{rank}")
            progress = self.context.progress if rank == 0 else None
            self._threads.append(thread)
            self._opened.append(thread.submit(open_worker, self.context.launch(rank), progress))
        results_of(self._opened)
        return self.collective_rpc("load_model")

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache in every worker."""
        self.collective_rpc("initialize_cache", (num_blocks,))

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Let all workers run the step, after their earlier calls."""
        return self._output("execute_model", (plan,))

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Let all workers sample: one chooses the tokens, others compute a part of the logits."""
        return self._output("sample_tokens", (plan, bitmask))

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        futures = self._call(method, args)
        try:
            return results_of(futures, timeout)
        except Exception as error:
            if are_out_of_step(method, futures):
                self._fail(error)
            raise

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register the callback for ranks that a call has left out of step."""
        self._callback = callback

    def close(self) -> None:
        """Let calls that wait for other ranks fail, then close the workers."""
        self._abort("the executor is closed")
        for thread, opened in zip(self._threads, self._opened, strict=True):
            thread.submit(_close, opened)
        for thread in self._threads:
            thread.shutdown()
        self._threads, self._opened = [], []

    def _fail(self, error: Exception) -> None:
        """Let no rank wait for another, and let further calls raise an error."""
        self._failure = error
        self._abort(str(error))
        if self._callback is not None:
            self._callback(error)

    def _abort(self, reason: str) -> None:
        """Let calls that wait for other ranks fail."""
        for opened in self._opened:
            if opened.done() and opened.exception() is None:
                opened.result().abort(reason)

    def _call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        if self._failure is not None:
            raise self._failure
        return [
            thread.submit(worker_method(opened.result(), method), *args)
            for thread, opened in zip(self._threads, self._opened, strict=True)
        ]

    def _output(self, method: str, args: Sequence[Any]) -> Future[Any]:
        return first_error_or(self._call(method, args), self.context.parallel.output_rank)


def _close(opened: Future[Worker]) -> None:
    """Close a worker, if there is one, in its thread."""
    if opened.exception() is None:
        opened.result().close()
