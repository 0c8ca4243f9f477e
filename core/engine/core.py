"""The engine core: moves requests through scheduler and executor, one step at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from hardpoint.core.wire import PauseMode
from hardpoint.plugins import (
    EngineCoreRequest,
    HardpointError,
    LoRARequest,
    Manifest,
    PluginMeter,
    Request,
    RequestError,
    SchedulerStats,
    StepFault,
    WaitReason,
)
from hardpoint.registry.plugin_set import PluginSet

from .pause import Pausing, Surroundings
from .step import EngineCoreParts, Outputs, Steps
from .worker_calls import WorkerCalls

_log = logging.getLogger("hardpoint")


class EngineCore:
    """Scheduler and executor, the steps that join them, and what may be asked of them by name.

    One thread at a time; what may be called from others says so.

    Attributes:
        step: takes one; see `Steps.step_alone`, or `Steps.step_with_batch_queue` where the
            executor is a pipeline.
    """

    def __init__(self, parts: EngineCoreParts) -> None:
        """Take over the parts; `close` closes them."""
        self._parts = parts
        self._scheduler = parts.scheduler
        self._executor = parts.executor
        self._steps = steps = Steps(parts)
        self.step = steps.step
        self._workers = WorkerCalls(parts.executor)
        self._pausing = Pausing(
            Surroundings(
                parts.scheduler, parts.executor, steps.abort_all, steps.settle, parts.sleep_levels
            )
        )

    # Requests

    def add_request(
        self, request: EngineCoreRequest, block_hashes: list[bytes] | None = None
    ) -> None:
        """Queue a request.

        Args:
            request: checked.
            block_hashes: what `hash_prompt` gave for it; None has them computed when it is its
                turn.

        Raises:
            RequestError: it could never run, its id is that of a live request, or too many wait.
        """
        if self._live_request(request.request_id) is not None:
            raise RequestError(f"request_id: {request.request_id!r} is the id of a live request")
        self._scheduler.add_request(request)
        if block_hashes and (live := self._live_request(request.request_id)) is not None:
            self._parts.kv_cache.take_hashes(live, block_hashes)
        if request.kv_transfer_params is not None and self._scheduler.context.connector is None:
            _log.warning(
                "request %s has kv_transfer_params, which are ignored: this engine has no KV "
                "connector, and computes all of it",
                request.request_id,
            )

    def client_of(self, request_id: str) -> int | None:
        """Return which client a live request is of; None if no live request has that id."""
        live = self._live_request(request_id)
        return None if live is None else live.source.client_index

    def hash_prompt(self, request: EngineCoreRequest) -> list[bytes]:
        """Compute what the prefix cache finds a prompt by, before its turn. Safe in any thread."""
        return self._parts.kv_cache.hash_prompt(request)

    def abort_requests(self, request_ids: Iterable[str] | None) -> Outputs:
        """End requests; unknown ids are ignored, None is all of them.

        Returns:
            Their last outputs, one message per client, with the set of ids that ended.
        """
        return self._steps.abort_requests(request_ids)

    def has_requests(self) -> bool:
        """Whether a step has anything to do; what a pause holds is nothing to do."""
        return self._steps.has_requests()

    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return self._scheduler.num_unfinished_requests()

    # Standing still

    def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> Future[None]:
        """Stop giving tokens. New requests wait until `resume`.

        Args:
            mode: what becomes of the requests that are there: "abort" ends them, "wait" lets
                those that have begun finish, "keep" leaves them as they are until `resume`.
            clear_cache: forget what is cached once the engine stands still; requests that were
                kept are computed anew, with the same result.

        Returns:
            Done when nothing is left to do; at once where no loop steps the engine.
        """
        return self._pausing.pause(mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """Go on after a pause."""
        self._pausing.resume()

    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._pausing.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = PauseMode.ABORT) -> Future[None]:
        """Pause, then give memory back.

        Args:
            level: 0 only pauses and keeps caches; 1 gives the KV cache back and moves weights to
                CPU memory; 2 gives back both.
            mode: as for `pause`.

        Returns:
            Done when the memory is given back.
        """
        return self._pausing.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Have memory again, and go on when all of it is there.

        Args:
            tags: of "weights", "kv_cache" and "scheduling"; None is all of them.
        """
        self._pausing.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether memory was given back and is not there again."""
        return self._pausing.is_sleeping

    # Caches

    def reset_prefix_cache(self, recompute_running: bool = False) -> None:
        """Forget cached content; with `recompute_running`, compute anew what runs."""
        self._scheduler.reset_prefix_cache(recompute_running=recompute_running)
        if count := self.num_unfinished_requests():
            _log.warning("the prefix cache was reset while %d requests are unfinished", count)

    def reset_encoder_cache(self) -> None:
        """Forget embeddings of images and the like.

        Raises:
            HardpointError: there are none.
        """
        raise HardpointError("there is no encoder cache: no worker encodes images or sounds")

    def reset_mm_cache(self) -> None:
        """Forget processed images and the like.

        Raises:
            HardpointError: there are none.
        """
        raise HardpointError("there is no multimodal cache: requests bring no images or sounds")

    # Workers

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: list[Any] | None = None
    ) -> list[Any]:
        """Call a declared method of every worker; return the results in rank order."""
        return self._workers.call(method, args or [], timeout)

    def start_profile(self) -> None:
        """Begin to record what the workers do."""
        self._executor.collective_rpc("start_profile")

    def stop_profile(self) -> list[str]:
        """Return the files that the workers' profiles were written to."""
        return self._executor.collective_rpc("stop_profile")

    def add_lora(self, lora: LoRARequest) -> bool:
        """Load an adapter; return whether every worker did."""
        return self._workers.add_lora(lora)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; return whether every worker had it."""
        return self._workers.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters that every worker has."""
        return self._workers.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter, whatever others come; return whether every worker had it."""
        return self._workers.pin_lora(lora_id)

    def supported_tasks(self) -> list[str]:
        """Return what the model can do: models here generate, and none pools."""
        return ["generate"]

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name, in the first worker."""
        meters: dict[str, PluginMeter] = self._executor.collective_rpc("plugin_meters")[0]
        return meters

    # Scheduling

    def why_waiting(self, request_ids: list[str]) -> list[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""
        return [self._scheduler.why_waiting(request_id) for request_id in request_ids]

    def set_policy(self, manifest: Manifest) -> None:
        """Take the scheduling policy of another generation of the manifest, or nothing of it."""
        self._parts.policy.replace(PluginSet(manifest), self._scheduler)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        return self._scheduler.stats()

    def step_faults(self) -> dict[str, StepFault]:
        """Return the decisions that plugins did not take, by plugin name."""
        return self._parts.faults.report()

    # For a loop that steps the core

    def enter_loop(self, on_failure: Callable[[BaseException], None]) -> None:
        """Take it that a loop steps the core, and says `went_idle` when nothing is left to do.

        Args:
            on_failure: called, in any thread, when the executor fails beside a step.
        """
        self._pausing.has_loop = True
        self._executor.on_failure(on_failure)

    def went_idle(self) -> None:
        """Complete what waited until nothing is left to do."""
        self._pausing.went_idle()

    def flush(self) -> list[Outputs]:
        """Take the results of all steps that are under way; return what clients were not told."""
        return self._steps.flush()

    def leave_loop(self, words: str) -> None:
        """Fail what still waits for the loop to be idle."""
        self._pausing.give_up(words)

    def close(self) -> None:
        """Release workers, model and cache."""
        parts = self._parts
        self._pausing.give_up("the engine was closed")
        with contextlib.ExitStack() as stack:  # each is closed, whatever another one raises
            for component in parts.components:
                stack.callback(component.close)
            stack.callback(parts.kv_events.close)
            stack.callback(parts.policy.close)
            stack.callback(self._scheduler.close)
            stack.callback(self._executor.close)

    def _live_request(self, request_id: str) -> Request | None:
        try:
            return self._scheduler.live_request(request_id)
        except NotImplementedError:  # it shows none, so nobody can tell
            return None
