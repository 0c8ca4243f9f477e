"""Opens the halves of all enabled step parts, in the engine and in a worker."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from hardpoint.boundary.activity import Activity, PluginCalls
from hardpoint.boundary.faults import StepFaults
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import WorkerHalf
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.step_part import EngineHalf, EngineHalfContext, StepPart
from hardpoint.plugins.step_record import WaitReason
from hardpoint.plugins.worker_half import WorkerHalfContext
from hardpoint.registry.plugin_set import PluginSet

from .bound_half import BoundPart, BoundWorkerHalf, open_halves
from .calls import PartCalls
from .engine_parts import EngineParts
from .returns import limit_defect
from .worker_parts import WorkerParts


def open_parts(
    plugins: PluginSet, about: Mapping[str, Any], context: EngineHalfContext, faults: StepFaults
) -> EngineParts:
    """Build the engine's halves of all enabled parts, in their order.

    Args:
        plugins: the enabled plugins.
        about: fields of the context of the parts.
        context: context of the halves.
        faults: counts the faults of scope *step*.

    Raises:
        PluginError: one cannot be built; the others are closed.
    """
    calls = PartCalls()
    opened: list[EngineParts] = []

    def why_waiting(request_id: str) -> WaitReason | None:
        return opened[0].why_waiting(request_id)

    def context_of(part: StepPart) -> EngineHalfContext:
        call = functools.partial(calls.to_workers, part.name)
        return dataclasses.replace(context, call_workers=call, why_waiting=why_waiting)

    def bind(part: StepPart, half: EngineHalf, source: Source) -> BoundPart:
        if (defect := limit_defect(half.num_draft_tokens)) is not None:
            raise PluginFaultError(f"{source}: its {defect}")
        return BoundPart(part, half, source, faults)

    entries = plugins.entries("step_parts")
    parts = open_halves(plugins, entries, about, context_of, BoundPart, bind)
    opened.append(EngineParts(parts, context.vocab_size, calls))
    return opened[0]


def open_worker_parts(
    plugins: PluginSet,
    about: Mapping[str, Any],
    context: WorkerHalfContext,
    activity: Activity,
    *,
    samples: bool,
) -> WorkerParts:
    """Build the worker halves of all enabled parts, in their order.

    Args:
        plugins: the enabled plugins.
        about: fields of the context of the parts.
        context: context of the halves.
        activity: records the methods that run.
        samples: whether the result of a step is that of this rank.

    Raises:
        PluginError: one cannot be built; the others are closed.
    """

    def bind(part: StepPart, half: WorkerHalf, source: Source) -> BoundWorkerHalf:
        return BoundWorkerHalf(part, half, PluginCalls(activity, "step_parts", source))

    entries = plugins.entries("step_parts")
    halves = open_halves(plugins, entries, about, lambda _part: context, BoundWorkerHalf, bind)
    return WorkerParts(halves, rank=context.rank, samples=samples)
