"""The channels of the inputs of an engine core while it is recorded or played back.

Everything that is taken from outside in a call of the core passes one of the channels of a `Tape`:
the clock, gates, results. One kind of tape notes what passes, another returns what was noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

from hardpoint.host.boundary.parts.gates import PartTransfers
from hardpoint.plugins import (
    BlockIds,
    Executor,
    GrammarBitmask,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
    WaitReason,
    WorkerInfo,
)
from hardpoint.plugins.scheduling.scheduler import Gates

T = TypeVar("T")


class Tape(Protocol):
    """The channels."""

    def clock(self, read: Callable[[], float]) -> float:
        """Return the time on the engine's clock. In any thread."""

    def time(self, read: Callable[[], float]) -> float:
        """Return the time on the clock that measures steps."""

    def gate(self, request_id: str, read: Callable[[], WaitReason | None]) -> WaitReason | None:
        """Return why a request waits; raise the error with which it ends."""

    def matched(
        self, request_id: str, read: Callable[[], tuple[int | None, bool]]
    ) -> tuple[int | None, bool]:
        """Return how many tokens a step part can load, and whether between steps."""

    def done(self, read: Callable[[], bool]) -> bool:
        """Return whether a result is there."""

    def answers(self, part: str, message: bytes, read: Callable[[], list[Any]]) -> list[Any]:
        """Return the answers of worker halves to a message of their step part."""

    def plan(self, plan: SchedulerOutput) -> None:
        """Note a plan that is about to be executed."""

    def result(
        self, plan: SchedulerOutput, read: Callable[[], ModelRunnerOutput | None]
    ) -> ModelRunnerOutput | None:
        """Return the result of a plan."""


class TapedGates:
    """The gates of step parts, with answers that pass a tape; see `Gates` of the contract."""

    def __init__(self, gates: Gates, tape: Tape) -> None:
        self._gates, self._tape = gates, tape
        self.holds, self.lacks = gates.holds, gates.lacks
        self.acquire, self.release = gates.acquire, gates.release

    def wait_reason(self, request: Request) -> WaitReason | None:
        """Return why a request that has not run is not ready; None if it is."""
        return self._tape.gate(request.request_id, lambda: self._gates.wait_reason(request))


class TapedTransfers:
    """The loads and saves of a step part, with answers that pass a tape; see `BlockTransfers`."""

    def __init__(self, transfers: PartTransfers, tape: Tape) -> None:
        self._transfers, self._tape = transfers, tape
        self.request_finished = transfers.request_finished

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether between steps."""
        return self._tape.matched(
            request.request_id,
            lambda: self._transfers.get_num_new_matched_tokens(request, num_computed_tokens),
        )

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Record the blocks allocated for a request that was asked for."""
        self._transfers.update_state_after_alloc(request, block_ids, num_external_tokens)


class TapedFuture(Future[Any]):
    """The result of a call of an executor, which passes a tape when the engine takes it."""

    def __init__(self, inner: Future[Any], plan: SchedulerOutput, tape: Tape) -> None:
        super().__init__()
        self._inner, self._plan, self._tape = inner, plan, tape

    def done(self) -> bool:
        """Return whether the result is there."""
        return self._tape.done(self._inner.done)

    def cancelled(self) -> bool:
        """Return whether the call was cancelled."""
        return self._inner.cancelled()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the call."""
        return self._inner.exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result."""
        return self._tape.result(self._plan, lambda: self._inner.result(timeout))


class TapedExecutor(Executor):
    """An executor with plans and results that pass a tape."""

    contract = 2

    def __init__(self, inner: Executor, tape: Tape) -> None:
        super().__init__(inner.context)
        self._inner, self._tape = inner, tape

    @property
    def max_concurrent_batches(self) -> int:
        """Largest number of in-flight batches of the executor."""
        return self._inner.max_concurrent_batches

    def start(self) -> Sequence[WorkerInfo]:
        """Start the workers."""
        return self._inner.start()

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        self._inner.initialize_cache(num_blocks)

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Start a step."""
        self._tape.plan(plan)
        return self._taped(self._inner.execute_model(plan), plan)

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample the tokens of a step."""
        return self._taped(self._inner.sample_tokens(plan, bitmask), plan)

    def _taped(self, future: T, plan: SchedulerOutput) -> T:
        """Return a future that passes the tape; the engine reports anything else."""
        if not isinstance(future, Future):
            return future
        return cast(T, TapedFuture(future, plan, self._tape))

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a method of all workers."""
        return self._inner.collective_rpc(method, args, timeout)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register a callback for the loss of workers."""
        self._inner.on_failure(callback)

    def close(self) -> None:
        """Release the workers."""
        self._inner.close()


def taped_calls(
    call_workers: Callable[[str, tuple[Any, ...]], list[Any]], tape: Tape
) -> Callable[[str, tuple[Any, ...]], list[Any]]:
    """Return a function that calls worker halves of step parts; their answers pass a tape."""

    def call(method: str, args: tuple[Any, ...]) -> list[Any]:
        part, message = args
        return tape.answers(part, message, lambda: call_workers(method, args))

    return call
