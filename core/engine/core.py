"""The engine core: moves requests through scheduler and executor, one step at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable

from hardpoint.plugins import (
    EngineCoreRequest,
    Request,
    RequestError,
)

from .pause import Pausing, Surroundings
from .step import EngineCoreParts, Outputs, Steps
from .utility_calls import EngineUtilities

_log = logging.getLogger("hardpoint")


class EngineCore(EngineUtilities):
    """Scheduler and executor, the steps that join them, and the control calls.

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
