"""Error boundaries around the routes of a server and the middleware of plugins."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from hardpoint.errors import PluginFaultError
from hardpoint.plugins import ConfigError
from hardpoint.plugins.server import Route
from hardpoint.toolkit.http_heads import fault_of_head
from hardpoint.typed import reason_of

from .errors import AnswerError, error_response
from .faults import AnswerCutError, BrokenContractError, Owned, ServerFaults
from .service import Service
from .streaming import ClientGoneError
from .timing import ROUTE_LIMIT, RouteLimit, untimed


class CheckedSend:
    """Passes the messages of one answer on, in the order that answers have.

    Attributes:
        started, finished: whether the answer is.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.finished = False

    async def __call__(self, message: Message) -> None:
        """Pass a message on.

        Raises:
            BrokenContractError: it is not the next one of an answer, or HTTP cannot carry it.
        """
        if message["type"] in _OF_WEBSOCKETS:
            await self._pass_on(message)
            return
        kind = message["type"].removeprefix("websocket.")
        is_start = kind == "http.response.start"
        if self.finished or (is_start and self.started):
            raise BrokenContractError("it answered twice")
        if kind == "http.response.body" and not self.started:
            raise BrokenContractError("it sent a body before the start of an answer")
        if is_start:
            message["headers"] = headers = list(message.get("headers", ()))
            wrong = fault_of_head(message.get("status"), headers)
            if wrong is not None:
                raise BrokenContractError(wrong)
        await self._send(message)
        if is_start:
            self.started = True
        elif kind == "http.response.body":
            self.finished = not message.get("more_body", False)

    async def _pass_on(self, message: Message) -> None:
        kind = message["type"]
        if self.finished or (kind == "websocket.accept" and self.started):
            raise BrokenContractError("it went on after the end of its WebSocket")
        if kind == "websocket.send" and not self.started:
            raise BrokenContractError("it sent a message before it accepted the WebSocket")
        await self._send(message)
        self.started = True
        self.finished = kind == "websocket.close"

    def check_ended(self, scope: Scope) -> None:
        """Check that the answer is complete, unless the client is gone.

        Raises:
            BrokenContractError: it is not.
        """
        if not self.finished and not scope["state"]["is_gone"]:
            missing = "did not finish its answer" if self.started else "ended without an answer"
            raise BrokenContractError(f"it {missing}")


_OF_WEBSOCKETS = ("websocket.accept", "websocket.send", "websocket.close")
_FAILED = 1011
"""The code of a WebSocket that an error of the server or of a plugin closes."""
_LONGEST_REASON = 120


class ErrorMiddleware:
    """Answers errors of the application inside, so that nothing outside sees them."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run it.

        Raises:
            AnswerCutError: it failed after the beginning of an answer.
        """
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            await send(message)
            started = True

        try:
            await self._app(scope, receive, noting)
        except ClientGoneError:
            scope["state"]["is_gone"] = True
        except AnswerCutError:
            raise
        except Exception as error:
            answer = self._service.failure(error)
            scope["state"]["refused"] = answer.detail.code or answer.detail.type
            if started:
                if scope["type"] == "websocket":
                    await _close_failed(send, answer.detail.message)
                raise AnswerCutError from error
            await error_response(answer, scope["path"])(scope, receive, send)


async def _close_failed(send: Send, message: str) -> None:
    """Close a WebSocket with the reason for it; it may be closed already."""
    reason = message.encode()[:_LONGEST_REASON].decode(errors="ignore")
    with contextlib.suppress(ClientGoneError, RuntimeError):
        await send({"type": "websocket.close", "code": _FAILED, "reason": reason})


class _Inside:
    """The application inside of a middleware; its time is not the middleware's."""

    def __init__(self, app: ASGIApp, limit: ContextVar[asyncio.Timeout], seconds: float) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit.get()
        limit.reschedule(None)
        try:
            await untimed(_run(self._app, scope, receive, send))
        finally:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + self._seconds)


