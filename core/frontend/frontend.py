"""What all engines share: prompts become requests, engine outputs become the user's."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.core.activity import PluginCall
from hardpoint.core.client.base import EngineCoreClient
from hardpoint.core.engine.policy import change_policy
from hardpoint.core.errors import engine_dead
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
    SchedulingPolicy,
    typed,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.config import ConfigSources, KVCacheConfig, SchedulerConfig
from hardpoint.plugins.errors import EngineDeadError, PluginFaultError, shown
from hardpoint.plugins.read_only import read_only
from hardpoint.plugins.stats import Health, PluginReport, StepFault
from hardpoint.registry.blame import describe
from hardpoint.registry.discovery import is_third_party
from hardpoint.registry.guards import GuardedTokenizer
from hardpoint.registry.hooks import HookSet
from hardpoint.registry.plugin_set import PluginSet

from .input_processor import NO_EXTRAS, InputProcessor, RequestExtras
from .output_parts import AnswerValidator, OutputParsers
from .output_processor import OutputProcessor, ProcessedOutputs
from .plugin_arguments import PluginArguments
from .plugin_health import PluginHealth
from .prompts import Prompt
from .request_state import AnyOutput, OutputSink, ParentRequest
from .statistics import Statistics
from .validation import PrebuiltRequestValidator, RequestReceivedHook

_log = logging.getLogger("hardpoint")

_DISPENSABLE = frozenset({"logits_processors", "kv_event_publishers", "hooks"})
_MOST_NAMED = 8  # requests, in an error
_ABORTED = str(FinishReason.ABORT)

METRICS_TIMEOUT_S = 1.0
"""How long an export of metrics waits for the engine's answer."""

_AT_ONCE = math.ulp(0.0)
"""The timeout, in seconds, of a request whose time is up before it is sent."""


@dataclass(frozen=True)
class EngineParts:
    """The parts of an open engine.

    Attributes:
        config: with `max_model_len` and `kv_cache.num_blocks` filled in.
        supported_tasks: of the model, such as "generate".
        components: closed with the engine, last one first.
        clock: seconds; gives requests their arrival times.
        statistics: closed with the engine; None if they are off.
        why_no_grammars: the reason if the engine has no grammars; None if it has.
    """

    config: EngineConfig
    config_sources: ConfigSources
    plugins: PluginSet
    hooks: HookSet
    model_config: ModelConfig
    tokenizer: GuardedTokenizer
    parsers: OutputParsers
    client: EngineCoreClient
    supported_tasks: tuple[str, ...]
    components: Sequence[Component]
    clock: Callable[[], float]
    statistics: Statistics | None = None
    why_no_grammars: str | None = None

    def with_policy(
        self, use: str | type[SchedulingPolicy], options: Mapping[str, Any]
    ) -> EngineParts:
        """Return the parts with another scheduling policy, in the next generation of the manifest.

        Args:
            use: entry-point name, FQCN or class.
            options: of the policy.

        Raises:
            ConfigError, PluginError: the policy cannot be built.
        """
        config, plugins = change_policy(
            self.config, self.config_sources, self.plugins, use, options
        )
        return dataclasses.replace(self, config=config, plugins=plugins)

    def without(self, call: PluginCall) -> EngineParts | None:
        """Return the parts of an engine without a plugin; None if it cannot do without.

        The built-in default takes the place of a policy.
        """
        if call.kind in _DISPENSABLE:
            return dataclasses.replace(self, plugins=self.plugins.without(call.kind, call.name))
        if call.kind == "scheduling_policies":
            return self.with_policy(SchedulerConfig().policy, {})
        if call.kind == "eviction_policies":
            kv_cache = msgspec.structs.replace(
                self.config.kv_cache, eviction=KVCacheConfig().eviction
            )
            config = msgspec.structs.replace(self.config, kv_cache=kv_cache)
            plugins = self.plugins.changed(config, self.config_sources, call.kind)
            return dataclasses.replace(self, config=config, plugins=plugins)
        return None


@dataclass(frozen=True)
class Submission:
    """A prompt that was checked and registered, and has not been sent to the engine."""

    parent: ParentRequest
    children: Sequence[EngineCoreRequest]


@dataclass(frozen=True)
class ProcessedBatch:
    """The result of one batch of engine outputs.

    Attributes:
        request_outputs: of requests without a sink.
        aborts: internal ids of requests to abort in the engine.
    """

    request_outputs: list[AnyOutput]
    aborts: list[str]


