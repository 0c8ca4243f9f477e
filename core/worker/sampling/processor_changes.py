"""Live changes of the logits processors of a worker."""

from __future__ import annotations

import dataclasses

from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.logits.processor_runner import ProcessorRunner
from hardpoint.host.live import generations
from hardpoint.host.live.change import LiveChange
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import Ops
from hardpoint.plugins.component.manifest import PluginEntry

from .pipeline import LogitsPipeline
from .sampling_stage import SamplingStage, open_runner


def processor_changes(
    stage: SamplingStage, spec: WorkerSpec, ops: Ops, activity: Activity
) -> generations.GenerationChanges[ProcessorRunner]:
    """Return the live changes of the processors of a stage."""

    def build(plugins: PluginSet, entry: PluginEntry, change: LiveChange) -> ProcessorRunner:
        new = dataclasses.replace(spec, plugins=plugins, config=change.config)
        runner = open_runner(new, entry, ops, activity, change.manifest.generation)
        if spec.num_draft_tokens:
            LogitsPipeline([runner], spec.device).check_drafts()
        return runner

    pipeline = stage.pipeline
    return generations.processor_changes(
        spec.plugins, lambda: pipeline.runners, pipeline.use, build
    )
