"""The ASGI application: guard, authentication, middleware, routes, and errors as answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Router, WebSocketRoute, compile_path
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.plugins.server import Authenticator, Client, Route

from .access.counts import ANYBODY, Counts, count_request
from .access.cross_origin import CrossOrigin
from .access.guard import JSON, Guard
from .boundaries import (
    Endpoint,
    ErrorMiddleware,
    HandshakeExpected,
    MiddlewareBoundary,
    PluginEndpoint,
)
from .errors import AnswerError, no_route
from .faults import AnswerCutError, BlamedError, BrokenContractError, Owned, ServerFaults
from .operations.traffic import request_id_of
from .service import Service

ADMINISTRATOR = Client(name="administrator", admin=True)
"""The client of the admin address where no key is needed: the owner of its Unix socket."""

PROBES = ("/health", "/ready", "/ping")
"""Routes of the server's own that no plugin can fail."""

_LONGEST_FOR_OPEN_ROUTES = 1.0


def make_router(routes: Sequence[tuple[Route, Owned | None]], faults: ServerFaults) -> Router:
    """Return a function that finds the route of a request."""
    routed: list[BaseRoute] = []
    for route, owned in routes:
        endpoint = Endpoint(route) if owned is None else PluginEndpoint(owned, faults)
        if route.websocket:
            routed.append(WebSocketRoute(route.path, endpoint))
            routed.append(StarletteRoute(route.path, HandshakeExpected(route), methods=["GET"]))
        else:
            routed.append(StarletteRoute(route.path, endpoint, methods=list(route.methods)))
    unmatched = _Unmatched(routed, [route.path for route, _ in routes if "{" not in route.path])
    every = StarletteRoute("/{path:path}", unmatched)
    return Router([*routed, every], redirect_slashes=False, default=unmatched)


