"""What a client may call on an engine core by name, with arguments of the declared types."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from hardpoint.plugins import HardpointError, typed

from .engine import EngineCore
from .error_kinds import kind_of
from .wire import UtilityCall, UtilityOutput, WireError

__all__ = ["UTILITIES", "call_utility", "failed_call", "result_type"]

UTILITIES = frozenset(
    {
        "plugin_meters",
        "reset_prefix_cache",
        "scheduler_stats",
        "set_policy",
        "step_faults",
        "why_waiting",
    }
)
"""Methods of EngineCore; nothing else can be called."""


def call_utility(core: EngineCore, call: UtilityCall) -> UtilityOutput:
    """Make a call; whatever goes wrong is told to the caller and harms nobody else."""
    try:
        arguments = _arguments(call)
        result = getattr(core, call.method)(*arguments)
    except Exception as error:
        return failed_call(call, error)
    return UtilityOutput.succeeded(call.call_id, result)


def failed_call(call: UtilityCall, error: BaseException) -> UtilityOutput:
    """Return the answer to a call that raised; errors of Hardpoint's tree keep class and words."""
    kind, words = kind_of(error), str(error)
    if kind == HardpointError.__name__:
        words = f"Call to {call.method} method failed: {type(error).__name__}: {error}"
    return UtilityOutput.failed(call.call_id, words, kind)


@functools.cache
def result_type(method: str) -> Any:
    """Return what a utility declares to return."""
    return typing.get_type_hints(getattr(EngineCore, method))["return"]


def _arguments(call: UtilityCall) -> list[Any]:
    """Return a call's arguments as the method declares them.

    Raises:
        WireError: the method cannot be called, or its arguments are wrong.
    """
    if call.method not in UTILITIES:
        raise WireError(f"expected one of {', '.join(sorted(UTILITIES))}")
    types = _parameter_types(call.method)
    if len(call.args) > len(types):
        raise WireError(f"expected at most {len(types)} arguments, got {len(call.args)}")
    return [
        typed.convert(value, type_, path=name, error=WireError)
        for value, (name, type_) in zip(call.args, types.items(), strict=False)
    ]


@functools.cache
def _parameter_types(method: str) -> Mapping[str, Any]:
    function = getattr(EngineCore, method)
    hints = typing.get_type_hints(function)
    return {name: hints[name] for name in inspect.signature(function).parameters if name != "self"}
