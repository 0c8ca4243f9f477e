"""Live changes of the logits processors of a worker."""

from __future__ import annotations

import dataclasses

from hardpoint.boundary.activity import Activity
from hardpoint.boundary.parts.states import States, states_of
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.live.change import Change
from hardpoint.live.engine import WorkerChanges
from hardpoint.live.processors import ProcessorChanges
from hardpoint.plugins import Ops
from hardpoint.plugins.manifest import PluginEntry
from hardpoint.registry.plugin_set import PluginSet

from .pipeline import LogitsPipeline
from .processor_runner import ProcessorRunner
from .sampling_stage import SamplingStage, open_runner


class StageChanges(WorkerChanges):
    """The live changes of a worker: those of its logits processors, which it closes."""

    _processors: ProcessorChanges[ProcessorRunner] | None = None
    _plugins: PluginSet | None = None

    def open(
        self, stage: SamplingStage | None, spec: WorkerSpec, ops: Ops, activity: Activity
    ) -> None:
        """Change the processors of a stage; a rank that does not sample has none."""

        def build(plugins: PluginSet, entry: PluginEntry, change: Change) -> ProcessorRunner:
            new = dataclasses.replace(spec, plugins=plugins, config=change.config)
            runner = open_runner(new, entry, ops, activity, change.manifest.generation)
            if spec.num_draft_tokens:
                LogitsPipeline([runner], spec.device).check_drafts()
            return runner

        if stage is not None:
            self._processors = ProcessorChanges(stage.pipeline, spec.plugins, build)
        self.use([] if self._processors is None else [self._processors])

    def states(self) -> States:
        """Return the states of the processors of the latest generation."""
        runners = () if self._processors is None else self._processors.pipeline.runners
        return states_of([runner.processor for runner in runners if runner.until is None])

    def latest(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec of a worker with the latest plugins, to load the model again."""
        return dataclasses.replace(spec, plugins=self._plugins) if self._plugins else spec

    def close(self) -> None:
        """Close the processors; the model is released."""
        processors, self._processors = self._processors, None
        self.use(None)
        if processors is not None:
            self._plugins = processors.plugins
            processors.close()
