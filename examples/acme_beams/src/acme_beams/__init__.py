"""Beam search over HTTP, as a route that forks a request; `beam_search` is for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from hardpoint.plugins import HookContext, SamplingParams, hookimpl
from hardpoint.plugins.server import Route, ServerContext
from hardpoint.typed import Strict

from .search import Beam, beam_search

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Beam", "Beams", "beam_search"]


class BeamRequest(Strict):
    """A prompt whose likeliest outputs are asked for.

    Attributes:
        n: number of outputs to return; None is all beams.
        early_stopping: whether `num_beams` outputs are enough, though a better one may come.
        timeout: seconds that the search may take.
    """

    prompt: str | list[int]
    max_tokens: Annotated[int, Meta(ge=1)]
    num_beams: Annotated[int, Meta(ge=1, le=32)] = 4
    n: Annotated[int, Meta(ge=1)] | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
    priority: int = 0
    timeout: Annotated[float, Meta(gt=0)] | None = None


class BeamAnswer(msgspec.Struct):
    """The outputs that were found, the best first."""

    beams: list[Beam]


class Beams:
    """Adds the route `POST /acme/beams`: beam search by forks of a request."""

    contract = 1

    def __init__(self, context: HookContext) -> None:
        """Keep nothing."""

    @hookimpl
    def server_extensions(self, server: ServerContext) -> Sequence[Route]:
        """Return the route."""

        async def search(request: Request) -> BeamAnswer:
            asked = await server.read(request, BeamRequest)
            server.check_prompt(asked.prompt)
            work = beam_search(
                server.engine,
                asked.prompt,
                SamplingParams(max_tokens=asked.max_tokens),
                asked.num_beams,
                length_penalty=asked.length_penalty,
                early_stopping=asked.early_stopping,
                **server.options(request, asked),
            )
            found = await server.while_connected(request, work, generates=True)
            return BeamAnswer(found[: asked.n])

        return [
            Route(
                path="/acme/beams",
                endpoint=search,
                methods=("POST",),
                summary="Return the likeliest outputs.",
                request_type=BeamRequest,
                response_type=BeamAnswer,
            )
        ]
