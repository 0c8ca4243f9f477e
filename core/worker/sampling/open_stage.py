"""Builds the sampling stage of a worker from the enabled logits processors and the sampler."""

from __future__ import annotations

import functools

from hardpoint.boundary.activity import Activity, PluginCalls
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.plugins import LogitsContext, Ops, SamplerContext

from .observed_states import ObservedStates
from .pipeline import LogitsPipeline
from .processor_runner import ProcessorRunner
from .sampling_stage import SamplingStage


def open_stage(
    spec: WorkerSpec, ops: Ops, activity: Activity, observed_states: ObservedStates
) -> SamplingStage:
    """Build the logits processors and the sampler of a worker.

    Args:
        spec: spec of the worker.
        ops: operations of the model.
        activity: records the methods of plugins that run.
        observed_states: states of logits processors of an earlier model.

    Raises:
        PluginError: one cannot be built.
    """
    vocab_size = spec.model_config.vocab_size
    slow_seconds = spec.config.plugins.slow_seconds
    runners = []
    for entry in spec.plugins.entries("logits_processors"):
        build = functools.partial(
            spec.plugins.create,
            entry,
            LogitsContext,
            device=spec.device,
            vocab_size=vocab_size,
            max_num_seqs=spec.config.scheduler.max_num_seqs,
            ops=ops,
        )
        runners.append(
            ProcessorRunner(
                build(),
                entry.source,
                spec.device,
                spec.config.scheduler.max_num_seqs,
                ends_engine=spec.config.plugins.on_error.get(entry.name) == "engine",
                rebuild=build,
                activity=activity,
                slow_seconds=slow_seconds,
            )
        )
    entry = spec.plugins.one("samplers")
    sampler = spec.plugins.create(
        entry, SamplerContext, device=spec.device, vocab_size=vocab_size, ops=ops
    )
    pipeline = LogitsPipeline(runners, spec.device, observed_states)
    if spec.num_draft_tokens:
        pipeline.check_drafts()
    return SamplingStage(
        pipeline,
        sampler,
        spec.device,
        processed_logprobs=spec.config.sampler.logprobs == "processed",
        calls=PluginCalls(activity, "samplers", entry.source),
    )
