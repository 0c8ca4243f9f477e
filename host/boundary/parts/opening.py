"""Opens the halves of all enabled step parts, in the engine and in a worker."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins.component import Source
from hardpoint.plugins.step_part import EngineHalfContext, StepPart
from hardpoint.plugins.step_part.engine_hooks import EngineHooks
from hardpoint.plugins.step_part.worker_hooks import WorkerHooks
from hardpoint.plugins.worker_half import WorkerHalfContext

from .bound_half import BoundPart, BoundWorkerHalf, opener
from .calls import PartCalls
from .engine_halves import EngineHalves
from .returns import limit_defect
from .worker_parts import WorkerParts

ContextT = TypeVar("ContextT", EngineHalfContext, WorkerHalfContext)


def open_parts(
    plugins: PluginSet, about: Mapping[str, Any], context: EngineHalfContext, faults: StepFaults
) -> EngineHalves:
    """Build the engine's halves of all enabled parts, in their order.

    Args:
        about: fields of the context of the parts.
        faults: counts the faults of scope *step*.

    Raises:
        PluginError: one cannot be built; the others are closed.
    """
    calls = PartCalls()

    def context_of(part: StepPart, plugins: PluginSet) -> EngineHalfContext:
        return dataclasses.replace(
            _with_components(context, plugins),
            call_workers=functools.partial(calls.to_workers, part),
            why_waiting=lambda request_id: halves.why_waiting(request_id),
            can_release_blocks=part.releases_blocks,
        )

    def bind(part: StepPart, half: EngineHooks, source: Source) -> BoundPart:
        bound = BoundPart(part, half, source, faults)
        if (defect := limit_defect(bound.num_draft_tokens)) is not None:
            raise PluginFaultError(f"{source}: its {defect}")
        return bound

    open_halves = opener(about, context_of, BoundPart, bind)
    parts = open_halves(plugins, plugins.entries("step_parts"), about["config"])
    halves = EngineHalves(parts, context.vocab_size, calls)
    halves.open = open_halves
    return halves


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
        about: fields of the context of the parts.
        samples: whether this rank gives the result of a step.

    Raises:
        PluginError: one cannot be built; the others are closed.
    """

    def context_of(_part: StepPart, plugins: PluginSet) -> WorkerHalfContext:
        return _with_components(context, plugins)

    def bind(part: StepPart, half: WorkerHooks, source: Source) -> BoundWorkerHalf:
        return BoundWorkerHalf(part, half, PluginCalls(activity, "step_parts", source))

    open_halves = opener(about, context_of, BoundWorkerHalf, bind)
    halves = open_halves(plugins, plugins.entries("step_parts"), about["config"])
    parts = WorkerParts(halves, rank=context.rank, samples=samples)
    parts.open = open_halves
    return parts


def _with_components(context: ContextT, plugins: PluginSet) -> ContextT:
    """Return a context with the components of a generation of the plugins."""
    components: Any = context.components
    return dataclasses.replace(context, components=components.of(plugins))
