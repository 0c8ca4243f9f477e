"""Opens the halves of all enabled step parts, in the engine and in a worker."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.scheduling.step_record import WaitReason
from hardpoint.plugins.step_part import EngineHalfContext, StepPart
from hardpoint.plugins.step_part.engine_hooks import EngineHooks
from hardpoint.plugins.step_part.part import FrontendHalfContext
from hardpoint.plugins.step_part.worker_hooks import WorkerHooks
from hardpoint.plugins.worker_half import WorkerHalfContext

from .bound_half import BoundPart, BoundT, BoundWorkerHalf, OpenHalves, open_halves
from .calls import PartCalls
from .engine_halves import EngineHalves
from .returns import limit_defect
from .worker_parts import WorkerParts

ContextT = TypeVar("ContextT", FrontendHalfContext, EngineHalfContext, WorkerHalfContext)


def open_parts(
    plugins: PluginSet, about: Mapping[str, Any], context: EngineHalfContext, faults: StepFaults
) -> EngineHalves:
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
    opened: list[EngineHalves] = []

    def why_waiting(request_id: str) -> WaitReason | None:
        return opened[0].why_waiting(request_id)

    def context_of(context: EngineHalfContext) -> Callable[[StepPart], EngineHalfContext]:
        def own(part: StepPart) -> EngineHalfContext:
            call = functools.partial(calls.to_workers, part)
            releases = part.releases_blocks
            return dataclasses.replace(
                context, call_workers=call, why_waiting=why_waiting, can_release_blocks=releases
            )

        return own

    def bind(part: StepPart, half: EngineHooks, source: Source) -> BoundPart:
        bound = BoundPart(part, half, source, faults)
        if (defect := limit_defect(bound.num_draft_tokens)) is not None:
            raise PluginFaultError(f"{source}: its {defect}")
        return bound

    entries = plugins.entries("step_parts")
    parts = open_halves(plugins, entries, about, context_of(context), BoundPart, bind)
    opened.append(EngineHalves(parts, context.vocab_size, calls))
    opened[0].open = opening(about, context, context_of, BoundPart, bind)
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
        samples: whether this rank gives the result of a step.

    Raises:
        PluginError: one cannot be built; the others are closed.
    """

    def bind(part: StepPart, half: WorkerHooks, source: Source) -> BoundWorkerHalf:
        return BoundWorkerHalf(part, half, PluginCalls(activity, "step_parts", source))

    entries = plugins.entries("step_parts")
    halves = open_halves(plugins, entries, about, lambda _part: context, BoundWorkerHalf, bind)
    parts = WorkerParts(halves, rank=context.rank, samples=samples)
    parts.open = opening(about, context, lambda new: lambda _part: new, BoundWorkerHalf, bind)
    return parts


def opening(
    about: Mapping[str, Any],
    context: ContextT,
    context_of: Callable[[ContextT], Callable[[StepPart], ContextT]],
    cls: type[BoundT],
    bind: Callable[[StepPart, Any, Source], BoundT],
) -> OpenHalves[BoundT]:
    """Return the function that opens halves for a live change, as at the start.

    Args:
        about: fields of the context of the parts.
        context: context of the halves, which gets the components of the change.
        context_of: returns, for a context, the function that returns the one of a part's half.
        cls: class that calls a half.
        bind: see `open_halves`.
    """

    def open_new(
        plugins: PluginSet, entries: Sequence[PluginEntry], config: EngineConfig
    ) -> list[BoundT]:
        components: Any = context.components
        new = dataclasses.replace(context, components=components.of(plugins))
        fields = {**about, "config": config}
        return open_halves(plugins, entries, fields, context_of(new), cls, bind)

    return open_new
