"""Builds the worker halves of the enabled step parts, for a model that is loaded."""

from __future__ import annotations

import contextlib
import functools

import torch

from hardpoint.boundary.activity import Activity, PluginCalls
from hardpoint.boundary.bound_half import BoundWorkerHalf
from hardpoint.boundary.step_part_components import Components, describe_fault
from hardpoint.boundary.worker_parts import WorkerParts, opened_half
from hardpoint.core.weights.planned_model import PlannedModel
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.plugins import Ops
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.step_part import StepPartContext
from hardpoint.plugins.worker_half import LoadedModel, WorkerHalfContext
from hardpoint.system.memory import memory_limit

from .padded_trial import decode_bytes


def open_worker_parts(
    spec: WorkerSpec, planned: PlannedModel, ops: Ops, parallel: Parallel, activity: Activity
) -> WorkerParts:
    """Build the worker halves of the step parts.

    Args:
        spec: spec of the worker.
        planned: the model, whose weights are loaded and which has run a trial step.
        ops: operations of the model.
        parallel: the rank's place among the others.
        activity: records the methods of plugins that run.

    Raises:
        PluginError: one cannot be built, or changes layers that the model does not let it change;
            all are closed.
    """
    context = WorkerHalfContext(
        device=spec.device,
        rank=spec.rank,
        world_size=spec.config.parallel.world_size,
        vocab_size=spec.model_config.vocab_size,
        hidden_size=planned.model.hidden_size,
        components=Components(spec.plugins, functools.partial(PluginCalls, activity)),
        describe_fault=describe_fault,
        host_memory=lambda: memory_limit(torch.device("cpu")).available,
        loaded=_loaded_model(spec, planned, ops),
    )
    bound: list[BoundWorkerHalf] = []
    with contextlib.ExitStack() as undo:
        for entry in spec.plugins.entries("step_parts"):
            part = spec.plugins.create(entry, StepPartContext, config=spec.config)
            calls = PluginCalls(activity, "step_parts", entry.source)
            if (half := opened_half(part, context, entry.source)) is None:
                part.close()
                continue
            bound.append(BoundWorkerHalf(part, half, calls))
            undo.callback(bound[-1].close)
        parts = WorkerParts(
            bound, rank=spec.rank, samples=spec.rank == spec.config.parallel.output_rank
        )
        parts.check_hooks(planned.checked, parallel)
        undo.pop_all()
    return parts


def _loaded_model(spec: WorkerSpec, planned: PlannedModel, ops: Ops) -> LoadedModel:
    """Return the model as step parts get it."""
    model, attention = planned.checked, planned.attention
    measure = functools.partial(
        decode_bytes,
        model,
        attention,
        spec.device,
        spec.max_model_len,
        spec.config.kv_cache.block_size,
    )
    return LoadedModel(
        model=model,
        ops=ops,
        ops_source=spec.plugins.one("ops").source,
        attention=attention,
        max_model_len=spec.max_model_len,
        decode_bytes=measure,
    )
