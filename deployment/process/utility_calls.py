"""Utility calls as messages: how an engine process runs and answers them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from hardpoint.core.engine.utility_calls import EngineUtilities, failure_of, run_utility
from hardpoint.host.boundary.errors import kind_of
from hardpoint.host.registry.blame import raise_unless_fault

from .messages import UtilityCall, UtilityOutput

Answer = Callable[[UtilityOutput], None]
"""Takes the answer to a call, in any thread."""


def call_utility(core: EngineUtilities, call: UtilityCall, answer: Answer) -> None:
    """Make a call; an error fails the call alone.

    A future is answered when it is done, as is one that another future gives as its result.
    """
    _answer(call, partial(run_utility, core, call.method, call.args), answer)


def failed_call(call: UtilityCall, error: BaseException) -> UtilityOutput:
    """Return the answer to a call that raised."""
    reported = failure_of(call.method, error)
    return UtilityOutput.failed(call.call_id, str(reported), kind_of(reported))


def _answer(call: UtilityCall, made: Callable[[], Any], answer: Answer) -> None:
    try:
        result = made()
    except BaseException as error:
        raise_unless_fault(error)
        answer(failed_call(call, error))
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda future: _answer(call, future.result, answer))
    else:
        answer(UtilityOutput.succeeded(call.call_id, result))
