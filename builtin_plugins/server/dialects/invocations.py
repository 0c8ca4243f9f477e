"""`/invocations`: the route of SageMaker, which passes a body to the route that its fields name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from hardpoint.builtin_plugins.server.receiving import SMALL_BYTES
from hardpoint.builtin_plugins.server.requests.bodies import decode_object
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Route

_PATHS = (
    (("messages",), "/v1/chat/completions"),
    (("prompt",), "/v1/completions"),
    (("query", "documents"), "/v1/rerank"),
    (("text_1", "text_2"), "/v1/score"),
    (("data",), "/pooling"),
)
"""Routes by the fields of their bodies."""


class InvocationRoute:
    """The route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the route."""
        summary = "Answer a body of the chat, completion, embedding, rerank or score routes."
        return [
            Route(path="/invocations", endpoint=self.invoke, methods=("POST",), summary=summary)
        ]

    async def invoke(self, request: Request) -> Response:
        """Answer a body as the route of its fields does.

        Raises:
            AnswerError, RequestError: the body belongs to no route, or the route rejects it.
        """
        async with self._service.requests.receiver.body(request) as body:
            content = bytes(body)
        limits = self._service.settings.limits
        if len(content) <= SMALL_BYTES:
            fields = decode_object(content, limits)
        else:
            fields = await asyncio.to_thread(decode_object, content, limits)
        path = self._path(fields)
        endpoint: Any = next(
            route.endpoint
            for route in self._service.routes
            if route.path == path and "POST" in route.methods
        )
        messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await request.receive()

        request.scope["path"] = path
        response: Response = await endpoint(Request(request.scope, receive))
        return response

    def _path(self, fields: Mapping[str, Any]) -> str:
        tasks = self._service.engine.model.supported_tasks
        for names, path in _PATHS:
            if all(name in fields for name in names):
                is_embedding = path == "/v1/chat/completions" and "generate" not in tasks
                return "/v1/embeddings" if is_embedding else path
        if "input" in fields:
            if "generate" in tasks and "embed" not in tasks:
                return "/v1/responses"
            return "/v1/embeddings" if "embed" in tasks else "/v1/classify"
        known = ", ".join(" and ".join(names) for names, _ in _PATHS)
        raise RequestError(f"body: expected the fields of a route ({known}, input), got others")
