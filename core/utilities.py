"""What a client may call on an engine core by name, with arguments of the declared types."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from hardpoint.plugins import HardpointError

from .engine import EngineCore
from .error_kinds import kind_of
from .typed_calls import convert_arguments, returned_type
from .wire import UtilityCall, UtilityOutput, WireError

__all__ = ["UTILITIES", "Answer", "call_utility", "failed_call", "result_type"]

UTILITIES = frozenset(
    {
        "add_lora",
        "collective_rpc",
        "is_paused",
        "is_sleeping",
        "list_loras",
        "pause",
        "pin_lora",
        "plugin_meters",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
        "resume",
        "scheduler_stats",
        "set_policy",
        "sleep",
        "start_profile",
        "step_faults",
        "stop_profile",
        "wake_up",
        "why_waiting",
    }
)
"""Methods of EngineCore; nothing else can be called."""

Answer = Callable[[UtilityOutput], None]
"""Takes the answer to a call, in whatever thread it was found."""


def call_utility(core: EngineCore, call: UtilityCall, answer: Answer) -> None:
    """Make a call; whatever goes wrong is told to the caller and harms nobody else.

    A future is answered when it is done, and so is one that is another one's result.
    """
    try:
        if call.method not in UTILITIES:
            raise WireError(f"expected one of {', '.join(sorted(UTILITIES))}")
        arguments = convert_arguments(getattr(EngineCore, call.method), call.args, WireError)
        result = getattr(core, call.method)(*arguments)
    except Exception as error:
        answer(failed_call(call, error))
    else:
        _answer(call, result, answer)


def failed_call(call: UtilityCall, error: BaseException) -> UtilityOutput:
    """Return the answer to a call that raised; errors of Hardpoint's tree keep class and words."""
    kind, words = kind_of(error), str(error)
    if kind == HardpointError.__name__:
        words = f"Call to {call.method} method failed: {type(error).__name__}: {error}"
    return UtilityOutput.failed(call.call_id, words, kind)


def result_type(method: str) -> Any:
    """Return what a utility declares to return, or what its future gives."""
    return returned_type(getattr(EngineCore, method))


def _answer(call: UtilityCall, result: Any, answer: Answer) -> None:
    if isinstance(result, Future):
        result.add_done_callback(lambda future: _answer_of(call, future, answer))
    else:
        answer(UtilityOutput.succeeded(call.call_id, result))


def _answer_of(call: UtilityCall, future: Future[Any], answer: Answer) -> None:
    try:
        result = future.result()
    except (Exception, CancelledError) as error:
        answer(failed_call(call, error))
    else:
        _answer(call, result, answer)
