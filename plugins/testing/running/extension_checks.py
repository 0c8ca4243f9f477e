"""Checks of a plugin's server extensions, without a server: requests are synthetic."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect as types

from hardpoint import typed
from hardpoint.plugins import EngineConfig, HardpointError, RequestError
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.server import (
    Authenticator,
    Call,
    Client,
    InstalledExtension,
    Middleware,
    ResponseStore,
    Route,
    Transform,
)
from hardpoint.testing.engine_access import HookSet, load_tokenizer, server_extensions
from hardpoint.testing.suite import Rule, Violation, short_repr
from hardpoint.toolkit.http_heads import fault_of_head, fault_of_refusal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)

EXTENSIONS = Rule(
    "extensions: server_extensions returns valid extensions, the same each time",
    "correct the field in the message",
)
ROUTE = Rule(
    "route: it answers a request with a struct, or a whole answer that HTTP can carry",
    "return a struct or a Response; refuse a request with RequestError or HTTPException",
)
MIDDLEWARE = Rule(
    "middleware: it answers a request or calls the application inside, and each answer is whole",
    "call the application once and pass its messages on, or send one whole answer",
)
TRANSFORM = Rule(
    "transform: it returns a body, and refuses a request with a RequestError alone",
    "return the body that you got, changed where it has to be",
)
AUTHENTICATOR = Rule(
    "authenticator: it returns a Client, or None for requests of strangers",
    "return None where a header is missing or malformed",
)

STORE = Rule(
    "response store: it returns stored records, to their owner alone, until they are deleted",
    "keep bytes by owner and id; get returns them or None, delete whether there were any",
)

_SECONDS = 2.0
_BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": False,
    "max_tokens": 4,
}
_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_EVENT = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}],
}
_HEADERS: Sequence[dict[str, str]] = (
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer \xff\x00"},
    {"authorization": "Basic " + "x" * 4000},
    {"x-api-key": "' or 1=1"},
)


class _AbsentError(AttributeError):
    """A route needs a part of a real server; its response is not checked."""


class _Engine:
    """The parts of an engine that a hook may look at before there are requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    is_running = True
    dead_error = None

    @property
    def tokenizer(self) -> Any:
        return load_tokenizer(None)

    def __getattr__(self, name: str) -> NoReturn:
        raise _AbsentError(f"the hook calls engine.{name}, which a server has only in requests")


def check_extensions(hooks: HookSet, config: EngineConfig) -> None:
    """Check everything that a plugin adds.

    Args:
        hooks: hooks of the plugin.
        config: configuration of the engine, with the plugin's table.

    Raises:
        Violation: something is wrong.
    """
    first, second = _installed(hooks, config), _installed(hooks, config)
    types = [
        [type(item.extension).__name__ for item in extensions] for extensions in (first, second)
    ]
    if types[0] != types[1]:
        raise EXTENSIONS.violation(f"it returned {types[0]}, and then {types[1]}")
    for item in first:
        match item.extension:
            case Middleware():
                _check_middleware(item.extension)
            case Transform():
                _check_transform(item.extension)
            case Authenticator():
                _check_authenticator(item.extension)
            case ResponseStore():
                _check_store(item.extension)
            case Route():
                _check_route(item.extension, _SECONDS)


def _installed(hooks: HookSet, config: EngineConfig) -> list[InstalledExtension]:
    context = _Context(_Engine(config))
    try:
        return server_extensions(hooks, context)
    except HardpointError as error:
        raise EXTENSIONS.violation(str(error)) from error


