"""The engine as a frontend drives it: add requests, step, take outputs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.core.errors import blamed, engine_dead
from hardpoint.plugins import (
    EngineCoreRequest,
    FinishReason,
    HardpointError,
    SamplingParams,
    WaitReason,
)
from hardpoint.plugins.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineTimeoutError,
    PluginFaultError,
)
from hardpoint.plugins.manifest import Manifest
from hardpoint.plugins.stats import StepFault

from .frontend import EngineParts, Frontend, Taken
from .input_processor import NO_EXTRAS, RequestExtras
from .plugin_health import Health
from .prompts import Prompt
from .request_state import AnyOutput

_log = logging.getLogger("hardpoint")

_STANDING_STILL = frozenset({"pause", "resume", "sleep", "wake_up"})


class LLMEngine:
    """Joins input processor, engine core and output processor. One thread at a time.

    Attributes:
        is_paused: whether requests stand still until the engine is resumed.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Take over the parts; `close` closes them."""
        self.parts = parts
        self._client = parts.client
        self._frontend = Frontend(parts)
        self._fallbacks: dict[str, StepFault] = {}
        self._closed = False
        self.is_paused = False

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
            EngineDeadError: it is gone, or has ended by this; an EngineFaultError if a plugin is
                to blame.
            EngineTimeoutError: its process takes no messages.
        """
        self._check_open()
        submission = self._frontend.submit(request_id, prompt, params, extras)
        try:
            for child in submission.children:
                self._client.add_request(child)
        except BaseException as error:
            self._forget([submission.parent.internal_id], FinishReason.ERROR)
            if _ends_engine(error):
                self._fail(error)
            raise
        return submission.parent.internal_id

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, by the ids they were added under or by those that `add_request` returned.

        They give no more outputs. Unknown ids are ignored.
        """
        self._forget(request_ids, FinishReason.ABORT)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self._frontend.output.num_unfinished_requests() > 0

    def step(self, timeout: float | None = None) -> list[AnyOutput]:
        """Run the engine one step, or wait for its next outputs; return what is new.

        It never waits for a paused engine.

        An error here is one that no plugin's fault scope contains: it ends the engine. An
        interrupt ends the live requests and leaves the engine usable; a timeout ends nothing.

        Args:
            timeout: seconds to wait for an engine in a process of its own. None waits as long as
                it takes; an engine that hangs is then for `engine.watchdog_exits` to end.

        Raises:
            EngineDeadError: the engine has ended; an EngineFaultError if a plugin is to blame.
            EngineTimeoutError: it gave no outputs in time.
        """
        self._check_open()
        if (statistics := self._frontend.statistics) is not None:
            self._tell(statistics.report_if_due)
        waits = self.has_unfinished_requests() and not self.is_paused
        taken: Taken | None = None
        try:
            outputs = self._client.get_output(wait=waits, timeout=timeout)
            if outputs is not None:
                taken = self._frontend.take(outputs)
                if taken.aborts:
                    self._client.abort_requests(taken.aborts)
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._forget(self._frontend.output.live_ids(), FinishReason.ABORT)
            raise
        if outputs is None or taken is None:
            raise EngineTimeoutError(f"the engine gave no outputs within {timeout:g} s")
        if statistics is not None and outputs.outputs:
            self._tell(statistics.record)
        return taken.request_outputs

    def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        None stands for those that got some; completions that ended are left out.

        Raises:
            RequestError: no live request has that id.
        """
        self._check_open()
        live = self._frontend.children_of(request_id)
        reasons = EngineUtilities.why_waiting.call(self.call_utility, list(live))
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
        parts = self.parts.with_policy(use, options or {})
        EngineUtilities.set_policy.call(self.call_utility, parts.plugins.manifest)
        self.parts = parts
        return parts.plugins.manifest

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call one of the engine's utilities, such as "pause" or "scheduler_stats", and wait.

        Args:
            method: one of `utility_calls.UTILITIES`, which declares its parameters and result.
            args: by position.

        Raises:
            RequestError: no such utility, or wrong arguments.
            HardpointError: what the utility raised.
            EngineClosedError, EngineDeadError, EngineTimeoutError: it could not be asked.
        """
        self._check_open()
        try:
            return self._client.call_utility(method, *args)
        finally:
            if method in _STANDING_STILL:
                with contextlib.suppress(EngineDeadError):  # it was told of that already
                    self.is_paused = EngineUtilities.is_paused.call(self._client.call_utility)

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that brings none: what the model's files recommend."""
        return self._frontend.input.default_params()

    def health(self) -> Health:
        """Return which plugins failed, what that ended, and which are quarantined."""
        if not self._closed:
            self._fallbacks = EngineUtilities.step_faults.call(self.call_utility)
        return self._frontend.health(self._fallbacks)

    def close(self) -> None:
        """End the engine and give its memory back. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._frontend.close(self._client.close)

    def _tell(self, sinks: Callable[[], None]) -> None:
        """Have statistics call the sinks; a fault that ends the engine does so."""
        try:
            sinks()
        except PluginFaultError as error:
            self._fail(error)

    def _forget(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        if not self._closed:  # closing ended them all
            self._abort(self._frontend.forget(request_ids, reason))

    def _abort(self, ids: Sequence[str]) -> None:
        """Have the engine end requests, by internal ids."""
        try:
            if ids:
                self._client.abort_requests(ids)
        except Exception as error:
            if _ends_engine(error):
                self._fail(error)
            raise

    def _fail(self, error: Exception) -> NoReturn:
        """End, and say so as if the engine had a process of its own."""
        self._end()
        told = engine_dead(blamed(error, self.parts.plugins))
        raise told from told.__cause__

    def _end(self) -> None:
        """Forget what is live and close, after an error that nothing contains."""
        try:
            self._frontend.lose_all()
            self.close()
        except Exception:
            _log.exception("closing the engine after an error failed as well")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")


def _ends_engine(error: BaseException) -> TypeGuard[Exception]:
    """Whether an error is more than a refusal, or word of an end that has come already."""
    if isinstance(error, PluginFaultError):
        return not isinstance(error, EngineDeadError)
    return isinstance(error, Exception) and not isinstance(error, HardpointError)
