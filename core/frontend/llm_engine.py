"""The engine as a frontend drives it: add requests, step, take outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.plugins import (
    Component,
    EngineClosedError,
    EngineConfig,
    EngineCoreRequest,
    Manifest,
    ModelConfig,
    Origins,
    PluginFaultError,
    PluginMeter,
    PluginSet,
    ReasoningParser,
    RequestError,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    StepFault,
    Tokenizer,
    WaitReason,
)
from hardpoint.plugins.hook_set import HookSet

from ..blame import blamed
from ..change_policy import change_policy
from ..client import EngineCoreClient
from .input_processor import NO_EXTRAS, InputProcessor, Prompt, RequestExtras
from .output_processor import OutputProcessor
from .parent_request import ParentRequest
from .plugin_arguments import PluginArguments
from .plugin_health import Health, PluginHealth

__all__ = ["EngineParts", "LLMEngine"]

_log = logging.getLogger("hardpoint")


@dataclass(frozen=True)
class EngineParts:
    """What an open engine is made of.

    Attributes:
        config: with `max_model_len` and `kv_cache.num_blocks` filled in.
        components: closed with the engine, last one first.
        clock: seconds; gives requests their arrival times.
    """

    config: EngineConfig
    origins: Origins
    plugins: PluginSet
    hooks: HookSet
    model_config: ModelConfig
    tokenizer: Tokenizer
    reasoning: ReasoningParser | None
    client: EngineCoreClient
    components: Sequence[Component]
    clock: Callable[[], float]


class LLMEngine:
    """Joins input processor, engine core and output processor."""

    def __init__(self, parts: EngineParts) -> None:
        """Take over the parts; `close` closes them."""
        config = parts.config
        assert isinstance(config.max_model_len, int)
        self.parts = parts
        self._client = parts.client
        self._hooks = parts.hooks
        self._clock = parts.clock
        self._health = PluginHealth(parts.plugins, config.plugins.quarantine_after)
        self._arguments = PluginArguments(
            parts.plugins,
            self._health,
            parts.model_config.vocab_size,
            parts.tokenizer,
            parts.reasoning,
        )
        self._input = InputProcessor(
            parts.model_config,
            parts.tokenizer,
            self._arguments,
            max_model_len=config.max_model_len,
            seed=config.seed,
        )
        self._output = OutputProcessor(parts.tokenizer)
        self._external_ids: set[str] = set()
        self._fallbacks: dict[str, StepFault] = {}
        self._closed = False

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        extras: RequestExtras = NO_EXTRAS,
    ) -> None:
        """Check a request and queue it.

        Raises:
            RequestError: it is wrong; nothing else is disturbed.
            OverloadedError: as many requests wait as may.
            EngineClosedError: the engine was closed.
        """
        self._check_open()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {type(request_id).__name__}")
        if request_id in self._external_ids:
            raise RequestError(f"request_id: {request_id!r} is the id of a live request")
        request, text = self._input.process(
            request_id, prompt, params, extras, arrival_time=self._clock()
        )
        parent = ParentRequest(request_id, request.params.n)
        children = parent.children(request)
        for child in children:
            if self._output.is_live(child.request_id):
                raise RequestError(
                    f"request_id: {request_id!r} would clash with the live request "
                    f"{child.request_id!r}"
                )
            self._received(child)
        self._external_ids.add(request_id)
        try:
            for child in children:
                self._output.add_request(child, text, parent)
                self._client.add_request(child)
        except BaseException as error:
            self.abort_requests([request_id])
            if isinstance(error, Exception):
                named = blamed(error, self.parts.plugins)
                raise named from (error if named is not error else error.__cause__)
            raise

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests by the ids they were added under; unknown ones are ignored."""
        if self._closed:  # closing ended them all
            return
        ids = list(request_ids)
        live = self._output.unfinished_of(ids)
        self._output.drop(live)
        self._external_ids.difference_update(ids)
        self._client.abort_requests(live)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self._output.num_unfinished_requests() > 0

    def step(self) -> list[RequestOutput]:
        """Run the engine one step; return what is new.

        An error here is one that no plugin's fault scope contains: it ends the engine. An
        interrupt ends the live requests and leaves the engine usable.
        """
        self._check_open()
        try:
            outputs = self._client.get_output()
        except Exception as error:
            self._end()
            named = blamed(error, self.parts.plugins)
            raise named from (error if named is not error else error.__cause__)
        except BaseException:
            self.abort_requests(list(self._external_ids))
            raise
        processed = self._output.process(outputs.outputs)
        for fault in processed.faults:
            self._health.record(*fault)
        if processed.aborts:
            self._client.abort_requests(processed.aborts)
        for output in processed.request_outputs:
            if output.finished:
                self._external_ids.discard(output.request_id)
                self._finished(output)
        return processed.request_outputs

    def _end(self) -> None:
        """Abort what is live and close, after an error that nothing contains."""
        try:
            self.abort_requests(list(self._external_ids))
            self.close()
        except Exception:
            _log.exception("closing the engine after an error failed as well")

    def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        None stands for those that got some; completions that ended are left out.

        Raises:
            RequestError: no live request has that id.
        """
        self._check_open()
        live = self._output.children_of(request_id)
        if not live:
            raise RequestError(f"request_id: {request_id!r} is not a live request")
        return dict(zip(live.values(), self._client.why_waiting(list(live)), strict=True))

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
        config, plugins = change_policy(
            self.parts.config, self.parts.origins, self.parts.plugins, use, options or {}
        )
        self._client.set_policy(plugins.manifest)
        self.parts = dataclasses.replace(self.parts, config=config, plugins=plugins)
        return plugins.manifest

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Forget what the KV cache keeps for requests that begin alike.

        Args:
            recompute_running: also compute anew what runs, for example after weights changed.
        """
        self._check_open()
        self._client.reset_prefix_cache(recompute_running)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        self._check_open()
        return self._client.scheduler_stats()

    def health(self) -> Health:
        """Return which plugins failed, what that ended, and which are quarantined."""
        if not self._closed:
            self._fallbacks = self._client.step_faults()
        return self._health.report(self._fallbacks)

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""
        self._check_open()
        return self._client.plugin_meters()

    def close(self) -> None:
        """End the engine and give its memory back. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # each is closed, whatever another one raises
            for component in self.parts.components:
                stack.callback(component.close)
            stack.callback(self._client.close)
            stack.callback(self._hooks.call, "engine_closing")

    def _received(self, request: EngineCoreRequest) -> None:
        try:
            self._hooks.call("request_received", request=request)
        except PluginFaultError as fault:
            cause = fault.__cause__
            message = str(cause) if isinstance(cause, ValueError) else str(fault)
            raise RequestError(message) from fault
        self._arguments.check_names(request.plugin_args)

    def _finished(self, output: RequestOutput) -> None:
        try:
            self._hooks.call("request_finished", output=output)
        except PluginFaultError as fault:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", str(fault)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")
