"""Executors: run the workers, in whatever process or machine they are."""

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
    """What the engine learns from a worker that has loaded its model.

    Attributes:
        bytes_per_block: of the KV cache, all layers together.
        available_bytes: memory that is left beside the weights and what a step needs, as far as
            that was measured.
        cache_share: share of it that the KV cache takes, unless the configuration says.
        sleep_levels: those of `Worker.sleep` that it can do.
    """

    bytes_per_block: int
    available_bytes: int
    cache_share: float = 0.4
    sleep_levels: tuple[int, ...] = (1, 2)


class Worker(Protocol):
    """One device's share of the model. Made by `ExecutorContext.create_worker`."""

    def load_model(self) -> WorkerInfo:
        """Read the weights."""

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; None means that sampling waits for `sample_tokens`.

        Raises:
            NotImplementedError: the plan has drafts, encoder inputs or KV connector metadata that
                the worker cannot serve.
        """

    def sample_tokens(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Finish a step that waits."""

    def set_max_model_len(self, max_model_len: int) -> None:
        """Take it that the KV cache holds no longer requests; called before `initialize_cache`."""

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""

    def sleep(self, level: int) -> None:
        """Give memory back. Called between steps; no request is computed from what was there.

        Args:
            level: 1 gives back the KV cache and moves the weights to CPU memory, 2 gives back
                both.

        Raises:
            HardpointError: the device cannot do that.
        """

    def wake_up(self, tags: Sequence[str]) -> None:
        """Have memory again: "weights", "kv_cache" or both."""

    def start_profile(self) -> None:
        """Begin to record what runs.

        Raises:
            HardpointError: no folder is configured, or a profile is being recorded.
        """

    def stop_profile(self) -> str:
        """Return the file that the profile was written to.

        Raises:
            HardpointError: none is being made.
        """

    def add_lora(self, lora: LoRARequest) -> bool:
        """Load an adapter; return whether it was not there already."""

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; return whether it was there."""

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters that are there."""

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter, whatever others come; return whether it is there."""

    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True, kw_only=True)
class ExecutorContext(Context["Executor"]):
    """What an executor is built with.

    Attributes:
        create_worker: builds the worker of a rank.
    """

    create_worker: Callable[[int], Worker]


class Executor(Component):
    """Starts workers and hands them each step's plan."""

    context: ExecutorContext

    @property
    def max_concurrent_batches(self) -> int:
        """How many steps may be under way at once; more than 1 is a pipeline.

        In a pipeline `sample_tokens` is called before the step's `execute_model` is done, and is
        to begin once that is. Where `execute_model` gives a result of its own, nobody looks at
        what sampling gave.
        """
        return 1

    @abstractmethod
    def start(self) -> WorkerInfo:
        """Start the workers and load the model; return the tightest worker's figures."""

    @abstractmethod
    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache in every worker."""

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Start a step.

        A result of None means that sampling waits for `sample_tokens`; a plan without tokens, from
        which workers only learn what ended, has its result at once.
        """

    @abstractmethod
    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Finish a step that waits.

        Args:
            plan: the one that `execute_model` got. In a pipeline it may have drafts by now where
                it had NO_DRAFT.
            bitmask: which tokens grammars allow; None where no request of the step is in one.
        """

    @abstractmethod
    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a worker method on every worker; return their results in rank order.

        Args:
            method: of `Worker`.
            args: positional.
            timeout: seconds that all workers together may take; None is no limit. Workers that
                are called directly are not interrupted.

        Raises:
            TimeoutError: they took longer.
        """

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts that the last step made, once; None if it made none.

        Called only where speculation is on.

        Raises:
            NotImplementedError: the executor makes no drafts, which is the default.
        """
        raise NotImplementedError(f"the executor {self.name!r} makes no drafts")

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Have `callback` called, in any thread, when workers are lost beside a step.

        The default calls it never: whatever fails, fails in a call.
        """
