"""Faults of plugins in a server: one request is answered with 500, and the plugin is named."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect

from hardpoint.errors import (
    EngineClosedError,
    EngineDeadError,
    EnginePausedError,
    EngineTimeoutError,
    PluginFaultError,
)
from hardpoint.plugins import RequestError
from hardpoint.toolkit.http_heads import fault_of_refusal
from hardpoint.typed import reason_of

from .access.counts import Counts
from .errors import AnswerError, plugin_fault
from .streaming import ClientGoneError
from .timing import Timed

_log = logging.getLogger("hardpoint")

T = TypeVar("T")

_FAULTS = "faults of "


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
    """Blames plugins for the errors of their extensions.

    Attributes:
        seconds: maximum time of a call of an extension.
        slow_seconds: time above which an extension that blocks the event loop is reported; 0 is
            never.
        shared: counts of the server, which have those of `counts`.
        slow: the latest report of each plugin that blocked the event loop.
    """

    seconds: float = 10.0
    slow_seconds: float = 1.0
    shared: Counts = field(default_factory=Counts)
    slow: dict[str, str] = field(default_factory=dict)
    _reported: set[tuple[str, str]] = field(default_factory=set)

    @property
    def counts(self) -> Counter[str]:
        """The requests that each plugin's extensions ended."""
        return Counter(dict(self.shared.items(_FAULTS)))

    def count(self, plugin: str) -> None:
        """Count a request that an extension of a plugin ended."""
        self.shared.add(_FAULTS + plugin)

    def blame(self, owned: Owned, part: str, cause: BaseException) -> BlamedError:
        """Count a fault, log it, and return the answer to the request."""
        self.count(owned.plugin)
        known = isinstance(cause, BrokenContractError)
        reason = str(cause) if known else reason_of(cause)
        _log.error(
            "%s: its %s failed: %s", owned.source, part, reason, exc_info=None if known else cause
        )
        # Nothing of a stranger's text goes to clients: it may hold anything.
        shown = reason if known else type(cause).__name__
        answer = plugin_fault(f"{owned.source}: its {part} failed: {shown}")
        detail = answer.detail
        return BlamedError(answer.status, detail.message, kind=detail.type, headers=answer.headers)

    def passed(
        self, owned: Owned, part: str, cause: BaseException, *, may_refuse: bool = False
    ) -> BaseException:
        """Return the error to raise for an error of an extension: the same one if it is no fault.

        Args:
            may_refuse: whether it may refuse the request.
        """
        if isinstance(cause, ClientDisconnect | WebSocketDisconnect):
            return ClientGoneError()
        if may_refuse and _is_refusal(cause):
            wrong = None
            if isinstance(cause, HTTPException):
                wrong = fault_of_refusal(cause.status_code, cause.headers, cause.detail)
            return cause if wrong is None else self.blame(owned, part, BrokenContractError(wrong))
        if isinstance(cause, _PASSED):
            return cause
        task = asyncio.current_task()
        if isinstance(cause, asyncio.CancelledError) and task is not None and task.cancelling():
            return cause
        return self.blame(owned, part, cause)

    async def run(
        self,
        owned: Owned,
        part: str,
        function: Callable[..., Awaitable[T]],
        *arguments: Any,
        may_refuse: bool = False,
    ) -> T:
        """Return the result of an extension's call, with the arguments of `passed`.

        Raises:
            BlamedError: it failed, or took too long.
            RequestError, HTTPException: it refused the request.
        """
        limit = asyncio.timeout(self.seconds)
        try:
            async with limit:
                return await self.timed(owned, part, function, *arguments)
        except BaseException as raised:
            cause = self.too_slow() if limit.expired() else raised
            raise self.passed(owned, part, cause, may_refuse=may_refuse) from None

    async def run_background(self, owned: Owned) -> None:
        """Run the background work of a plugin; a fault ends it, and is counted and logged."""
        part = "background work"
        try:
            await self.timed(owned, part, owned.part.run)
        except BaseException as raised:
            if isinstance(self.passed(owned, part, raised), asyncio.CancelledError):
                raise

    def timed(
        self, owned: Owned, part: str, function: Callable[..., Awaitable[T]], *arguments: Any
    ) -> Awaitable[T]:
        """Return an extension's call, to be awaited; report it if it blocks the event loop."""
        return Timed(
            _call(function, *arguments), functools.partial(self.check_blocking, owned, part)
        )

    def check_blocking(self, owned: Owned, part: str, seconds: float) -> None:
        """Report an extension that ran for long without giving others a turn."""
        if not 0 < self.slow_seconds < seconds:
            return
        message = (
            f"{owned.source}: its {part} blocked the server for {seconds:.1f} s, in which it "
            "answered no other request; hand long work to asyncio.to_thread"
        )
        self._report(owned.plugin, part, message)

    def holds_loop(self, plugin: str, function: str) -> None:
        """Report a function of a plugin that the event loop called and that does not return."""
        message = (
            f"{function}, which the event loop called, has blocked the server for more than "
            f"{self.slow_seconds:g} s, in which it answered no request; hand long work to "
            "asyncio.to_thread"
        )
        self._report(plugin, function, message)

    def _report(self, plugin: str, part: str, message: str) -> None:
        self.slow[plugin] = message
        if (plugin, part) not in self._reported:  # a slow one is so for each request
            self._reported.add((plugin, part))
            _log.warning("%s", message)

    def too_slow(self) -> BrokenContractError:
        """Return the error of an extension that took too long."""
        return BrokenContractError(
            f"it took more than {self.seconds:g} s (server.extension_seconds)"
        )


async def _call(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    return await function(*arguments)


def _is_refusal(error: BaseException) -> bool:
    if isinstance(error, HTTPException):
        return not isinstance(error.status_code, int) or error.status_code >= 400
    return isinstance(error, RequestError)
