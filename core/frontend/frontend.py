"""The frontend of every engine: prompts become requests, engine outputs become the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import msgspec

from hardpoint.errors import EngineDeadError, PluginFaultError, shown
from hardpoint.host.boundary.activity import PluginCall
from hardpoint.host.boundary.errors import close_all, engine_dead
from hardpoint.host.boundary.parts.states import States, states_of, states_of_parts
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.live.change import LiveChange, PreparedChange, Slot, Switch
from hardpoint.host.live.parts import HalfChanges, part_changes
from hardpoint.host.registry.blame import describe, logged_after
from hardpoint.host.registry.discovery import is_third_party
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    EngineCoreOutputs,
    FinishReason,
    RequestError,
    RequestOutput,
)
from hardpoint.plugins.requests.stats import Health, PluginReport, StepFault
from hardpoint.typed import read_only

from .deadlines import Deadlines
from .engine_parts import EngineParts
from .outputs.output_processor import OutputProcessor, ProcessedOutputs
from .outputs.request_state import AnyOutput
from .requests.input_processor import InputProcessor
from .requests.plugin_arguments import PluginArguments
from .requests.submission import Submitter

_MOST_NAMED = 8  # requests, in an error

METRICS_TIMEOUT_S = 1.0
"""How long an export of metrics waits for the engine's answer."""


@dataclass(frozen=True)
class ProcessedBatch:
    """The result of one batch of engine outputs.

    Attributes:
        request_outputs: outputs of requests without a sink.
        aborts: internal ids of requests to abort in the engine.
    """

    request_outputs: list[AnyOutput]
    aborts: list[str]