def _run(rule: Rule, call: str, make: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a call, which has to come soon.

    Raises:
        Violation: it raised something else than a RequestError or HTTPException, or it waits.
    """
    from starlette.exceptions import HTTPException  # noqa: PLC0415 - for servers alone

    async def limited() -> Any:
        return await asyncio.wait_for(make(), _SECONDS)

    try:
        return asyncio.run(limited())
    except TimeoutError as error:
        raise rule.violation(f"{call} had not returned after {_SECONDS:g} s") from error
    except (RequestError, HTTPException) as refusal:
        return refusal
    except (Exception, SystemExit) as error:
        raise rule.violation(f"{call} raised {type(error).__name__}: {error}") from error


def _check_middleware(middleware: Middleware) -> None:
    for status, method in ((200, "GET"), (200, "POST"), (404, "GET")):
        sent: list[dict[str, Any]] = []
        calls: list[str] = []
        app = middleware.wrap(_inside(status, calls))
        if not callable(app):
            raise MIDDLEWARE.violation(f"wrap returned a {type(app).__name__}, no application")
        refused = _run(MIDDLEWARE, "it", lambda: _ask(app, method, sent))  # noqa: B023 - at once
        if isinstance(refused, Exception) and not sent:
            _check_refusal(refused)
            continue
        _check_messages(MIDDLEWARE, f"for a {method}", sent)
        kinds = [message["type"].removeprefix("http.response.") for message in sent]
        if len(calls) > 1:
            raise MIDDLEWARE.violation(f"it called the application {len(calls)} times")
        if kinds.count("start") != 1 or kinds[0] != "start":
            raise MIDDLEWARE.violation(f"for a {method} it sent {kinds or 'nothing'}")
        if sent[-1].get("more_body", False) or len(kinds) < 2:
            raise MIDDLEWARE.violation(f"for a {method} its answer has no end: {kinds}")


def _check_refusal(refusal: Exception) -> None:
    """Check that HTTP can carry a refusal.

    Raises:
        Violation: it cannot.
    """
    from starlette.exceptions import HTTPException  # noqa: PLC0415 - for servers alone

    if isinstance(refusal, HTTPException):
        wrong = fault_of_refusal(refusal.status_code, refusal.headers, refusal.detail)
        if wrong is not None:
            raise MIDDLEWARE.violation(wrong)


def _inside(status: int, calls: list[str]) -> ASGIApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        calls.append(scope["path"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"he", "more_body": True})
        await send({"type": "http.response.body", "body": b"y", "more_body": False})

    return app


async def _ask(app: ASGIApp, method: str, sent: list[dict[str, Any]]) -> None:
    scope = _scope(method, "/v1/chat/completions")
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(_SECONDS * 2)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await app(scope, receive, send)


def _check_transform(transform: Transform) -> None:
    call = Call(
        request_id="req-1",
        path="/v1/chat/completions",
        client=Client(name="anybody"),
        headers={"host": "localhost"},
    )
    for name, original in (("request", _BODY), ("response", _ANSWER)):
        change = getattr(transform, name)
        if change is None:
            continue
        body = copy.deepcopy(original)
        result = _run(TRANSFORM, name, lambda: change(call, body))  # noqa: B023 - called at once
        if isinstance(result, Exception):
            if name == "response":
                raise TRANSFORM.violation(f"response raised {type(result).__name__}: {result}")
        elif not isinstance(result, dict):
            raise TRANSFORM.violation(f"{name} returned {short_repr(result)}, expected a dict")
    if transform.event is None:
        return
    try:
        event = transform.event(call, copy.deepcopy(_EVENT))
    except Exception as error:
        raise TRANSFORM.violation(f"event raised {type(error).__name__}: {error}") from error
    if event is not None and not isinstance(event, dict):
        raise TRANSFORM.violation(f"event returned {short_repr(event)}, expected a dict or None")


def _check_authenticator(authenticator: Authenticator) -> None:
    for headers in _HEADERS:
        call = f"authenticate of {short_repr(headers)[:80]}"
        client = _run(
            AUTHENTICATOR,
            call,
            lambda: authenticator.authenticate({"host": "localhost", **headers}, "/v1/models"),  # noqa: B023
        )
        if client is not None and not isinstance(client, Client | Exception):
            raise AUTHENTICATOR.violation(f"{call} returned {short_repr(client)}")


def _check_store(store: ResponseStore) -> None:
    """Check that a store keeps the records of each owner separately.

    Raises:
        Violation: it does not.
    """
    first, other, name = "hardpoint kit: a", "hardpoint kit: b", "resp_0123456789abcdef"

    def expect(call: str, make: Callable[[], Awaitable[Any]], expected: Any) -> None:
        answer = _run(STORE, call, make)
        if type(answer) is not type(expected) or answer != expected:
            raise STORE.violation(
                f"{call} returned {short_repr(answer)}, expected {short_repr(expected)}"
            )

    for content in (b'{"a": 1}', b"\x00\xff" * 1000):
        expect("put", lambda: store.put(first, name, content), None)  # noqa: B023 - at once
        expect("get of a stored record", lambda: store.get(first, name), content)
    expect("get by another owner", lambda: store.get(other, name), None)
    expect("get of another id", lambda: store.get(first, f"{name}0"), None)
    expect("delete by another owner", lambda: store.delete(other, name), False)
    expect("get after that", lambda: store.get(first, name), content)
    expect("delete", lambda: store.delete(first, name), True)
    expect("get of a deleted record", lambda: store.get(first, name), None)
    expect("delete of a deleted record", lambda: store.delete(first, name), False)


@dataclass(frozen=True)
class _Context:
    """A `ServerContext` with the shortest request bodies that their types allow."""

    engine: Any
    version: str = "0"

    async def read(self, request: Request, type_: type[StructT]) -> StructT:  # noqa: ARG002
        """Return a body as short as its type allows.

        Raises:
            RequestError: the type wants more than that.
        """
        return typed.convert(_shortest(types.type_info(type_)), type_, path="", error=RequestError)

    async def body_parts(self, request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
        async for part in request.stream():
            yield part[:max_bytes]

    async def ask(self, client: Client, path: str, body: bytes) -> Response:  # noqa: ARG002
        """Raise an error: there are no routes to ask."""
        raise _AbsentError(f"the route asks {path}, which a server has")

    def model(self, name: str | None) -> str:
        """Return the name; the model has any."""
        return name or "model"

    def check_prompt(self, *parts: Any, name: str = "prompt") -> None:
        """Allow any size."""

    def options(self, request: Request, asked: Any) -> RequestOptions:  # noqa: ARG002
        return {}

    async def while_connected(
        self,
        request: Request,  # noqa: ARG002
        work: Coroutine[Any, Any, T],
        *,
        generates: bool = False,  # noqa: ARG002
    ) -> T:
        return await work


def _check_route(route: Route, seconds: float) -> None:
    """Check the answer of a route to each of its methods.

    Args:
        seconds: after which it is not waited for any longer; it may wait for others.

    Raises:
        Violation: it is missing, malformed, or cannot be sent.
    """
    from starlette.exceptions import HTTPException  # noqa: PLC0415 - for servers alone

    for method in route.methods:
        call = f"its {method} {route.path}"
        sent: list[dict[str, Any]] = []
        try:
            asyncio.run(asyncio.wait_for(_ask_route(route, method, call, sent), seconds))
        except (TimeoutError, RequestError, HTTPException, Violation) as ended:
            if isinstance(ended, Violation):
                raise
            continue
        except (Exception, SystemExit) as error:
            if _needs_server(error):
                continue
            raise ROUTE.violation(f"{call} raised {type(error).__name__}: {error}") from error
        _check_messages(ROUTE, call, sent)


def _check_messages(rule: Rule, call: str, sent: list[dict[str, Any]]) -> None:
    """Check that HTTP can carry the starts of an answer.

    Raises:
        Violation: it cannot.
    """
    for message in sent:
        if message["type"] != "http.response.start":
            continue
        headers = message.get("headers", ())
        if isinstance(headers, str | bytes) or not hasattr(headers, "__iter__"):
            raise rule.violation(f"{call}: it answered with headers that are no pairs of bytes")
        if (wrong := fault_of_head(message.get("status"), list(headers))) is not None:
            raise rule.violation(f"{call}: {wrong}")


async def _ask_route(route: Route, method: str, call: str, sent: list[dict[str, Any]]) -> None:
    from starlette.requests import Request  # noqa: PLC0415 - for servers alone
    from starlette.responses import Response  # noqa: PLC0415 - as above

    scope = _scope(method, re.sub(r"{\w+(:\w+)?}", "1", route.path))
    scope["path_params"] = {
        name: 1 if kind == ":int" else 1.0 if kind == ":float" else "1"
        for name, kind in re.findall(r"{(\w+)(:\w+)?}", route.path)
    }
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    request: Any = Request(scope, receive)  # an endpoint takes that, or a WebSocket
    answer: Any = await route.endpoint(request)
    if isinstance(answer, msgspec.Struct):
        msgspec.json.encode(answer)
    elif isinstance(answer, Response):
        await answer(scope, receive, send)
        ended = sent and not sent[-1].get("more_body", False)
        if not ended or sent[-1]["type"] != "http.response.body":
            raise ROUTE.violation(f"{call} did not finish its answer")
    else:
        raise ROUTE.violation(f"{call} returned {short_repr(answer)}")


def _scope(method: str, path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
        "state": {"client": Client(name="anybody"), "request_id": "req-1"},
    }


def _needs_server(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _AbsentError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _shortest(info: types.Type) -> Any:
    match info:
        case types.Metadata():
            return _shortest(info.type)
        case types.StructType():
            fields = {f.encode_name: _shortest(f.type) for f in info.fields if f.required}
            return fields | ({info.tag_field: info.tag} if info.tag_field else {})
        case types.StrType():
            return "x" * max(1, info.min_length or 0)
        case types.IntType() | types.FloatType():
            least = info.ge if info.ge is not None else (info.gt or 0) + 1
            return info.multiple_of or least
        case types.ListType():
            return [_shortest(info.item_type)] * (info.min_length or 0)
        case types.LiteralType():
            return info.values[0]
        case types.EnumType():
            return next(iter(info.cls)).value
        case types.UnionType():
            return _shortest(info.types[0])
    return _PLAIN.get(type(info), {})


_PLAIN: dict[type[types.Type], Any] = {types.BoolType: False, types.NoneType: None}
