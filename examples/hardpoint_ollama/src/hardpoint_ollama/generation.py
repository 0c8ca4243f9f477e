"""The routes `/api/chat` and `/api/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.plugins.server import Route, ServerContext

from .fields import ChatRequest, GenerateRequest, TextRequest
from .forwarding import Forwarding, json_answer
from .lines import AnswerLines, TextAnswer
from .mapping import chat_body, generate_body
from .names import served_name

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class Generation:
    """Generates text by the server's own routes."""

    def __init__(self, server: ServerContext, forwarding: Forwarding) -> None:
        """Use a server."""
        self._server, self._forwarding = server, forwarding

    def routes(self) -> Sequence[Route]:
        """Return the routes."""
        return [
            Route(
                path="/api/chat",
                endpoint=self.chat,
                methods=("POST",),
                summary="Answer a conversation (Ollama).",
                request_type=ChatRequest,
            ),
            Route(
                path="/api/generate",
                endpoint=self.generate,
                methods=("POST",),
                summary="Answer a prompt (Ollama).",
                request_type=GenerateRequest,
            ),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._server.read(request, ChatRequest)
        if not body.messages:
            return await self._loaded(
                request, body, {"message": {"role": "assistant", "content": ""}}
            )
        return self._answer(body, "/v1/chat/completions", chat_body(body), is_chat=True)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt."""
        body = await self._server.read(request, GenerateRequest)
        if not (body.prompt or body.images or body.suffix):
            return await self._loaded(request, body, {"response": ""})
        return self._answer(body, *generate_body(body), is_chat=False)

    def _answer(
        self, body: TextRequest, path: str, content: dict[str, Any], *, is_chat: bool
    ) -> Response:
        content["model"] = served_name(self._server, body.model)
        lines = AnswerLines(body.model, is_chat=is_chat)
        return TextAnswer(
            self._server, self._forwarding, path, content, lines, is_stream=body.stream
        )

    async def _loaded(
        self, request: Request, body: TextRequest, content: dict[str, Any]
    ) -> Response:
        """Return the answer to a request without a prompt, which loads the model at Ollama."""
        name = served_name(self._server, body.model)
        if (error := await self._forwarding.check_model(request, name)) is not None:
            return error
        lines = AnswerLines(body.model, is_chat="message" in content)
        return json_answer({**lines.head(), **content, "done": True, "done_reason": "load"})
