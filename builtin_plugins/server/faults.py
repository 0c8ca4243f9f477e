"""Faults of plugins in a server: one request is answered with 500, and the plugin is named."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hardpoint.errors import (
    EngineClosedError,
    EngineDeadError,
    EnginePausedError,
    EngineTimeoutError,
    PluginFaultError,
)
from hardpoint.plugins import RequestError
from hardpoint.typed import reason_of

from .errors import AnswerError, plugin_fault
from .heads import fault_of_refusal
from .streaming import ClientGoneError

_log = logging.getLogger("hardpoint")

T = TypeVar("T")


class BrokenContractError(Exception):
    """An extension broke a rule; the text is the server's own, so clients may read it."""


class BlamedError(AnswerError):
    """The answer to a request that a plugin ended; the fault is counted and logged."""


class AnswerCutError(Exception):
    """An answer has begun and cannot go on; why is logged, and the connection ends."""


_PASSED = (
    AnswerCutError,
    AnswerError,
    ClientGoneError,
    EngineClosedError,
    EngineDeadError,
    EnginePausedError,
    EngineTimeoutError,
    PluginFaultError,
    KeyboardInterrupt,
    GeneratorExit,
)
"""Errors that are of the server or the engine, wherever they come out."""


@dataclass(frozen=True)
class Owned:
    """An extension's part and the plugin that it is of."""

    plugin: str
    source: str
    part: Any


@dataclass
class ServerFaults:
    """Blames plugins for what their extensions raise.

    Attributes:
        seconds: maximum time of a call of a transform or authenticator.
        counts: requests that each plugin's extensions ended.
    """

    seconds: float = 10.0
    counts: Counter[str] = field(default_factory=Counter)

    def blame(self, owned: Owned, what: str, cause: BaseException) -> BlamedError:
        """Count a fault, log it, and return the answer to the request."""
        self.counts[owned.plugin] += 1
        known = isinstance(cause, BrokenContractError)
        reason = str(cause) if known else reason_of(cause)
        _log.error(
            "%s: its %s failed: %s", owned.source, what, reason, exc_info=None if known else cause
        )
        # Nothing of a stranger's text goes to clients: it may hold anything.
        shown = reason if known else type(cause).__name__
        answer = plugin_fault(f"{owned.source}: its {what} failed: {shown}")
        detail = answer.detail
        return BlamedError(answer.status, detail.message, kind=detail.type, headers=answer.headers)

    def passed(
        self, owned: Owned, what: str, cause: BaseException, *, may_refuse: bool = False
    ) -> BaseException:
        """Return the error to raise for one that left an extension: itself, if it is no fault.

        Args:
            may_refuse: whether it may refuse the request.
        """
        if isinstance(cause, ClientDisconnect):
            return ClientGoneError()
        if may_refuse and _is_refusal(cause):
            wrong = None
            if isinstance(cause, HTTPException):
                wrong = fault_of_refusal(cause.status_code, cause.headers, cause.detail)
            return cause if wrong is None else self.blame(owned, what, BrokenContractError(wrong))
        if isinstance(cause, _PASSED):
            return cause
        task = asyncio.current_task()
        if isinstance(cause, asyncio.CancelledError) and task is not None and task.cancelling():
            return cause
        return self.blame(owned, what, cause)

    async def run(
        self,
        owned: Owned,
        what: str,
        function: Callable[..., Awaitable[T]],
        *arguments: Any,
        may_refuse: bool = False,
    ) -> T:
        """Return the result of an extension's call; arguments are those of `passed`.

        Raises:
            BlamedError: it failed, or took too long.
            RequestError, HTTPException: it refused the request.
        """
        limit = asyncio.timeout(self.seconds)
        try:
            async with limit:
                return await function(*arguments)
        except BaseException as raised:
            cause = self.too_slow() if limit.expired() else raised
            raise self.passed(owned, what, cause, may_refuse=may_refuse) from None

    def too_slow(self) -> BrokenContractError:
        """Return the error of an extension that took too long."""
        return BrokenContractError(
            f"it took more than {self.seconds:g} s (server.extension_seconds)"
        )


def _is_refusal(error: BaseException) -> bool:
    """Return whether an error is how an extension refuses a request."""
    if isinstance(error, HTTPException):
        return not isinstance(error.status_code, int) or error.status_code >= 400
    return isinstance(error, RequestError)
