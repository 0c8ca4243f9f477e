"""The engine as a frontend drives it: add requests, step, take outputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hardpoint.plugins import (
    EngineClosedError,
    EngineCoreRequest,
    Manifest,
    PluginMeter,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    StepFault,
    WaitReason,
)

from ..blame import blamed
from .frontend import EngineParts, Frontend
from .input_processor import NO_EXTRAS, Prompt, RequestExtras
from .plugin_health import Health

__all__ = ["EngineParts", "LLMEngine"]

_log = logging.getLogger("hardpoint")


class LLMEngine:
    """Joins input processor, engine core and output processor. One thread at a time."""

    def __init__(self, parts: EngineParts) -> None:
        """Take over the parts; `close` closes them."""
        self.parts = parts
        self._client = parts.client
        self._frontend = Frontend(parts)
        self._fallbacks: dict[str, StepFault] = {}
        self._closed = False

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | EngineCoreRequest,
        params: SamplingParams | None = None,
        extras: RequestExtras = NO_EXTRAS,
    ) -> str:
        """Check a request and queue it.

        Args:
            request_id: outputs carry it. Several live requests may have one id; `abort_requests`
                then ends them all.
            prompt: or a request that was made elsewhere, which brings its own parameters.

        Returns:
            An id that only this request has, for `abort_requests` and `why_waiting`.

        Raises:
            RequestError: it is wrong; nothing else is disturbed.
            OverloadedError: as many requests wait as may. Where the engine runs in a process of
                its own, it says so with the request's first output.
            EngineClosedError: the engine was closed.
            EngineDeadError: its process is gone.
        """
        self._check_open()
        submission = self._frontend.submit(request_id, prompt, params, extras)
        try:
            for child in submission.children:
                self._client.add_request(child)
        except BaseException as error:
            self.abort_requests([submission.parent.internal_id])
            if isinstance(error, Exception):
                named = blamed(error, self.parts.plugins)
                raise named from (error if named is not error else error.__cause__)
            raise
        return submission.parent.internal_id

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, by the ids they were added under or by those that `add_request` returned.

        They give no more outputs. Unknown ids are ignored.
        """
        if not self._closed:  # closing ended them all
            self._client.abort_requests(self._frontend.forget(request_ids))

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self._frontend.output.num_unfinished_requests() > 0

    def step(self) -> list[RequestOutput]:
        """Run the engine one step, or wait for its next outputs; return what is new.

        An error here is one that no plugin's fault scope contains: it ends the engine. An
        interrupt ends the live requests and leaves the engine usable.

        Raises:
            EngineDeadError: the engine's process is gone.
        """
        self._check_open()
        try:
            outputs = self._client.get_output(wait=self.has_unfinished_requests())
        except Exception as error:
            self._end()
            named = blamed(error, self.parts.plugins)
            raise named from (error if named is not error else error.__cause__)
        except BaseException:
            self._abort_all()
            raise
        taken = self._frontend.take(outputs.outputs)
        if taken.aborts:
            self._client.abort_requests(taken.aborts)
        return taken.request_outputs

    def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        None stands for those that got some; completions that ended are left out.

        Raises:
            RequestError: no live request has that id.
        """
        self._check_open()
        live = self._frontend.children_of(request_id)
        reasons: Sequence[WaitReason | None] = self._client.ask("why_waiting", list(live))
        return dict(zip(live.values(), reasons, strict=True))

    def set_policy(self, use: str, options: Mapping[str, Any] | None = None) -> Manifest:
        """Put another scheduling policy in the place of the one there is, between two steps.

        No request is lost. If anything is wrong, everything stays as it was.

        Args:
            use: entry-point name or FQCN.
            options: the policy's own.

        Returns:
            The new generation of the manifest.

        Raises:
            ConfigError, PluginError: the policy cannot be had.
        """
        self._check_open()
        parts = self.parts.with_policy(use, options or {})
        self._client.ask("set_policy", parts.plugins.manifest)
        self.parts = parts
        return parts.plugins.manifest

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Forget what the KV cache keeps for requests that begin alike.

        Args:
            recompute_running: also compute anew what runs, for example after weights changed.
        """
        self._check_open()
        self._client.ask("reset_prefix_cache", recompute_running)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        self._check_open()
        stats: SchedulerStats = self._client.ask("scheduler_stats")
        return stats

    def health(self) -> Health:
        """Return which plugins failed, what that ended, and which are quarantined."""
        if not self._closed:
            self._fallbacks = self._client.ask("step_faults")
        return self._frontend.health(self._fallbacks)

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""
        self._check_open()
        meters: dict[str, PluginMeter] = self._client.ask("plugin_meters")
        return meters

    def close(self) -> None:
        """End the engine and give its memory back. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._frontend.close(self._client.close)

    def _abort_all(self) -> None:
        self.abort_requests(self._frontend.output.live_ids())

    def _end(self) -> None:
        """Abort what is live and close, after an error that nothing contains."""
        try:
            self._abort_all()
            self.close()
        except Exception:
            _log.exception("closing the engine after an error failed as well")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")
