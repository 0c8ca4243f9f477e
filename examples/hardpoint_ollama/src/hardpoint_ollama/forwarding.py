"""Forwarding to the server's own routes, which check limits and apply middleware."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.plugins.server import Middleware, Route

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


def error_answer(status: int, message: str) -> Response:
    """Return an error as Ollama has it: `{"error": "..."}`."""
    return json_answer({"error": message}, status)


def json_answer(content: Any, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_text(body: bytes) -> str:
    """Return the message of an error of the server's own routes, or of Ollama's."""
    try:
        error = msgspec.json.decode(body)["error"]
        return error if isinstance(error, str) else str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")


class Forwarding:
    """The application of the server, inside of the middleware of other plugins."""

    def __init__(self) -> None:
        """Wait for the application."""
        self._app: ASGIApp | None = None

    def middleware(self, routes: Sequence[Route]) -> Middleware:
        """Return a middleware that receives the application.

        Errors of routes get the form that Ollama's clients read.

        Args:
            routes: routes of Ollama's API.
        """
        return Middleware(wrap=functools.partial(self._wrap, {route.path for route in routes}))

    def _wrap(self, paths: Set[str], app: ASGIApp) -> ASGIApp:
        self._app = app

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            is_own = scope["type"] == "http" and scope["path"] in paths
            await app(scope, receive, _ErrorConverter(send) if is_own else send)

        return wrapped

    async def forward(self, request: Request, path: str, body: Any, send: Send) -> None:
        """Send a JSON body to another route of the server as the same client.

        Args:
            request: request of the client.
            body: plain data; None sends a GET.
            send: receives the messages of the answer.

        Raises:
            HTTPException: the server has not started.
        """
        if self._app is None:
            raise HTTPException(503, "the server has not started")
        content = b"" if body is None else msgspec.json.encode(body)
        state = {**request.scope["state"]}
        scope: Scope = {
            **request.scope,
            "method": "GET" if body is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": _headers(request, len(content)),
            "state": state,
        }
        parts = [content]

        async def receive() -> Message:
            if not parts:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": parts.pop(), "more_body": False}

        await self._app(scope, receive, send)
        if "refused" in state:
            request.scope["state"]["refused"] = state["refused"]

    async def check_model(self, request: Request, name: str) -> Response | None:
        """Return the error for the name of a model or adapter that the server does not have."""
        status, answer = await self.fetch(request, f"/v1/models/{name}", None)
        return None if status == 200 else error_answer(status, error_text(answer))

    async def fetch(self, request: Request, path: str, body: Any) -> tuple[int, bytes]:
        """Return the status and the body of another route's answer."""
        status, parts = 500, []

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self.forward(request, path, body, send)
        return status, b"".join(parts)


class _ErrorConverter:
    """Passes an answer on; an error becomes `{"error": "..."}`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """Pass a message on; the messages of an error wait for its end."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                answer = error_answer(self._start["status"], error_text(self._body))
                others = [h for h in self._start["headers"] if not h[0].startswith(b"content-")]
                await self._send({**self._start, "headers": [*answer.raw_headers, *others]})
                await self._send({"type": "http.response.body", "body": answer.body})


def _headers(request: Request, length: int) -> list[tuple[bytes, bytes]]:
    """Return the headers of a forwarded request, without the headers of its body."""
    others = [pair for pair in request.headers.raw if not pair[0].startswith(b"content-")]
    return [
        *others,
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
