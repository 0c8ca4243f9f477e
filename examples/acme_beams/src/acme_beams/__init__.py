"""Adds the route `POST /acme/beams`: beam search by forks of a request."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from hardpoint.plugins import Annotated, Meta, SamplingParams, hookimpl
from hardpoint.plugins.server import Route, ServerContext

from .search import Beam, BeamSearch, beam_search

__all__ = ["Beam", "BeamSearch", "beam_search"]

contract = 1


class BeamRequest(BeamSearch):
    """A prompt with the parameters of a beam search.

    Attributes:
        timeout: seconds that the search may take.
    """

    prompt: str | list[int]
    max_tokens: Annotated[int, Meta(ge=1)]
    priority: int = 0
    timeout: Annotated[float, Meta(gt=0)] | None = None


class BeamAnswer(msgspec.Struct):
    """The outputs that were found, the best first."""

    beams: list[Beam]


@hookimpl
def server_extensions(server: ServerContext) -> list[Route]:
    """Return the route."""

    async def search(request: Request) -> BeamAnswer:
        body = await server.read(request, BeamRequest)
        server.check_prompt(body.prompt)
        params, options = (
            SamplingParams(max_tokens=body.max_tokens),
            server.options(request, body),
        )
        work = beam_search(server.engine, body.prompt, params, body, **options)
        return BeamAnswer(await server.while_connected(request, work, generates=True))

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