class Frontend:
    """Turns the engine's outputs into users' outputs, and ends requests. Talks to no engine.

    Attributes:
        submitter: checks prompts and registers their requests.
        input: makes requests of prompts.
        output: makes users' outputs of the engine's.
        observers: observers of all outputs.
        deadlines: deadlines of the live requests that have a timeout.
    """

    def __init__(self, parts: EngineParts) -> None:
        config = parts.config
        assert isinstance(config.max_model_len, int)
        self._hooks = parts.hooks
        self._components = parts.components
        self._step_parts, self._companions = parts.step_parts, parts.companions
        self._health = PluginHealth(parts.plugins, config.plugins.quarantine_after)
        parts.step_parts.report_to(self._health.record)
        for companion in parts.companions:
            companion.report_to(self._health)
        self._arguments = PluginArguments(
            parts.plugins,
            self._health,
            parts.model_config.vocab_size,
            parts.tokenizer,
            parts.step_parts,
        )
        self.input = InputProcessor(
            parts.model_config,
            parts.tokenizer,
            self._arguments,
            parts.step_parts,
            max_model_len=config.max_model_len,
            seed=config.seed,
            in_process=parts.client.in_process,
            # A hook may change lists in place.
            share_params=not parts.hooks.has("request_received"),
        )
        self.observers = parts.step_parts.observers
        self._last_report = PluginReport()
        self._num_blocks = config.kv_cache.num_blocks
        self.output = OutputProcessor(
            parts.tokenizer,
            config.engine.stream_interval,
            parts.step_parts,
        )
        self._has_finished_hook = parts.hooks.has("request_finished")
        self.deadlines = Deadlines(parts.clock, self.output.is_live)
        self.submitter = Submitter(parts, self._arguments, self.input, self.output, self.deadlines)
        self._third_party: set[str] = set()
        self._use(parts.config, parts.plugins)

    def change_slots(self) -> list[Slot]:
        """Return the places of the frontend that live changes concern."""
        parts = self._step_parts
        halves = part_changes(
            parts, parts.use_halves, self._settings[1], parts.users_of, closes_later=True
        )
        return [self, halves, HalfChanges(parts)]

    def states(self) -> States:
        """Return the states of the frontend halves of step parts, and of their components."""
        component_states = states_of(self._step_parts.components)
        return component_states | states_of_parts(self._step_parts.halves, "frontend")

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Check that requests can be admitted with other plugins.

        Raises:
            ConfigError: they change settings that are fixed at the start.
            PluginError: a class cannot be loaded.
        """
        if change.config.stats.on and not self.observers:
            raise ConfigError(
                "stats.sinks: this engine gathers no statistics, which a sink or "
                "stats.request_metrics at its start lets it do; restart it with the new value"
            )
        self._arguments.check(plugins)
        new, old = (change.config, plugins), self._settings

        def switch(is_new: bool) -> None:
            self._use(*(new if is_new else old))
            self.submitter.use_plugins(self._settings[1])

        return Switch(switch)

    def _use(self, config: EngineConfig, plugins: PluginSet) -> None:
        self._settings = config, plugins
        self._health.use(plugins, config.plugins.quarantine_after)
        self.output.stream_interval = config.engine.stream_interval
        entries = plugins.entries("logits_processors")
        self._third_party |= {entry.name for entry in entries if is_third_party(entry)}

    def process_outputs(self, batch: EngineCoreOutputs) -> ProcessedBatch:
        """Process a batch of outputs; requests with a sink get theirs there."""
        if self.observers.exist:
            self.observers.begin(batch)
        return self._dispatch(self.output.process(batch.outputs))

    def abort(self, ids: str | Iterable[str]) -> list[str]:
        """End requests by the user's or internal ids; sinks get their outputs so far.

        Returns:
            The internal ids to abort in the engine.

        Raises:
            RequestError: one is no string; none ends.
        """
        return self._dispatch(self.output.abort(self.output.live_of(listed_ids(ids)))).aborts

    def end_expired(self) -> ProcessedBatch:
        """End the expired requests that no engine has ended."""
        return self._dispatch(self.output.abort(self.deadlines.pop_expired(), FinishReason.TIMEOUT))

    def forget(
        self, ids: str | Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[str]:
        """End requests by the user's or internal ids, without further outputs.

        Args:
            reason: for observers.

        Returns:
            The internal ids to abort in the engine.

        Raises:
            RequestError: one is no string; none ends.
        """
        live = self.output.live_of(listed_ids(ids))
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
            reason: for observers.
            in_step: internal ids of the requests of the step that ended the engine; None is all.
        """
        parents, suspects = self.output.parents_of(None), self.output.parents_of(in_step)
        self.drop_all(reason)
        for parent in parents:
            if parent.sink is not None:
                parent.sink(error(parent in suspects))

    def named(self, error: BaseException, in_step: Collection[str] | None) -> EngineDeadError:
        """Return the error of a dead engine; it names the requests that may be responsible.

        Args:
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
        self._health.record(call.name, None, message)

    def drop_all(self, reason: FinishReason = FinishReason.ERROR) -> None:
        """Drop every request because the engine has ended; observers report `reason` at once."""
        self.output.drop(self.output.live_ids(), reason)
        self.observers.engine_ended()
        with logged_after("the engine has ended"):
            self.observers.flush()

    def children_of(self, request_id: str) -> dict[str, int]:
        """Return the internal ids of a request's live completions, with their indices.

        Raises:
            RequestError: no live request has that id.
        """
        live = self.output.live_of(listed_ids([request_id]))
        if not live:
            raise RequestError(f"request_id: {request_id!r} is not a live request")
        return {child: self.output.index_of(child) for child in live}

    def health(
        self, fallbacks: dict[str, StepFault], slow: dict[str, StepFault], restarts: int = 0
    ) -> Health:
        """Return the faults of plugins, including the faults that the engine reports."""
        faults = self._step_parts.faults
        return self._health.report(fallbacks | faults.report(), slow | faults.slow(), restarts)

    def exposition(self, answer: PluginReport | None, restarts: int = 0) -> str:
        """Return the exports of observers; nothing without any.

        Args:
            answer: report of the engine; None if it gave none, then its last one is used, without
                the state of the scheduler.

        Raises:
            PluginFaultError: a component with faults of scope engine failed.
        """
        if not self.observers:
            return ""
        report = self._last_report if answer is None else answer
        self._last_report = msgspec.structs.replace(report, scheduler=None)
        health = self.health(report.health.fallbacks, report.health.slow, restarts)
        return self.observers.exposition(
            msgspec.structs.replace(report, health=health, num_blocks=self._num_blocks)
        )

    def close(self, close_client: Callable[[], None]) -> None:
        """Call the hooks, close the client and the components: all of them, even if one raises."""
        with contextlib.ExitStack() as stack:
            stack.callback(close_all, self._components)
            stack.callback(self._step_parts.close)
            for companion in self._companions:
                stack.callback(companion.close)
            stack.callback(lambda: self.observers.close(self.output.observed()))
            stack.callback(close_client)
            stack.callback(self._hooks.call, "engine_closing")

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
        aborted = any(completion.finish_reason == "abort" for completion in output.outputs)
        if aborted or not output.finished:
            return
        try:
            self._hooks.call("request_finished", output=read_only(output))
        except PluginFaultError as fault:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", str(fault)


def listed_ids(ids: str | Iterable[str]) -> list[str]:
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
