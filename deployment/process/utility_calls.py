"""Utility calls as messages: how an engine process runs them, and how a client waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from hardpoint.core.engine.utility_calls import UTILITIES, EngineUtilities, failure_of, run_utility
from hardpoint.host.boundary.errors import kind_of
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.system.control_calls import utilities_of

from .cache_changes import CacheReports
from .protocol import UtilityCall, UtilityOutput

NO_TIMEOUT = frozenset(name for name, entry in UTILITIES.items() if not entry.has_timeout)
"""Calls that `engine.call_timeout_seconds` does not limit."""

_REPORTS = utilities_of(CacheReports)

Answer = Callable[[UtilityOutput], None]
"""Takes the answer to a call, in any thread."""


def result_type(method: str) -> Any:
    """Return the declared result type of a utility; of a future, the type of its result."""
    declared = UTILITIES.get(method) or _REPORTS.get(method)
    return Any if declared is None else declared.result_type


def call_utility(
    core: EngineUtilities, reports: CacheReports, call: UtilityCall, answer: Answer
) -> None:
    """Make a call; an error fails the call alone.

    A future is answered when it is done, as is one that another future gives as its result.
    """
    run = partial(run_utility, core, call.method)
    if (declared := _REPORTS.get(call.method)) is not None:
        run = partial(declared.run_on, reports)
    _answer(call, partial(run, call.args), answer)


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