class MiddlewareBoundary:
    """A plugin's middleware around an application; errors inside are answered inside."""

    def __init__(self, owned: Owned, app: ASGIApp, faults: ServerFaults) -> None:
        """Wrap an application.

        Raises:
            PluginFaultError, ConfigError: the middleware cannot be built.
        """
        self._owned, self._faults = owned, faults
        self._limit: ContextVar[asyncio.Timeout] = ContextVar(f"limit of {owned.plugin}")
        inside = _Inside(app, self._limit, faults.seconds)
        try:
            self._app: ASGIApp = owned.part.wrap(inside)
        except Exception as cause:
            raise PluginFaultError(
                f"{owned.source}: its middleware cannot be built: {reason_of(cause)}"
            ) from cause
        if not callable(self._app):
            raise ConfigError(
                f"{owned.source}: wrap of its middleware must return an application, "
                f"got a {type(self._app).__name__}"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run it.

        Raises:
            BlamedError: the middleware failed.
        """
        sent = CheckedSend(send)
        limit = asyncio.timeout(self._faults.seconds)
        token = self._limit.set(limit)
        try:
            async with limit:
                run = self._faults.timed
                await run(self._owned, "middleware", self._app, scope, receive, sent)
            sent.check_ended(scope)
        except BaseException as raised:
            cause = self._faults.too_slow() if limit.expired() else raised
            error = self._faults.passed(self._owned, "middleware", cause, may_refuse=True)
            raise _cut(error, sent) from None
        finally:
            self._limit.reset(token)


class Endpoint:
    """An endpoint as an ASGI application; without starlette's own layers around `send`."""

    def __init__(self, route: Route) -> None:
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope["state"]["route"] = self._route.path
        endpoint: Any = self._route.endpoint
        if self._route.websocket:
            await endpoint(WebSocket(scope, receive, send))
            return
        response = _as_response(await endpoint(Request(scope, receive, send)))
        await response(scope, receive, send)


_BEGINNINGS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class HandshakeExpected:
    """The answer to a request for the path of a WebSocket that does not open one."""

    def __init__(self, route: Route) -> None:
        self._path = route.path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Refuse the request.

        Raises:
            AnswerError: it does not open a WebSocket.
        """
        scope["state"]["route"] = self._path
        raise AnswerError(
            426,
            f"upgrade: expected a handshake of a WebSocket of version 13 at {self._path}, on a "
            "connection without other requests",
            code="websocket_expected",
            headers={"upgrade": "websocket"},
        )


class PluginEndpoint:
    """The endpoint of a plugin's route as an ASGI application."""

    def __init__(self, owned: Owned, faults: ServerFaults) -> None:
        self._owned, self._faults = owned, faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            BlamedError: the plugin failed.
        """
        route = self._owned.part
        scope["state"]["route"] = route.path
        part = f"route {route.path}"
        sent = CheckedSend(send)
        limit = RouteLimit(self._faults.seconds)
        token = ROUTE_LIMIT.set(limit)
        try:
            async with limit.timeout:
                await self._faults.timed(
                    self._owned, part, self._answered, limit, scope, receive, sent
                )
            if route.websocket and sent.started and not sent.finished:
                await sent({"type": "websocket.close", "code": 1000, "reason": ""})
            sent.check_ended(scope)
        except BaseException as raised:
            cause = self._faults.too_slow() if limit.timeout.expired() else raised
            error = self._faults.passed(self._owned, part, cause, may_refuse=True)
            if route.websocket and sent.started and isinstance(error, Exception):
                await _close_failed(send, str(error))
            raise _cut(error, sent) from None
        finally:
            ROUTE_LIMIT.reset(token)

    async def _answered(
        self, limit: RouteLimit, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def begun(message: Message) -> None:
            if message["type"] in _BEGINNINGS:
                limit.stop()
            await send(message)

        if self._owned.part.websocket:
            await self._owned.part.endpoint(WebSocket(scope, receive, begun))
            return
        response = _as_response(await self._owned.part.endpoint(Request(scope, receive)))
        await response(scope, receive, begun)


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def _cut(error: BaseException, sent: CheckedSend) -> BaseException:
    if isinstance(error, Exception) and sent.started and not isinstance(error, ClientGoneError):
        return AnswerCutError()
    return error


def _as_response(answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, msgspec.Struct):
        return Response(msgspec.json.encode(answer), media_type="application/json")
    raise BrokenContractError(
        f"it returned a {type(answer).__name__}, expected a Response or a struct"
    )
