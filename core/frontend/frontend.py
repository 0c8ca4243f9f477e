"""What all faces of the engine share: prompts become requests, engine outputs become the user's."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.core.client.base import EngineCoreClient
from hardpoint.core.engine.policy import change_policy
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelConfig,
    ReasoningParser,
    RequestError,
    RequestOutput,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.stats import StepFault
from hardpoint.registry.hooks import HookSet
from hardpoint.registry.plugin_set import PluginSet

from .input_processor import NO_EXTRAS, InputProcessor, RequestExtras
from .output_processor import OutputProcessor, ProcessedOutputs
from .plugin_arguments import PluginArguments
from .plugin_health import Health, PluginHealth
from .prompts import Prompt, check_text
from .request_state import AnyOutput, OutputSink, ParentRequest
from .statistics import Statistics
from .validation import ReadyMade, ReceivedHook

_log = logging.getLogger("hardpoint")


@dataclass(frozen=True)
class EngineParts:
    """What an open engine is made of.

    Attributes:
        config: with `max_model_len` and `kv_cache.num_blocks` filled in.
        supported_tasks: what the engine's model can do, such as "generate".
        components: closed with the engine, last one first.
        clock: seconds; gives requests their arrival times.
        statistics: closed with the engine; None where nobody asks for figures.
    """

    config: EngineConfig
    config_sources: ConfigSources
    plugins: PluginSet
    hooks: HookSet
    model_config: ModelConfig
    tokenizer: Tokenizer
    reasoning: ReasoningParser | None
    client: EngineCoreClient
    supported_tasks: tuple[str, ...]
    components: Sequence[Component]
    clock: Callable[[], float]
    statistics: Statistics | None = None

    def with_policy(self, use: str, options: Mapping[str, Any]) -> EngineParts:
        """Return the parts with another scheduling policy, in the next generation of the manifest.

        Args:
            use: entry-point name or FQCN.
            options: the policy's own.

        Raises:
            ConfigError, PluginError: the policy cannot be had.
        """
        config, plugins = change_policy(
            self.config, self.config_sources, self.plugins, use, options
        )
        return dataclasses.replace(self, config=config, plugins=plugins)


@dataclass(frozen=True)
class Submission:
    """A prompt that was checked and registered; the engine does not have it yet."""

    parent: ParentRequest
    children: Sequence[EngineCoreRequest]


@dataclass(frozen=True)
class Taken:
    """What became of a batch of engine outputs.

    Attributes:
        request_outputs: of requests without a sink.
        aborts: internal ids of requests that the engine is to end.
    """

    request_outputs: list[AnyOutput]
    aborts: list[str]


class Frontend:
    """Checks and registers requests, and turns outputs into what users see. Talks to no engine.

    Attributes:
        statistics: whoever takes outputs records and reports; None where nobody asks for figures.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Prepare; the caller closes the parts."""
        config = parts.config
        assert isinstance(config.max_model_len, int)
        self._hooks = parts.hooks
        self._clock = parts.clock
        self._tasks = parts.supported_tasks
        self._components = parts.components
        self._health = PluginHealth(parts.plugins, config.plugins.quarantine_after)
        self._arguments = PluginArguments(
            parts.plugins,
            self._health,
            parts.model_config.vocab_size,
            parts.tokenizer,
            parts.reasoning,
        )
        self.input = InputProcessor(
            parts.model_config,
            parts.tokenizer,
            self._arguments,
            max_model_len=config.max_model_len,
            seed=config.seed,
            in_process=parts.client.in_process,
        )
        self.statistics = parts.statistics
        self.output = OutputProcessor(
            parts.tokenizer, config.engine.stream_interval, parts.statistics
        )
        self._ready_made = ReadyMade(self.input, parts.model_config.vocab_size)
        self._received = ReceivedHook(parts.hooks, self._ready_made, self._arguments)
        self._random_ids = config.engine.random_request_ids
        if not self._random_ids:
            _log.warning("engine.random_request_ids is off: two live requests cannot share an id")

    def submit(
        self,
        request_id: str,
        prompt: Prompt | EngineCoreRequest,
        params: SamplingParams | None,
        extras: RequestExtras = NO_EXTRAS,
        *,
        sink: OutputSink | None = None,
        token_ids: list[int] | None = None,
        arrived: float | None = None,
    ) -> Submission:
        """Check a prompt and register its requests.

        Args:
            prompt: or a request that was made elsewhere, which is taken as it is.
            sink: where its outputs go.
            token_ids: of a prompt given as text, if it was tokenised already.
            arrived: when it came, on the clock of the parts; None is now.

        Raises:
            RequestError: something is wrong; nothing was registered.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {type(request_id).__name__}")
        check_text(request_id, "request_id")
        self._check_task("generate")
        arrived = self._clock() if arrived is None else arrived
        if isinstance(prompt, EngineCoreRequest):
            request, text = self._ready_made.take(prompt, params, extras), None
            self._arguments.complete(request)
            request.arrival_time = request.arrival_time or arrived
        else:
            request, text = self.input.process(
                request_id,
                prompt,
                self.input.default_params() if params is None else params,
                extras,
                arrival_time=arrived,
                token_ids=token_ids,
            )
            arrived = request.arrival_time
        n = request.params.n if request.pooling_params is None else 1
        internal_id = self._internal_id(request_id, n)
        parent = ParentRequest(request_id, internal_id, n, sink)
        children = [self._received(child) for child in parent.children(request)]
        for child in children:
            self.output.add_request(child, text, parent, arrived)
        return Submission(parent, children)

    def take(self, batch: EngineCoreOutputs) -> Taken:
        """Take a batch of outputs; those of requests with a sink go there."""
        if self.statistics is not None:
            self.statistics.begin(batch)
        return self._shown(self.output.process(batch.outputs))

    def abort(self, ids: Iterable[str]) -> list[str]:
        """End requests by the user's or internal ids; sinks are given what there is so far.

        Returns:
            Internal ids that the engine is to end.
        """
        return self._shown(self.output.abort(self.output.live_of(ids))).aborts

    def forget(self, ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests by the user's or internal ids; they give no more outputs.

        Args:
            reason: for statistics.

        Returns:
            Internal ids that the engine is to end.
        """
        live = self.output.live_of(ids)
        self.output.drop(live, reason)
        return live

    def fail_all(
        self, error: Callable[[], Exception], reason: FinishReason = FinishReason.ERROR
    ) -> None:
        """End every request, since the engine is gone; each sink gets an error of its own.

        Args:
            reason: for statistics.
        """
        parents = self.output.parents()
        self.lose_all(reason)
        for parent in parents:
            if parent.sink is not None:
                parent.sink(error())

    def lose_all(self, reason: FinishReason = FinishReason.ERROR) -> None:
        """End every request without a word, since the engine is gone; statistics say so at once.

        Args:
            reason: for statistics.
        """
        self.output.drop(self.output.live_ids(), reason)
        if self.statistics is None:
            return
        self.statistics.engine_gone()
        try:
            self.statistics.record()
        except PluginFaultError as fault:  # it can end nothing any more
            _log.warning("%s, after the engine has ended", fault)

    def children_of(self, request_id: str) -> dict[str, int]:
        """Return the internal ids of a request's live completions, with their indices.

        Raises:
            RequestError: no live request has that id.
        """
        live = self.output.live_of([request_id])
        if not live:
            raise RequestError(f"request_id: {request_id!r} is not a live request")
        return {child: self.output.index_of(child) for child in live}

    def health(self, fallbacks: dict[str, StepFault], restarts: int = 0) -> Health:
        """Return which plugins failed, with what the engine tells of its own."""
        if self.statistics is not None:
            fallbacks = fallbacks | self.statistics.faults()
        return self._health.report(fallbacks, restarts)

    def close(self, close_client: Callable[[], None]) -> None:
        """Tell the hooks, close the client, close the components: all, whatever one raises."""
        with contextlib.ExitStack() as stack:
            for component in self._components:
                stack.callback(component.close)
            if self.statistics is not None:
                stack.callback(self.statistics.close, self.output.figures())
            stack.callback(close_client)
            stack.callback(self._hooks.call, "engine_closing")

    def _check_task(self, task: str) -> None:
        if task not in self._tasks:
            raise RequestError(
                f"{task}: this model cannot do it; it can: {', '.join(self._tasks) or 'nothing'}"
            )

    def _internal_id(self, request_id: str, n: int) -> str:
        """Return an id that no live request has.

        Raises:
            RequestError: the user's ids are to be used, and this one is taken.
        """
        if self._random_ids:
            internal = request_id
            while internal == request_id or self.output.is_live(internal):
                internal = f"{request_id}-{secrets.token_hex(4)}"
            return internal
        children = (f"{index}_{request_id}" for index in range(n if n > 1 else 0))
        if any(map(self.output.is_live, (request_id, *children))):
            raise RequestError(
                f"request_id: {request_id!r} is the id of a live request, or of a completion of one"
            )
        return request_id

    def _shown(self, processed: ProcessedOutputs) -> Taken:
        for fault in processed.faults:
            self._health.record(*fault)
        outputs: list[AnyOutput] = []
        for parent, output in processed.request_outputs:
            if output.finished and isinstance(output, RequestOutput) and not _aborted(output):
                self._finished(output)
            if parent.sink is None:
                outputs.append(output)
            else:
                parent.sink(output)
        return Taken(outputs, processed.aborts)

    def _finished(self, output: RequestOutput) -> None:
        try:
            self._hooks.call("request_finished", output=output)
        except PluginFaultError as fault:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", str(fault)


def _aborted(last: RequestOutput) -> bool:
    """Whether a request did not end by itself."""
    return any(each.finish_reason == str(FinishReason.ABORT) for each in last.outputs)
