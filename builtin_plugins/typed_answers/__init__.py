"""Typed answers: the route `/v1/systemone`, as a plugin of kind `hooks`."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import hookimpl
from hardpoint.plugins.server import Route, ServerContext

contract = 1


@hookimpl
def server_extensions(server: ServerContext) -> Sequence[Route]:
    """Return the route."""
    from .route import SystemOne  # noqa: PLC0415 - for servers alone

    return [SystemOne(server).route()]
