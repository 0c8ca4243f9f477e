"""The routes `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.plugins.server import Route, ServerContext

from .fields import EmbeddingsRequest, EmbedRequest
from .forwarding import Forwarding, error_answer, error_text, json_answer
from .names import served_name

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class Vectors:
    """Embeds texts by the server's own route."""

    def __init__(self, server: ServerContext, forwarding: Forwarding) -> None:
        """Use a server."""
        self._server, self._forwarding = server, forwarding

    def routes(self) -> Sequence[Route]:
        """Return the routes."""
        return [
            Route(
                path="/api/embed",
                endpoint=self.embed,
                methods=("POST",),
                summary="Embed texts (Ollama).",
                request_type=EmbedRequest,
            ),
            Route(
                path="/api/embeddings",
                endpoint=self.embeddings,
                methods=("POST",),
                summary="Embed a text (Ollama, older).",
                request_type=EmbeddingsRequest,
            ),
        ]

    async def embed(self, request: Request) -> Response:
        """Embed texts."""
        begin = time.perf_counter_ns()
        body = await self._server.read(request, EmbedRequest)
        if not body.input:
            error = await self._forwarding.check_model(
                request, served_name(self._server, body.model)
            )
            return error or json_answer({"model": body.model, "embeddings": []})
        content: dict[str, Any] = {
            "model": body.model,
            "texts": [body.input] if isinstance(body.input, str) else body.input,
            "truncate": "END" if body.truncate else "NONE",
        }
        if body.dimensions:
            content["output_dimension"] = body.dimensions
        status, answer = await self._fetch(request, "/v2/embed", content)
        if status != 200:
            return error_answer(status, _own_names(error_text(answer)))
        decoded = msgspec.json.decode(answer)
        figures = {
            "total_duration": time.perf_counter_ns() - begin,
            "load_duration": 0,
            "prompt_eval_count": decoded["meta"]["billed_units"]["input_tokens"],
        }
        vectors = decoded["embeddings"]["float"]
        return json_answer({"model": body.model, "embeddings": vectors, **figures})

    async def embeddings(self, request: Request) -> Response:
        """Embed a text."""
        body = await self._server.read(request, EmbeddingsRequest)
        if not body.prompt:
            error = await self._forwarding.check_model(
                request, served_name(self._server, body.model)
            )
            return error or json_answer({"embedding": []})
        content = {"model": body.model, "input": body.prompt}
        status, answer = await self._fetch(request, "/v1/embeddings", content)
        if status != 200:
            return error_answer(status, error_text(answer))
        return json_answer({"embedding": msgspec.json.decode(answer)["data"][0]["embedding"]})

    async def _fetch(
        self, request: Request, path: str, content: dict[str, Any]
    ) -> tuple[int, bytes]:
        content["model"] = served_name(self._server, content["model"])
        work = self._forwarding.fetch(request, path, content)
        return await self._server.while_connected(request, work)


def _own_names(message: str) -> str:
    """Return an error of `/v2/embed` with the names of Ollama's fields."""
    for name, own_name in (("texts", "input"), ("output_dimension", "dimensions")):
        if message.startswith(name):
            return own_name + message.removeprefix(name)
    return message
