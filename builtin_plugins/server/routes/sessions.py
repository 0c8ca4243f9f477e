"""`/v1/sessions/{session}/release`: blocks of a conversation that are retained no longer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins.server import Route
from hardpoint.typed import Strict


class ReleaseRequest(Strict):
    """A session to release.

    Attributes:
        cache_salt: salt of the requests of the session.
    """

    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


class ReleasedSession(msgspec.Struct):
    """The outcome of a release.

    Attributes:
        outcome: "missing" if no session of that name, by requests with the same key and salt,
            retains anything.
    """

    session: str
    outcome: Literal["accepted", "missing"]


class SessionRoutes:
    """The route for conversations whose blocks are retained."""

    def __init__(self, service: Service) -> None:
        """Serve what the service does."""
        self._service = service

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                path="/v1/sessions/{session}/release",
                endpoint=self.release,
                methods=("POST",),
                summary="Let what a conversation retains in the prefix cache be evicted as others.",
                request_type=ReleaseRequest,
                response_type=ReleasedSession,
            )
        ]

    async def release(self, request: Request) -> Response:
        """Release a session of the client that calls."""
        call, asked = await self._service.read(request, ReleaseRequest)
        session = request.path_params["session"]
        salt = self._service.extras(call, asked)["cache_salt"]

        async def work() -> ReleasedSession:
            arguments = {"session": session, "cache_salt": salt}
            outcome = await self._service.engine.call_part("retention", "release", arguments)
            return ReleasedSession(session, outcome)

        return await self._service.answer(request, call, work)
