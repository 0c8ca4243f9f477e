"""Extensions of an HTTP server by plugins: routes, middleware, authenticators and others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hardpoint.typed import Strict

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp
    from starlette.websockets import WebSocket

__all__ = [
    "Authenticator",
    "Background",
    "Call",
    "Client",
    "InstalledExtension",
    "Middleware",
    "ResponseStore",
    "Route",
    "Transform",
]


class Client(Strict):
    """The caller of a request: the result of an authenticator, and the caller's limits.

    Attributes:
        name: for logs and statistics.
        cache_salt: hashed together with the `cache_salt` of each request, so that clients share no
            cached prompts; empty shares them.
        tags: tags of each request; a request's own never replace them. Without "tenant", it is
            `name`, so that the scheduling policy `fair` has a tenant per client.
        min_priority: the smallest, which is the most important, that requests may have.
        max_priority: the largest.
        max_timeout: seconds that requests may run; also the timeout of requests without one. None
            is no limit.
        kv_transfer: whether requests may bring `kv_transfer_params`.
        trace: whether requests may ask how their tokens were chosen, also if `server.trace` is off.
        admin: whether it may use the admin address.
        requests_per_minute: requests to routes that count (`Route.is_counted`), of all clients of
            this name together; further ones are answered with 429. None is no limit.
    """

    name: str
    cache_salt: str = ""
    tags: dict[str, str] = {}
    min_priority: int = 0
    max_priority: int = 2**31 - 1
    max_timeout: float | None = None
    kv_transfer: bool = False
    trace: bool = False
    admin: bool = False
    requests_per_minute: int | None = None


@dataclass(frozen=True)
class Call:
    """One HTTP request that a transform sees.

    Attributes:
        request_id: id of the HTTP request.
        path: path of the route, such as "/v1/chat/completions".
        client: who makes it.
        headers: by lower-case name, without credentials.
    """

    request_id: str
    path: str
    client: Client
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route of a server.

    A route that a plugin adds may take the place of the server's own only if
    `server.replace_routes` lists its path; otherwise the server does not start.

    Attributes:
        path: such as "/acme/usage" or "/acme/users/{name}".
        endpoint: takes starlette's request, with the Client in its `state.client`, and returns its
            response, or a struct, which is sent as JSON. A HardpointError or starlette's
            HTTPException that it raises becomes an answer, any other error an answer 500 that
            names the plugin.
        methods: methods that it answers; GET answers HEAD too.
        admin: whether it is on the admin address instead of the users'.
        websocket: whether it is a WebSocket, which GET opens: the endpoint takes starlette's
            WebSocket, and accepts it or raises; an error after that closes it with the code 1011.
        summary: one line for the OpenAPI document.
        request_type, response_type: types of JSON bodies, for the OpenAPI document.
        body_types: media types that its bodies may have; others are answered with 415.
        is_counted: whether its requests count as `requests_per_minute` of keys: requests of routes
            that compute or store do.
    """

    path: str
    endpoint: (
        Callable[[HTTPRequest], Awaitable[Response | msgspec.Struct]]
        | Callable[[WebSocket], Awaitable[None]]
    )
    methods: Sequence[str] = ("GET",)
    admin: bool = False
    websocket: bool = False
    summary: str = ""
    request_type: type[msgspec.Struct] | None = None
    response_type: type[msgspec.Struct] | None = None
    body_types: Sequence[str] = ("application/json",)
    is_counted: bool = True


