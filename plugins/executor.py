"""Executors: start and call the workers, in this process or others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from .component import Component, Context
from .plan import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from .requests import LoRARequest
from .stats import PluginMeter

__all__ = [
    "Executor",
    "ExecutorContext",
    "Worker",
    "WorkerInfo",
]


@dataclass(frozen=True)
class WorkerInfo:
    """Memory figures of a worker that has loaded its model.

    Attributes:
        bytes_per_block: of the KV cache, all layers together.
        available_bytes: memory that weights and the largest step leave free, if measured.
        cache_share: share of it for the KV cache, unless configured.
        sleep_levels: levels of `Worker.sleep` that the worker supports.
    """

    bytes_per_block: int
    available_bytes: int
    cache_share: float = 0.4
    sleep_levels: tuple[int, ...] = (1, 2)


class Worker(Protocol):
    """One device's share of the model, made by `ExecutorContext.create_worker`."""

    def load_model(self) -> WorkerInfo:
        """Load the weights."""

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; None means that sampling waits for `sample_tokens`.

        Raises:
            NotImplementedError: the plan has drafts, encoder inputs or KV connector metadata that
                the worker cannot serve.
        """

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> ModelRunnerOutput:
        """Sample the tokens of a step whose `execute_model` returned None.

        Args:
            plan: of that call.
            bitmask: as the executor got it.
        """

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the maximum length of a request; called before `initialize_cache`."""

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return the meter of each logits processor, by name."""

    def sleep(self, level: int) -> None:
        """Release memory. Called between steps; cached content is not used again.

        Args:
            level: 1 releases the KV cache and moves the weights to CPU memory, 2 releases both.

        Raises:
            HardpointError: the worker does not support the level.
        """

    def wake_up(self, tags: Sequence[str]) -> None:
        """Reallocate memory released by `sleep`: "weights", "kv_cache" or both."""

    def start_profile(self) -> None:
        """Begin to record what runs.

        Raises:
            HardpointError: no folder is configured, or a profile is being recorded.
        """

    def stop_profile(self) -> str:
        """Stop the profile; return the path of its file.

        Raises:
            HardpointError: no profile is running.
        """

    def add_lora(self, lora: LoRARequest) -> bool:
        """Load an adapter; return False if it was already loaded."""

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; return whether it was loaded."""

    def list_loras(self) -> set[int]:
        """Return the ids of the loaded adapters."""

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded when others need memory; return whether it is loaded."""

    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True, kw_only=True)
class ExecutorContext(Context["Executor"]):
    """Context of an executor.

    Attributes:
        create_worker: makes the worker of a rank.
    """

    create_worker: Callable[[int], Worker]


class Executor(Component):
    """Starts the workers and sends them the plan of each step."""

    context: ExecutorContext

    @property
    def max_concurrent_batches(self) -> int:
        """Maximum number of steps in flight, 1 to 7; more than 1 is a pipeline.

        In a pipeline `sample_tokens` is called before the step's `execute_model` is done, and
        begins after it. If `execute_model` itself returns a result, that of `sample_tokens` is
        ignored.
        """
        return 1

    @abstractmethod
    def start(self) -> WorkerInfo:
        """Start the workers and load the model; return the info of the worker with least memory."""

    @abstractmethod
    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache in every worker."""

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Start a step.

        A result of None means that sampling waits for `sample_tokens`. A plan without tokens, which
        only names ended requests to the workers, returns its result at once.
        """

    @abstractmethod
    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample the tokens of a step whose `execute_model` returned None.

        A request of the plan for which the result has no token, though it is computed to its last
        one, or has too many, ends with an error that names the executor.

        Args:
            plan: of that `execute_model` call. In a pipeline, drafts may have replaced NO_DRAFT.
            bitmask: tokens that grammars allow; None if no request of the step has a grammar.
        """

    @abstractmethod
    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a worker method on every worker; return their results in rank order.

        Args:
            method: of `Worker`.
            args: positional.
            timeout: seconds for all workers together; None is no limit. Workers in this process
                are not interrupted.

        Raises:
            TimeoutError: the workers did not answer in time.
        """

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts of the last step, once; None if it made none.

        Called only where speculation is on.

        Raises:
            NotImplementedError: the executor makes no drafts, which is the default.
        """
        raise NotImplementedError(f"the executor {self.name!r} makes no drafts")

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Register a callback for the loss of workers outside of calls; it may run in any thread.

        Its error ends the engine: an engine process at once, unless it is in a step, and one in the
        caller's process with the next call. The default never calls it, for executors whose workers
        fail only in calls.
        """