class _Unmatched:
    """The answer to a request that no route takes: 405 if the path has one, else 404."""

    def __init__(self, routes: Sequence[BaseRoute], paths: Sequence[str]) -> None:
        self._routes, self._paths = routes, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Reject the request.

        Raises:
            AnswerError: always.
        """
        methods: set[str] = set()
        for route in self._routes:  # several routes may have one path
            if isinstance(route, StarletteRoute) and route.matches(scope)[0] is Match.PARTIAL:
                methods.update(route.methods or ())
        if not methods:
            raise no_route(scope["path"], self._paths)
        allowed = ", ".join(sorted(methods))
        message = f"method: expected one of {allowed}, got {scope['method']}"
        raise AnswerError(405, message, headers={"allow": allowed})


class AdminAuthentication:
    """Finds the client of each request to the admin address, who has to be an administrator."""

    def __init__(
        self, authenticators: Sequence[Owned], faults: ServerFaults, open_routes: Collection[str]
    ) -> None:
        """Ask authenticators in order; none is for a Unix socket, which is its owner's alone.

        Args:
            open_routes: paths that need no administrator: files without data.
        """
        self._open = frozenset(open_routes)
        self._keys = Authentication(authenticators, faults, ()) if authenticators else None

    async def client(self, scope: Scope) -> Client:
        """Return who makes a request.

        Raises:
            AnswerError: it is no administrator, or an authenticator failed.
        """
        if self._keys is None:
            return ADMINISTRATOR
        if scope["path"] in self._open:
            return ANYBODY
        client = await self._keys.client(scope)
        if not client.admin:
            raise AnswerError(
                403, "authorization: expected the key of an administrator", code="not_an_admin"
            )
        return client


class Authentication:
    """Finds the client of each request."""

    def __init__(
        self,
        authenticators: Sequence[Owned],
        faults: ServerFaults,
        open_routes: Collection[str],
        *,
        counts: Counts | None = None,
        uncounted: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask authenticators in order; none leaves every route open.

        Args:
            open_routes: paths that need no client.
            counts: counts of the requests of clients; None are those of this process.
            uncounted: paths of the routes whose requests are not counted.
            clock: seconds.
        """
        self._authenticators, self._faults = authenticators, faults
        self._open = frozenset(open_routes)
        self._counts, self._clock = counts or Counts(), clock
        self._uncounted = [compile_path(path)[0] for path in uncounted]

    async def client(self, scope: Scope) -> Client:
        """Return who makes a request, and count it.

        Raises:
            AnswerError: no client is known, an authenticator failed, or the client makes more
                requests than it may.
        """
        client, path = await self._client(scope), scope["path"]
        rate = client.requests_per_minute
        if rate is not None and not any(route.match(path) for route in self._uncounted):
            count_request(self._counts, client.name, rate, self._clock())
        return client

    async def _client(self, scope: Scope) -> Client:
        """Return who makes a request.

        Open routes are anybody's if authenticators fail or are late, for probes need answers.

        Raises:
            AnswerError: no client is known, or an authenticator failed.
        """
        if not self._authenticators:
            return ANYBODY
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
        if scope["path"] in self._open:
            with contextlib.suppress(BlamedError, TimeoutError):
                async with asyncio.timeout(_LONGEST_FOR_OPEN_ROUTES):
                    return await self._known(headers, scope["path"]) or ANYBODY
            return ANYBODY
        if (client := await self._known(headers, scope["path"])) is not None:
            return client
        raise AnswerError(
            401,
            "authorization: expected a valid key as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    async def _known(self, headers: Mapping[str, str], path: str) -> Client | None:
        for owned in self._authenticators:
            client = await self._faults.run(
                owned, "authenticator", _asked, owned.part, headers, path, may_refuse=True
            )
            if client is not None:
                return client
        return None


async def _asked(
    authenticator: Authenticator, headers: Mapping[str, str], path: str
) -> Client | None:
    client: object = await authenticator.authenticate(headers, path)
    if client is not None and not isinstance(client, Client):
        raise BrokenContractError(
            f"it returned a {type(client).__name__}, expected a Client or None"
        )
    return client


class Application:
    """The application of one address.

    Requests pass: request id, guard, authentication, middleware of plugins, route; probes pass no
    middleware.

    Attributes:
        routes: its routes.
    """

    def __init__(
        self,
        service: Service,
        routes: Sequence[tuple[Route, Owned | None]],
        faults: ServerFaults,
        *,
        guard: Guard,
        authentication: Authentication | AdminAuthentication,
        middleware: Sequence[Owned] = (),
        cross_origin: CrossOrigin | None = None,
        is_admin: bool = False,
    ) -> None:
        """Put the parts together; of the middleware, the first one is the outermost.

        Args:
            is_admin: whether it is that of the admin address, for the log.
        """
        self._traffic, self._service = service.traffic, service
        self._root_path = "" if is_admin else service.settings.root_path
        self._is_admin = is_admin
        self.routes = [route for route, _ in routes]
        self._websockets = [compile_path(r.path)[0] for r, _ in routes if r.websocket]
        self._paths = frozenset(r.path for r in self.routes if "{" not in r.path)
        # Open routes have one form, so that no other path is open.
        self._open = frozenset(service.settings.open_routes)
        self._with_forms = self._paths - self._open
        self._patterns = [compile_path(route.path)[0] for route in self.routes]
        self._body_types = [
            (compile_path(route.path)[0], route.body_types)
            for route, _ in routes
            if tuple(route.body_types) != JSON
        ]
        self._guard = guard
        self._cross_origin = cross_origin or CrossOrigin()
        self._authentication = authentication
        app: ASGIApp = make_router(routes, faults)
        self._router = app
        self._probes = {r.path for r, owned in routes if owned is None and r.path in PROBES}
        for owned in reversed(middleware):
            app = MiddlewareBoundary(owned, ErrorMiddleware(app, service), faults)
        self._inner = app
        self._app = ErrorMiddleware(self._checked, service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] not in ("http", "websocket"):
            return
        scope.setdefault("method", "GET")  # of the handshake
        scope["app"] = self  # starlette then raises instead of answering in plain text
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = request_id_of(scope)
        state["is_gone"] = False
        if self._root_path:
            _remove_prefix(scope, self._root_path)
        scope["path"] = self._canonical(scope["path"])
        headers = [
            (b"x-request-id", request_id.encode("latin-1")),
            *self._cross_origin.headers(scope),
        ]
        exchange = self._traffic.begin(scope, send, headers)

        async def noting() -> Message:
            message = await receive()
            if message["type"] in ("http.disconnect", "websocket.disconnect"):
                state["is_gone"] = True
            return message

        try:
            # An answer that is cut is left incomplete, and the connection is closed.
            with contextlib.suppress(AnswerCutError):
                await self._app(scope, noting, exchange.send)
        finally:
            self._traffic.end(exchange, scope, admin=self._is_admin)
            self._service.transforms.end(scope)

    def takes_websocket(self, path: str) -> bool:
        """Return whether a path, as a client names it, belongs to a WebSocket."""
        if self._root_path and path.startswith(f"{self._root_path}/"):
            path = path.removeprefix(self._root_path)
        return any(pattern.match(path) for pattern in self._websockets)

    def _canonical(self, path: str) -> str:
        """Return the route's own path for one with a trailing slash, without `/v1` or with two.

        Authentication and router see that one path. Only the paths of routes that need a key have
        such forms. A path with parameters has no form with a second `/v1`.
        """
        if path in self._paths:
            return path
        bare = path.rstrip("/")
        if bare in self._with_forms:
            return bare
        if self._is_admin or self._has_route(path):
            return path
        forms = (f"/v1{bare}", bare.removeprefix("/v1"))
        if (form := next((form for form in forms if form in self._with_forms), None)) is not None:
            return form
        forms = (bare, f"/v1{bare}")
        return next((f for f in forms if self._has_route(f) and f not in self._open), path)

    def _has_route(self, path: str) -> bool:
        return any(pattern.match(path) for pattern in self._patterns)

    def _body_types_of(self, path: str) -> Collection[str] | None:
        """Return the media types that bodies may have; None if there is no such route."""
        for pattern, types in self._body_types:
            if pattern.match(path):
                return types
        if path in self._paths or self._has_route(path):
            return JSON
        return None

    async def ask(self, client: Client, path: str, body: bytes) -> Response:
        """Return the answer to a POST of JSON by somebody who is known; see `ServerContext.ask`."""
        exchange = _Exchange(body)
        await self(_scope_of_post(client, path, body), exchange.receive, exchange.send)
        return exchange.answer()

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "client" in scope["state"]:  # of `ask`
            return await self._inner(scope, receive, send)
        self._guard.check(scope, self._body_types_of(scope["path"]))
        if (answer := self._cross_origin.preflight(scope)) is not None:
            return await answer(scope, receive, send)
        scope["state"]["client"] = await self._authentication.client(scope)
        # What goes on for long asks again, so that its turns count and its key can be withdrawn.
        scope["state"]["ask_again"] = functools.partial(self._authentication.client, scope)
        app = self._router if scope["path"] in self._probes else self._inner
        return await app(scope, receive, send)


def _remove_prefix(scope: Scope, prefix: str) -> None:
    """Make the path the server's own, whether or not the proxy has left its prefix there.

    Authentication and router see that one path, so that they never take it for two routes.
    """
    if scope["path"].startswith(f"{prefix}/"):
        scope["path"] = scope["path"].removeprefix(prefix)


class _Exchange:
    """A request without a connection; its client does not disconnect."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status, self._is_ended = 0, False
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message["headers"])
        else:
            self._parts.append(message.get("body", b""))
            self._is_ended = not message.get("more_body", False)

    def answer(self) -> Response:
        """Return the answer, once it has ended; without a status if it was cut."""
        whole = b"".join(self._parts)
        answer = Response(whole, self._status if self._is_ended else 0)
        answer.raw_headers = self._headers
        return answer


def _scope_of_post(client: Client, path: str, body: bytes) -> Scope:
    length = str(len(body)).encode()
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        "client": None,
        "server": None,
        "state": {"client": client},
    }
