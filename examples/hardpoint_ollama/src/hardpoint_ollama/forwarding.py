"""Forwarding to the server's own routes, which check limits and apply middleware."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Middleware

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


def error_answer(status: int, message: str) -> Response:
    """Return an error as Ollama has it: `{"error": "..."}`."""
    return json_answer({"error": message}, status)


def json_answer(content: Any, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_text(body: bytes) -> str:
    """Return the message of an error of the server's own routes."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")


def with_errors(endpoint: Endpoint) -> Endpoint:
    """Answer a wrong request with an error as Ollama has it."""

    @functools.wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            return error_answer(400, str(error))

    return wrapped


class Forwarding:
    """The application of the server, inside of the middleware of other plugins."""

    def __init__(self) -> None:
        """Wait for the application."""
        self._app: ASGIApp | None = None

    def middleware(self) -> Middleware:
        """Return a middleware without effects, which receives the application."""
        return Middleware(wrap=self._wrap)

    def _wrap(self, app: ASGIApp) -> ASGIApp:
        self._app = app
        return app

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


def _headers(request: Request, length: int) -> list[tuple[bytes, bytes]]:
    """Return the headers of a forwarded request, without the headers of its body."""
    others = [pair for pair in request.headers.raw if not pair[0].startswith(b"content-")]
    return [
        *others,
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
