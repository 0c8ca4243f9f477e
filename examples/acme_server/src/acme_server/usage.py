"""The route `/acme/usage`: requests and tokens of a client."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Client, Route, ServerContext
from hardpoint.typed import Strict

if TYPE_CHECKING:
    from starlette.requests import Request


class UsageRequest(Strict):
    """The client to report the usage of.

    Attributes:
        client: name of the client; None is the caller. Only an administrator may ask for others'.
    """

    client: str | None = None


class UsageAnswer(msgspec.Struct):
    """The usage of a client since the server started.

    Attributes:
        requests: number of requests that were answered whole.
        tokens: number of tokens of their prompts and completions.
        waiting: requests of all clients that wait in the engine now.
    """

    client: str
    requests: int
    tokens: int
    waiting: int


class UsageRoute:
    """Counts usage by client, and answers questions about it."""

    def __init__(self, server: ServerContext) -> None:
        """Start at zero."""
        self._server = server
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def count(self, client: str, tokens: int) -> None:
        """Count an answer."""
        self._requests[client] += 1
        self._tokens[client] += tokens

    def route(self) -> Route:
        """Return the route."""
        return Route(
            path="/acme/usage",
            endpoint=self.answer,
            methods=("POST",),
            summary="Return the usage of a client.",
            request_type=UsageRequest,
            response_type=UsageAnswer,
        )

    async def answer(self, request: Request) -> UsageAnswer:
        """Answer a request."""
        body = await self._server.read(request, UsageRequest)
        caller: Client = request.state.client
        name = caller.name if body.client is None else body.client
        if name != caller.name and not caller.admin:
            raise RequestError(f"client: expected your own name, {caller.name!r}, got {name!r}")
        stats = await self._server.engine.engines.scheduler_stats()
        return UsageAnswer(name, self._requests[name], self._tokens[name], stats.num_waiting)
