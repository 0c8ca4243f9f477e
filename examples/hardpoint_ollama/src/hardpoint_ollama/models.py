"""The routes `/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Route, ServerContext
from hardpoint.typed import shown

from .fields import ShowRequest
from .forwarding import Forwarding, error_answer, error_text, json_answer
from .names import served_name

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_CAPABILITIES = {"generate": "completion", "embed": "embedding"}
_FOREVER = "9999-12-31T23:59:59Z"


class Models:
    """Lists and describes the models of a server."""

    def __init__(self, server: ServerContext, forwarding: Forwarding) -> None:
        """Use a server."""
        self._server, self._forwarding = server, forwarding

    def routes(self) -> Sequence[Route]:
        """Return the routes."""
        gets = {
            "/api/tags": (self.tags, "List the models (Ollama)."),
            "/api/ps": (self.processes, "List the loaded models (Ollama)."),
            "/api/version": (self.version, "Return the version (Ollama)."),
        }
        return [
            Route(
                path="/api/show",
                endpoint=self.show,
                methods=("POST",),
                summary="Describe a model (Ollama).",
                request_type=ShowRequest,
                is_counted=False,
            ),
            *(
                Route(path=path, endpoint=run, summary=summary, is_counted=False)
                for path, (run, summary) in gets.items()
            ),
        ]

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """Return the version of Hardpoint."""
        return json_answer({"version": self._server.version})

    async def tags(self, request: Request) -> Response:
        """List the models."""
        status, cards = await self._cards(request)
        if status != 200:
            return error_answer(status, error_text(cards))
        return json_answer({"models": [_entry(card) for card in _listed(cards)]})

    async def processes(self, request: Request) -> Response:
        """List the loaded models."""
        status, cards = await self._cards(request)
        if status != 200:
            return error_answer(status, error_text(cards))
        loaded = [
            {
                **_entry(card),
                "expires_at": _FOREVER,
                "size_vram": 0,
                "context_length": card["max_model_len"],
            }
            for card in _listed(cards)
        ]
        return json_answer({"models": loaded})

    async def show(self, request: Request) -> Response:
        """Describe a model."""
        body = await self._server.read(request, ShowRequest)
        name = body.model or body.name
        if not name:
            raise RequestError("model: expected the name of a model, got none")
        status, cards = await self._cards(request)
        if status != 200:
            return error_answer(status, error_text(cards))
        served = served_name(self._server, name)
        card = next((card for card in _listed(cards) if card["id"] == served), None)
        if card is None:
            return error_answer(404, f"model {shown(name, 200)} not found")
        return json_answer(self._description(card))

    async def _cards(self, request: Request) -> tuple[int, bytes]:
        return await self._forwarding.fetch(request, "/v1/models", None)

    def _description(self, card: dict[str, Any]) -> dict[str, Any]:
        engine = self._server.engine
        tasks = engine.model.supported_tasks
        capabilities = [_CAPABILITIES[task] for task in tasks if task in _CAPABILITIES]
        if engine.model.takes_images:
            capabilities.append("vision")
        template = getattr(engine.tokenizer, "chat_template", None) or ""
        if engine.config.tools.parser != "none":  # "auto" supports calls of any model
            capabilities.append("tools")
        if has_thinking(engine.config.reasoning.parser, template):
            capabilities.append("thinking")
        parameters = [f"{name} {value}" for name, value in card["default_sampling"].items()]
        entry = _entry(card)
        return {
            "modelfile": f"FROM {card['root']}\n",
            "parameters": "\n".join(parameters),
            "template": template,
            "details": entry["details"],
            "model_info": {"general.context_length": card["max_model_len"]},
            "capabilities": capabilities,
            "modified_at": entry["modified_at"],
        }


def has_thinking(parser: str, template: str) -> bool:
    """Return whether answers may have reasoning: "auto" finds a parser by the chat template."""
    return "think" in template if parser == "auto" else parser != "none"


def _listed(cards: bytes) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = msgspec.json.decode(cards)["data"]
    return listed


def _entry(card: dict[str, Any]) -> dict[str, Any]:
    """Return a model of a list; its digest is a hash of its names and its version of weights."""
    identity = "\n".join((card["id"], card["root"], str(card["weight_version"])))
    return {
        "name": card["id"],
        "model": card["id"],
        "modified_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "size": 0,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": {
            "parent_model": card["parent"] or "",
            "format": "",
            "family": "",
            "families": None,
            "parameter_size": "",
            "quantization_level": "",
        },
    }
