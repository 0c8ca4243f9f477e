"""The logits processors of a worker: built, changed live, and given the arguments of requests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from hardpoint import typed
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.logits.processor_runner import End, ProcessorRunner
from hardpoint.host.live import generations
from hardpoint.host.live.change import LiveChange
from hardpoint.host.registry.blame import describe, raise_unless_fault
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.registry.request_arguments import argument_key
from hardpoint.plugins import (
    EngineCoreRequest,
    HardpointError,
    LogitsContext,
    Ops,
    RequestFault,
    Sampler,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.toolkit.logits_calls.states import sampler_states
from hardpoint.typed import ReadOnlyDict, prepared_type

from .pipeline import LogitsPipeline

_ELSEWHERE = {
    kind.name
    for kind in KINDS.values()
    if kind.takes_arguments and kind.name not in ("logits_processors", "samplers")
}
"""Kinds whose components get their arguments elsewhere."""

Converted = tuple[ReadOnlyDict[str, Any], Any, End | None]
"""Arguments of processors by name, those of the sampler, and the fault if one is rejected."""


class RequestArguments:
    """Converts the arguments of requests."""

    def __init__(self, pipeline: LogitsPipeline, sampler: Sampler) -> None:
        self._pipeline, self._sampler = pipeline, sampler
        self._key = argument_key("samplers", sampler.name)
        has_states = pipeline.runner(self._key, 0) is not None
        self.states_key = self._key if has_states else ""
        self._type = prepared_type(type(sampler))
        self.defaults = self._type()

    def of(self, source: EngineCoreRequest) -> Converted:
        """Convert the arguments of a request."""
        # The frontend has checked them, but a plugin's own check may fail in this process only.
        arguments: dict[str, Any] = {}
        sampler_arguments = self.defaults
        for name, plain in source.plugin_args.items():
            path = f"plugin_args.{name}"
            if name == self._key:
                try:
                    sampler_arguments = typed.convert(plain, self._type, path=path)
                except HardpointError as cause:
                    return self._rejected(RequestFault(str(cause)))
                except BaseException as cause:
                    raise_unless_fault(cause)
                    failure = f"sampler {self._sampler.name!r}: its Arguments failed"
                    return self._rejected(RequestFault(f"{failure}: {describe(cause)}"))
                continue
            runner = self._pipeline.runner(name, source.generation)
            if runner is None:
                if name.partition("/")[0] in _ELSEWHERE:
                    continue
                return self._rejected(RequestFault(f"{path}: {self._pipeline.why_missing(name)}"))
            try:
                type_ = prepared_type(type(runner.processor))
                arguments[name] = typed.convert(plain, type_, path=path)
            except HardpointError as cause:
                return self._rejected(RequestFault(str(cause), name))
            except BaseException as cause:
                return self._rejected(runner.fault("Arguments", cause))
        if self.states_key:
            arguments[self._key] = sampler_arguments
        return ReadOnlyDict(arguments), sampler_arguments, None

    def _rejected(self, fault: RequestFault) -> Converted:
        return ReadOnlyDict(), self.defaults, fault


def open_runner(
    spec: WorkerSpec, entry: PluginEntry, ops: Ops, activity: Activity, since: int = 0
) -> ProcessorRunner:
    """Build a logits processor, which requests of a generation of the plugins and later ones use.

    Raises:
        PluginError: it cannot be built.
    """
    max_rows = spec.config.scheduler.max_num_seqs
    build = functools.partial(
        spec.plugins.create,
        entry,
        LogitsContext,
        device=spec.device,
        vocab_size=spec.model_config.vocab_size,
        max_num_seqs=max_rows,
        ops=ops,
        max_model_len=spec.max_model_len,
        model=str(spec.loader.context.files.path),
        tokenizer=spec.config.tokenizer.path or "",
    )
    return ProcessorRunner(
        build(),
        entry.source,
        spec.device,
        max_rows,
        ends_engine=spec.config.plugins.on_error.get(entry.name) == "engine",
        rebuild=build,
        activity=activity,
        slow_seconds=spec.config.plugins.slow_seconds,
        since=since,
    )


def open_states(
    spec: WorkerSpec, sampler: Sampler, source: Source, activity: Activity
) -> ProcessorRunner | None:
    """Return the runner of the states of a sampler; None if it has none."""
    states = sampler_states(sampler, argument_key("samplers", sampler.name))
    if states is None:
        return None
    rows = spec.config.scheduler.max_num_seqs
    return ProcessorRunner(states, source, spec.device, rows, activity=activity)


def processor_changes(
    pipeline: LogitsPipeline, spec: WorkerSpec, ops: Ops, activity: Activity
) -> generations.GenerationChanges[ProcessorRunner]:
    """Return the live changes of the processors of a pipeline."""

    def build(plugins: PluginSet, entry: PluginEntry, change: LiveChange) -> ProcessorRunner:
        new = dataclasses.replace(spec, plugins=plugins, config=change.config)
        runner = open_runner(new, entry, ops, activity, change.manifest.generation)
        if spec.num_draft_tokens:
            LogitsPipeline([runner], spec.device).check_drafts()
        return runner

    return generations.processor_changes(
        spec.plugins, lambda: pipeline.runners, pipeline.use, build
    )