@dataclass(frozen=True, kw_only=True)
class Middleware:
    """An ASGI middleware around all routes of the users' address; it runs after authentication.

    `scope["state"]["client"]` is the Client. It answers a request, or calls the application inside
    once. To reject a request it raises starlette's HTTPException or a RequestError; any other
    error, two answers or none end that request alone with 500, which names the plugin. So does a
    pause of more than `server.extension_seconds` outside of the application inside. The server's
    own `/health` and `/ready` pass no middleware, so that no plugin fails a probe. A WebSocket is a
    scope of the type "websocket", as in ASGI.

    Attributes:
        wrap: takes an application and returns another one; called once, when the server starts.
        before, after: names of plugins with middleware that runs inside of it, or around it.
    """

    wrap: Callable[[ASGIApp], ASGIApp]
    before: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Changes the JSON bodies of routes that generate; each part may be left out.

    An error that one raises answers that request alone: of `request`, a RequestError as 400 and
    starlette's HTTPException with its status; any other as 500, which names the plugin.

    Attributes:
        request: takes a decoded body without its nulls, returns the body that is checked and
            answered.
        response: takes the body of a whole answer, returns the body that is sent.
        event: takes the data of one event of a stream, returns the data that is sent, or None to
            leave it out. It is called per token and slows streams down.
        end: takes how the call ended: "finished"; "aborted", if the client went before the end; or
            "failed", if the answer is an error or a stream ended with one. Called once for each
            call, after everything else, so that a transform can release its data about a stream.
        before, after: names of plugins with transforms that run after it, or before it. Requests
            pass transforms in that order, answers in the reverse one.
    """

    request: Callable[[Call, dict[str, Any]], Awaitable[dict[str, Any]]] | None = None
    response: Callable[[Call, dict[str, Any]], Awaitable[dict[str, Any]]] | None = None
    event: Callable[[Call, dict[str, Any]], dict[str, Any] | None] | None = None
    end: Callable[[Call, Literal["finished", "aborted", "failed"]], None] | None = None
    before: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Authenticator:
    """Finds out who makes a call. With at least one, every closed route needs a client.

    An error that one raises rejects that request: starlette's HTTPException with its status, any
    other with 500, which names the plugin.

    Attributes:
        authenticate: takes the headers by lower-case name, and the path; returns the client, or
            None if it knows none, and the next authenticator is asked. With none left, it is 401.
        before, after: names of plugins that are asked after it, or before it.
    """

    authenticate: Callable[[Mapping[str, str], str], Awaitable[Client | None]]
    before: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ResponseStore:
    """Keeps the responses of `/v1/responses`, so that requests can go on from them. One at most.

    Contents are opaque, and kept by the owner, which is the client's name, and by the id of
    the response: no owner ever gets another owner's contents. An error that a function raises
    answers that request with 500, which names the plugin; so does a call that takes longer than
    `server.extension_seconds`. A store that cannot be used for a while raises starlette's
    HTTPException with 503 and Retry-After.

    Attributes:
        put: takes owner, id and content; replaces the present content. It is called before the
            client has the answer, and may drop old contents.
        get: takes owner and id; returns the content, or None if there is none, or none any more.
        delete: takes owner and id; returns whether there was a content.
        is_shared: whether all processes of a server, also after a restart, have the same
            contents. A server with several workers rejects another one.
        retain_seconds: how long the keys and values of a stored response are to stay in the prefix
            cache, where the request has no `retain_seconds`; None is as for other requests.
    """

    put: Callable[[str, str, bytes], Awaitable[None]]
    get: Callable[[str, str], Awaitable[bytes | None]]
    delete: Callable[[str, str], Awaitable[bool]]
    is_shared: bool = False
    retain_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Background:
    """Work that goes on while requests are answered, in each process that answers users.

    Attributes:
        run: called in the event loop when the server answers users; cancelled when it takes no
            further requests. An error that it raises is logged and counted as the plugin's fault,
            and ends it alone. It must not block the loop.
    """

    run: Callable[[], Awaitable[None]]


ServerExtension = Route | Middleware | Transform | Authenticator | ResponseStore | Background


@dataclass(frozen=True)
class InstalledExtension:
    """An extension and the plugin that adds it.

    Attributes:
        plugin: its name, for the order.
        source: the plugin and its distribution, for messages.
    """

    plugin: str
    source: str
    extension: ServerExtension
