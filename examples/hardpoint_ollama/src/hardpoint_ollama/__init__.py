"""Ollama's HTTP API for a Hardpoint server: chat, generate, embed and the list of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import hookimpl
from hardpoint.plugins.server import ServerContext

from .forwarding import Forwarding
from .generation import Generation
from .models import Models
from .vectors import Vectors

if TYPE_CHECKING:
    from hardpoint.plugins.server.extension import ServerExtension

__all__ = ["Ollama"]


class Ollama:
    """Adds the routes of Ollama's API to a server."""

    contract = 1

    @hookimpl
    def server_extensions(self, server: ServerContext) -> Sequence[ServerExtension]:
        """Return the routes, and the middleware that receives the application."""
        forwarding = Forwarding()
        routes = [
            *Generation(server, forwarding).routes(),
            *Vectors(server, forwarding).routes(),
            *Models(server, forwarding).routes(),
        ]
        return [forwarding.middleware(routes), *routes]
