"""The effect of a step part: results of its methods, and the methods that it overrides."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from hardpoint.host.boundary.parts.hooks import (
    ENGINE_HOOKS,
    FRONTEND_HOOKS,
    WORKER_HOOKS,
    selects,
)
from hardpoint.plugins import (
    EngineCoreRequest,
    EngineHalf,
    FrontendHalf,
    RequestError,
    StepPart,
    WorkerHalf,
)
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Rule

__all__ = ["EFFECT", "NO_METHODS", "check_overrides", "completes", "not_observed", "overridden"]

NO_METHODS = "no half has a method of its own"
"""In the observation of a part that does nothing."""

_WITHOUT_EFFECT = ("close", "ended", "refused", "for_fields", "for_parameters")
"""Members that do nothing for requests."""

EFFECT = Rule(
    "effect: the part does something",
    "implement hooks, such as the hooks of RequestFilter, WorkerStep or FrontendHalf, and return "
    "the half from engine_half(), worker_half() or frontend_half()",
)


def overridden(
    frontend: FrontendHalf | None, engine: EngineHalf | None, worker: WorkerHalf | None
) -> list[str]:
    """Return the names of the hooks of halves, except hooks that only drop data."""
    halves = ((FRONTEND_HOOKS, frontend), (ENGINE_HOOKS, engine), (WORKER_HOOKS, worker))
    hook_names = [
        name
        for hooks, half in halves
        if half is not None
        for name in sorted(hooks.implemented(half))
    ]
    return [name for name in dict.fromkeys(hook_names) if name not in _WITHOUT_EFFECT]


def check_overrides(part: type[StepPart], methods: Sequence[str]) -> None:
    """Check that the halves of a part can do anything.

    Args:
        part: class of the part.
        methods: names of the members that its halves override.

    Raises:
        Violation: they cannot.
    """
    class_methods = ("request_fields", "merge_answers")
    if not methods and all(
        getattr(part, name).__func__ is getattr(StepPart, name).__func__ for name in class_methods
    ):
        raise EFFECT.violation(f"{NO_METHODS}, expected a part with an effect on requests")


def completes(half: FrontendHalf, requests: Sequence[EngineCoreRequest]) -> bool:
    """Return whether a half completes or refuses one of some requests."""
    for request in requests:
        if not selects(half, request):
            continue
        request_copy = copy.deepcopy(request)
        try:
            half.prepare(request_copy, None)
            if any(half.members(request_copy, args) for args in request_copy.plugin_args.values()):
                return True
        except RequestError:
            return True
        if snapshot(request_copy) != snapshot(request) or half.reads_answer(request_copy):
            return True
        if half.output_format(request_copy, None) is not None:
            return True
    return False


def not_observed(methods: Sequence[str]) -> str:
    """Return why the effect of a part with some methods is not proved."""
    if not methods:
        return "undecidable without a model: the part has no half"
    return (
        f"undecidable with these requests: none of {', '.join(methods)} returned anything to the "
        f"engine, or changed a request or a row; a log, a file or a server is not looked at"
    )
