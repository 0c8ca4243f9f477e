"""What a client may call on an engine core by name, with arguments of the declared types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from hardpoint.core.errors import kind_of
from hardpoint.core.wire import UtilityCall, UtilityOutput, WireError
from hardpoint.plugins import HardpointError, RequestError, typed

from .core import EngineCore
from .worker_calls import convert_arguments, returned_type

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
        "supported_tasks",
        "wake_up",
        "why_waiting",
    }
)
"""Methods of EngineCore; nothing else can be called."""

UNHURRIED = frozenset({"add_lora", "collective_rpc", "pause", "sleep", "stop_profile", "wake_up"})
"""Those that may rightly take as long as requests or workers do; no limit is set on them."""

Answer = Callable[[UtilityOutput], None]
"""Takes the answer to a call, in whatever thread it was found."""


def call_utility(core: EngineCore, call: UtilityCall, answer: Answer) -> None:
    """Make a call; whatever goes wrong is told to the caller and harms nobody else.

    A future is answered when it is done, and so is one that is another one's result.
    """
    try:
        result = run_utility(core, call.method, call.args)
    except Exception as error:
        answer(failed_call(call, error))
    else:
        _answer(call, result, answer)


def run_utility(core: EngineCore, method: str, arguments: Sequence[Any]) -> Any:
    """Call a method; return its result, which may be a future.

    Raises:
        RequestError: it is none of `UTILITIES`, or the arguments are not what it declares.
        Exception: whatever the method raises.
    """
    if method not in UTILITIES:
        known = sorted(UTILITIES)
        raise RequestError(
            f"method: expected one of {', '.join(known)}, got {method!r}"
            f"{typed.suggest(method, known)}"
        )
    converted = convert_arguments(getattr(EngineCore, method), arguments, RequestError)
    return getattr(core, method)(*converted)


def failed_call(call: UtilityCall, error: BaseException) -> UtilityOutput:
    """Return the answer to a call that raised."""
    told = failure_of(call.method, error)
    return UtilityOutput.failed(call.call_id, str(told), kind_of(told))


def failure_of(method: str, error: BaseException) -> HardpointError:
    """Return what a caller is told of an error: those of Hardpoint's tree as they are.

    A call that cannot be read is a wrong request.
    """
    if isinstance(error, HardpointError) and not isinstance(error, WireError):
        return error
    kind = RequestError if isinstance(error, WireError) else HardpointError
    told = kind(f"Call to {method} method failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


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
