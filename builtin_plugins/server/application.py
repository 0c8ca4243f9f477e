"""The ASGI application: guard, authentication, middleware, routes, and errors as answers."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.plugins.server import Route

from .boundaries import Boundary, Endpoint, MiddlewareBoundary, PluginEndpoint
from .cross_origin import CrossOrigin
from .errors import AnswerError
from .faults import AnswerCutError, Owned, ServerFaults
from .service import Service

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_router(routes: Sequence[tuple[Route, Owned | None]], faults: ServerFaults) -> Router:
    """Return what finds the route of a request."""
    return Router(
        [
            StarletteRoute(
                route.path,
                Endpoint(route) if owned is None else PluginEndpoint(owned, faults),
                methods=list(route.methods),
            )
            for route, owned in routes
        ],
        redirect_slashes=False,
        default=_not_found,
    )


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
    raise AnswerError(404, f"path: there is no route {scope['path'][:200]!r}", code="not_found")


class Application:
    """The application of one address.

    Requests pass: request id, guard, authentication, middleware of plugins, route.

    Attributes:
        routes: that it has.
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
        cross_origin: CrossOrigin | None = None,
        is_admin: bool = False,
    ) -> None:
        """Put the parts together; of the middleware, the first one is the outermost.

        Args:
            is_admin: whether it is that of the admin address, for the log.
        """
        self._traffic = service.traffic
        self._root_path = "" if is_admin else service.settings.root_path
        self._is_admin = is_admin
        self.routes = [route for route, _ in routes]
        self._guard = guard
        self._cross_origin = cross_origin or CrossOrigin()
        self._authentication = authentication
        app: ASGIApp = make_router(routes, faults)
        for owned in reversed(middleware):
            app = MiddlewareBoundary(owned, Boundary(app, service), faults)
        self._inner = app
        self._app = Boundary(self._checked, service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # starlette then raises instead of answering in plain text
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        state["is_gone"] = False
        if self._root_path:
            _remove_prefix(scope, self._root_path)
        headers = [
            (b"x-request-id", request_id.encode("latin-1")),
            *self._cross_origin.headers(scope),
        ]
        exchange = self._traffic.begin(scope, send, headers)

        async def noting() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                state["is_gone"] = True
            return message

        try:
            # An answer that is cut is left incomplete, and the connection is closed.
            with contextlib.suppress(AnswerCutError):
                await self._app(scope, noting, exchange.send)
        finally:
            self._traffic.end(exchange, scope, admin=self._is_admin)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard.check(scope)
        if (answer := self._cross_origin.preflight(scope)) is not None:
            return await answer(scope, receive, send)
        scope["state"]["client"] = await self._authentication.client(scope)
        return await self._inner(scope, receive, send)


def _remove_prefix(scope: Scope, prefix: str) -> None:
    """Make the path the server's own, whether or not the proxy has left its prefix there.

    Authentication and router see that one path, so that they never take it for two routes.
    """
    if scope["path"].startswith(f"{prefix}/"):
        scope["path"] = scope["path"].removeprefix(prefix)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return given
    return f"req-{secrets.token_hex(12)}"
