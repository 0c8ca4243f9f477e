"""The ASGI application: guard, authentication, middleware, routes, and errors as answers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.plugins import HardpointError
from hardpoint.plugins.server import Route

from .errors import AnswerError, error_response
from .extensions import Owned, ServerFaults
from .service import Service
from .streaming import ClientGoneError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Boundary:
    """Answers errors of the application inside, so that nothing outside sees them.

    An error after the beginning of an answer ends the connection.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        """Wrap an application."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run it."""
        try:
            await self._app(scope, receive, send)
        except ClientGoneError:
            return
        except Exception as error:
            answer = self._service.failure(error)
            if scope["state"]["is_answered"]:
                raise
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            await error_response(answer, path)(scope, receive, send)


class Blamed:
    """A plugin's middleware around an application, whose own errors are answered inside."""

    def __init__(self, owned: Owned, app: ASGIApp, faults: ServerFaults) -> None:
        """Wrap an application.

        Raises:
            AnswerError: the middleware cannot be built.
        """
        self._owned, self._faults = owned, faults
        self._app = owned.part.wrap(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run it.

        Raises:
            AnswerError: the middleware failed.
        """
        try:
            await self._app(scope, receive, send)
        except Exception as cause:
            raise self._faults.blame(self._owned, "middleware", cause) from cause


def make_router(routes: Sequence[tuple[Route, Owned | None]], faults: ServerFaults) -> Router:
    """Return what finds the route of a request."""
    return Router(
        [
            StarletteRoute(
                route.path,
                _Endpoint(route.endpoint if owned is None else _guarded(route, owned, faults)),
                methods=list(route.methods),
            )
            for route, owned in routes
        ],
        redirect_slashes=False,
        default=_not_found,
    )


class _Endpoint:
    """An endpoint as an ASGI application; without starlette's own layers around `send`."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def _guarded(route: Route, owned: Owned, faults: ServerFaults) -> Any:
    async def endpoint(request: Request) -> Any:
        try:
            response = await route.endpoint(request)
            if not callable(response):
                raise TypeError(f"it returned a {type(response).__name__}, expected a Response")
        except (HardpointError, HTTPException, AnswerError, ClientGoneError):
            raise
        except Exception as cause:
            raise faults.blame(owned, f"route {route.path}", cause) from cause
        return response

    return endpoint


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
    raise AnswerError(404, f"path: there is no route {scope['path'][:200]!r}", code="not_found")


class Application:
    """The application of one address.

    Requests pass: request id, guard, authentication, middleware of plugins, route.
    """

    def __init__(
        self,
        service: Service,
        routes: Sequence[tuple[Route, Owned | None]],
        faults: ServerFaults,
        *,
        guard: Any,
        authentication: Any,
        middleware: Sequence[Owned] = (),
    ) -> None:
        """Put the parts together; of the middleware, the first one is the outermost."""
        self._guard = guard
        self._authentication = authentication
        app: ASGIApp = Boundary(make_router(routes, faults), service)
        for owned in reversed(middleware):
            app = Boundary(Blamed(owned, app, faults), service)
        self._inner = app
        self._app = Boundary(self._checked, service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # starlette then raises instead of answering in plain text
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        state["is_answered"] = False
        name = request_id.encode("latin-1")

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["is_answered"] = True
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, with_id)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard.check(scope)
        scope["state"]["client"] = await self._authentication.client(scope)
        await self._inner(scope, receive, send)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return given
    return f"req-{secrets.token_hex(12)}"
