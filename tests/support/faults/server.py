"""Faults of server extensions: each answers a call of a client, or stops the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from starlette.responses import PlainTextResponse

from hardpoint.plugins import hookimpl
from hardpoint.plugins.server import (
    Authenticator,
    Background,
    Middleware,
    ResponseStore,
    Route,
    Transform,
)
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.waiting import wait_until

KIND = "server_extensions"
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


class Broken:
    """Adds one extension."""

    contract = 1

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    @hookimpl
    def server_extensions(self, server: Any) -> Any:
        return self.make()


def raises(*_: Any) -> Any:
    raise ValueError("broken")


async def raises_later(*_: Any) -> Any:
    raise ValueError("broken")


def returns(value: Any) -> Callable[..., Any]:
    async def function(*_: Any) -> Any:
        return value

    return function


async def answers(request: Any) -> Any:
    return PlainTextResponse("ok")


def wrapping(application: Any) -> Callable[[Any], Any]:
    """Return a function that wraps an application into another one."""
    return lambda app: application


def store_with(**functions: Any) -> ResponseStore:
    """Return a store that has nothing, but for these functions."""
    none = {"put": returns(None), "get": returns(None), "delete": returns(False)}
    return ResponseStore(**{**none, **functions})


EXTENSIONS = {
    ("hook", "raises"): raises,
    ("hook", "returns None"): lambda: None,
    ("hook", "returns text"): lambda: "nonsense",
    ("hook", "returns numbers"): lambda: [7],
    ("Route.endpoint", "raises"): lambda: [Route(path="/acme", endpoint=raises_later)],
    ("Route.endpoint", "returns None"): lambda: [Route(path="/acme", endpoint=returns(None))],
    ("Route.endpoint", "returns text"): lambda: [Route(path="/acme", endpoint=returns("text"))],
    ("Route.endpoint", "is plain"): lambda: [Route(path="/acme", endpoint=raises)],
    ("Middleware.wrap", "raises"): lambda: [Middleware(wrap=raises)],
    ("Middleware.wrap", "returns None"): lambda: [Middleware(wrap=lambda app: None)],
    ("Middleware", "raises"): lambda: [Middleware(wrap=wrapping(raises_later))],
    ("Middleware", "answers nothing"): lambda: [Middleware(wrap=wrapping(returns(None)))],
    ("Transform.request", "raises"): lambda: [Transform(request=raises_later)],
    ("Transform.request", "returns None"): lambda: [Transform(request=returns(None))],
    ("Transform.request", "returns text"): lambda: [Transform(request=returns("text"))],
    ("Transform.response", "raises"): lambda: [Transform(response=raises_later)],
    ("Transform.response", "returns None"): lambda: [Transform(response=returns(None))],
    ("Transform.event", "raises"): lambda: [Transform(event=raises)],
    ("Transform.event", "returns None"): lambda: [Transform(event=lambda call, event: None)],
    ("Transform.event", "returns text"): lambda: [Transform(event=lambda call, event: "text")],
    ("Authenticator", "raises"): lambda: [Authenticator(authenticate=raises_later)],
    ("Authenticator", "returns text"): lambda: [Authenticator(authenticate=returns("text"))],
    ("Background", "raises"): lambda: [Background(run=raises_later)],
    ("Background", "is plain"): lambda: [Background(run=raises)],
    ("ResponseStore.get", "raises"): lambda: [store_with(get=raises_later)],
    ("ResponseStore.get", "returns text"): lambda: [store_with(get=returns("text"))],
    ("ResponseStore.delete", "returns None"): lambda: [store_with(delete=returns(None))],
    ("ResponseStore", "is plain"): lambda: [store_with(put=raises)],
}


def outcomes() -> Iterator[tuple[tuple[str, str, str], dict[str, str]]]:
    """Yield each case and its consequences."""
    for (part, fault), make in EXTENSIONS.items():
        yield (KIND, part, fault), outcome(part, make)


def outcome(part: str, make: Callable[[], Any]) -> dict[str, str]:
    """Return the faults of an extension as a client, or who starts the server, sees them."""
    try:
        context = running(FakeEngine(config=configured(), hooks=(Broken(make),)))
        server = context.__enter__()
    except Exception as error:
        return {"start": f"{type(error).__name__}: {error}"}
    try:
        texts = {"answer": shown(ask(server, part))}
        if faults := server.client.get("/health").json().get("faults"):
            texts["faults"] = str(faults)
        return texts
    finally:
        context.__exit__(None, None, None)


def ask(server: Any, part: str) -> Any:
    if part == "Route.endpoint":
        return server.client.get("/acme")
    if part == "ResponseStore.get":
        return server.client.get("/v1/responses/resp_1")
    if part == "ResponseStore.delete":
        return server.client.delete("/v1/responses/resp_1")
    if part == "Background":
        wait_until(lambda: server.service.faults.counts)
    return server.post(CHAT, {**ASK, "stream": part == "Transform.event"})


def shown(response: Any) -> str:
    """Return the status of an answer, and the error in it."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    errors = [line for line in lines if '"error"' in line]
    return f"{response.status_code} {errors[-1] if errors else 'no error'}"