class Frontend:
    """Checks and registers requests, and turns outputs into what users see. Talks to no engine.

    Attributes:
        statistics: the engine records and reports them; None if they are off.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Build input and output processing; the caller closes the parts."""
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
            parts.parsers,
            config.grammar,
            parts.why_no_grammars,
        )
        self.input = InputProcessor(
            parts.model_config,
            parts.tokenizer,
            self._arguments,
            max_model_len=config.max_model_len,
            seed=config.seed,
            in_process=parts.client.in_process,
            # A hook may change lists in place.
            share_params=not parts.hooks.has("request_received"),
        )
        self.statistics = parts.statistics
        self._num_blocks = config.kv_cache.num_blocks
        self._validator = AnswerValidator(parts.plugins, config.grammar.use)
        self.output = OutputProcessor(
            parts.tokenizer, config.engine.stream_interval, parts.statistics, self._validator
        )
        self._prebuilt = PrebuiltRequestValidator(self.input, parts.model_config.vocab_size)
        self._received_hook: RequestReceivedHook | None = None
        if parts.hooks.has("request_received"):
            self._received_hook = RequestReceivedHook(parts.hooks, self._prebuilt, self._arguments)
        self._third_party = {
            entry.name
            for entry in parts.plugins.entries("logits_processors")
            if is_third_party(entry)
        }
        self._has_finished_hook = parts.hooks.has("request_finished")
        self._warned_policies: set[str] = set()
        self._policy_ignoring_priority = _policy_ignoring_priority(parts.plugins)
        self._random_ids = config.engine.random_request_ids
        if not self._random_ids:
            _log.warning("engine.random_request_ids is off: two live requests cannot share an id")

    def use_plugins(self, plugins: PluginSet) -> None:
        """Take the arguments of requests for another generation of the plugins."""
        self._arguments.use(plugins)
        self._validator.use_plugins(plugins)
        name = _policy_ignoring_priority(plugins)
        self._policy_ignoring_priority = None if name in self._warned_policies else name

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
            prompt: or a prebuilt request.
            sink: gets its outputs; without one, `process_outputs` returns them.
            token_ids: of a prompt given as text, if it was tokenised already.
            arrived: time of the call, on the clock of the parts; None is now.

        Raises:
            RequestError: something is wrong; nothing was registered.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {type(request_id).__name__}")
        typed.check_text(request_id, "request_id", RequestError)
        self._check_task("generate")
        if extras is not NO_EXTRAS:
            extras = typed.convert(extras, RequestExtras, path="", error=RequestError)
        arrived = self._clock() if arrived is None else arrived
        if isinstance(prompt, EngineCoreRequest):
            request, text = self._prebuilt.validate(prompt, params, extras), None
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
        if request.priority and self._policy_ignoring_priority is not None:
            self._warn_of_priority(self._policy_ignoring_priority)
        n = request.params.n if request.pooling_params is None else 1
        internal_id = self._internal_id(request_id, n)
        parallel = extras.calls is None or extras.calls.parallel
        parent = ParentRequest(request_id, internal_id, n, sink, parallel)
        children = parent.children(request)
        if self._received_hook is not None:
            children = [self._received_hook(child) for child in children]
        structured = request.params.structured
        may_call = structured is None or structured.structural_tag is not None
        self._register(children, text, parent, arrived, extras.tools if may_call else None)
        return Submission(parent, children)

    def _warn_of_priority(self, policy: str) -> None:
        """Log, once, that a policy ignores the priority of requests."""
        _log.warning(
            'priority: the scheduling policy "%s" ignores it; scheduler.policy = "priority" is the '
            "one that orders by it",
            policy,
        )
        self._warned_policies.add(policy)
        self._policy_ignoring_priority = None

    def _register(
        self,
        children: Sequence[EngineCoreRequest],
        text: str | None,
        parent: ParentRequest,
        arrived: float,
        tools: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        """Register all completions of a prompt, or none if the tokenizer fails for one."""
        # Clocks of two processes do not compare, so the engine gets the time that is left.
        spent = self._clock() - arrived
        registered: list[str] = []
        try:
            for child in children:
                if child.timeout is not None:
                    child.timeout = max(child.timeout - spent, _AT_ONCE)
                # A time to come would give negative latencies.
                since = child.arrival_time if child.arrival_time <= arrived else arrived
                parsers = self._arguments.parsers(child)
                try:
                    self.output.add_request(child, text, parent, since, parsers or None, tools)
                except BaseException:
                    parsers.close()
                    raise
                registered.append(child.request_id)
        except BaseException:
            self.output.drop(registered, FinishReason.ERROR)
            raise

    def process_outputs(self, batch: EngineCoreOutputs) -> ProcessedBatch:
        """Process a batch of outputs; those of requests with a sink go to it."""
        if self.statistics is not None:
            self.statistics.begin(batch)
        return self._dispatch(self.output.process(batch.outputs))

    def abort(self, ids: str | Iterable[str]) -> list[str]:
        """End requests by the user's or internal ids; sinks get their outputs so far.

        Returns:
            The internal ids to abort in the engine.

        Raises:
            RequestError: one is no string; none ends.
        """
        return self._dispatch(self.output.abort(self.output.live_of(_listed(ids)))).aborts

    def forget(
        self, ids: str | Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[str]:
        """End requests by the user's or internal ids, without further outputs.

        Args:
            reason: for statistics.

        Returns:
            The internal ids to abort in the engine.

        Raises:
            RequestError: one is no string; none ends.
        """
        live = self.output.live_of(_listed(ids))
        self.output.drop(live, reason)
        return live

    def fail_all(
        self,
        error: Callable[[bool], Exception],
        reason: FinishReason = FinishReason.ERROR,
        in_step: Collection[str] | None = (),
    ) -> None:
        """End every request because the engine has ended or closes; each sink gets its own error.

        Args:
            error: returns it, called with whether the request is one of `in_step`.
            reason: for statistics.
            in_step: internal ids of the requests of the step that ended the engine; None is all.
        """
        parents, suspects = self.output.parents(), self.output.parents_of(in_step)
        self.drop_all(reason)
        for parent in parents:
            if parent.sink is not None:
                parent.sink(error(parent in suspects))

    def named(self, error: BaseException, in_step: Collection[str] | None) -> EngineDeadError:
        """Return the error of a dead engine; it names the requests that may be responsible.

        Args:
            error: that ended the engine.
            in_step: internal ids of the requests of the step that ended it; None is all.
        """
        reported = engine_dead(error)
        users = [
            f"{parent.request_id!r} ({', '.join(sorted(names & self._third_party))})"
            for parent, names in self.output.parents_of(in_step).items()
            if not names.isdisjoint(self._third_party)
        ]
        if users:
            more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
            reported.args = (
                f"{reported}; requests of that step that used third-party plugins: "
                f"{', '.join(users[:_MOST_NAMED])}{more}",
            )
        return reported

    def quarantine(self, call: PluginCall, message: str) -> None:
        """Refuse requests that use a plugin."""
        self._health.quarantine(call.name, message)

    def drop_all(self, reason: FinishReason = FinishReason.ERROR) -> None:
        """Drop every request because the engine has ended; statistics record that at once.

        Args:
            reason: for statistics.
        """
        self.output.drop(self.output.live_ids(), reason)
        if self.statistics is None:
            return
        self.statistics.engine_ended()
        try:
            self.statistics.record()
        except PluginFaultError as fault:  # the engine has ended already
            _log.warning("%s, after the engine has ended", fault)

    def children_of(self, request_id: str) -> dict[str, int]:
        """Return the internal ids of a request's live completions, with their indices.

        Raises:
            RequestError: no live request has that id.
        """
        live = self.output.live_of(_listed([request_id]))
        if not live:
            raise RequestError(f"request_id: {request_id!r} is not a live request")
        return {child: self.output.index_of(child) for child in live}

    def health(
        self, fallbacks: dict[str, StepFault], slow: dict[str, StepFault], restarts: int = 0
    ) -> Health:
        """Return the faults of plugins, with those that the engine reports."""
        if self.statistics is not None:
            fallbacks = fallbacks | self.statistics.faults()
            slow = slow | self.statistics.slow()
        return self._health.report(fallbacks, slow, restarts)

    def exposition(self, answer: PluginReport | None, restarts: int = 0) -> str:
        """Return what the sinks export; nothing without any.

        Args:
            answer: of the engine; None if it gave none, then its last one is used.

        Raises:
            PluginFaultError: a sink whose faults end the engine failed.
        """
        if self.statistics is None:
            return ""
        report = self.statistics.last_report(answer)
        health = self.health(report.health.fallbacks, report.health.slow, restarts)
        return self.statistics.exposition(
            msgspec.structs.replace(report, health=health, num_blocks=self._num_blocks)
        )

    def close(self, close_client: Callable[[], None]) -> None:
        """Call the hooks, close the client and the components: all of them, even if one raises."""
        with contextlib.ExitStack() as stack:
            for component in self._components:
                stack.callback(component.close)
            stack.callback(self._arguments.close)
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
            RequestError: random ids are off, and this id is in use.
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

    def _dispatch(self, processed: ProcessedOutputs) -> ProcessedBatch:
        for fault in processed.faults:
            self._health.record(*fault)
        outputs: list[AnyOutput] = []
        for parent, output in processed.request_outputs:
            if self._has_finished_hook and isinstance(output, RequestOutput):
                self._call_finished_hook(output)
            if parent.sink is None:
                outputs.append(output)
            else:
                parent.sink(output)
        return ProcessedBatch(outputs, processed.aborts)

    def _call_finished_hook(self, output: RequestOutput) -> None:
        """Call the hook for the last output of a request that was not aborted."""
        aborted = any(completion.finish_reason == _ABORTED for completion in output.outputs)
        if aborted or not output.finished:
            return
        try:
            self._hooks.call("request_finished", output=read_only(output))
        except PluginFaultError as fault:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", str(fault)


def _listed(ids: str | Iterable[str]) -> list[str]:
    """Return one id or several as a list.

    Raises:
        RequestError: they are no strings.
    """
    try:
        listed = [ids] if isinstance(ids, str) else list(ids)
    except Exception as cause:  # of no iterable, or of the caller's own
        raise RequestError(f"request_ids: reading them failed: {describe(cause)}") from cause
    for request_id in listed:
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {shown(request_id)}")
    return listed


def _policy_ignoring_priority(plugins: PluginSet) -> str | None:
    """Return the name of the policy if it says that it ignores priorities, else None."""
    if is_third_party(plugins.one("schedulers")):  # which may look at them itself
        return None
    entry = plugins.one("scheduling_policies")
    return None if vars(plugins.target(entry)).get("uses_priority", True) else entry.name
