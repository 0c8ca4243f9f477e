"""Puts a server together: an engine, its plugins' extensions, and the two applications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.plugins.server import (
    AsyncGenerator,
    Authenticator,
    InstalledExtension,
    Middleware,
    Route,
    ServerContext,
    Transform,
)

from .application import Application
from .authentication import Authentication
from .extensions import Owned, ServerFaults, Transforms, in_order, routes_of
from .guard import Guard
from .routes.chat import ChatRoutes
from .routes.completions import CompletionRoutes
from .routes.messages import MessagesRoutes
from .routes.models import StatusRoutes
from .routes.page import page_routes, with_page_files
from .routes.responses import ResponsesRoutes
from .service import Service


@dataclass(frozen=True)
class Applications:
    """The applications of a server.

    Attributes:
        users: of the users' address.
        admin: of the admin address; None without one.
    """

    service: Service
    users: Application
    admin: Application | None = None


def core_routes(service: Service, page: Sequence[Route] = ()) -> list[Route]:
    """Return the server's own routes.

    Args:
        page: those of the web page.
    """
    return [
        *page,
        *StatusRoutes(service).routes(),
        *ChatRoutes(service).routes(),
        *CompletionRoutes(service).routes(),
        *ResponsesRoutes(service).routes(),
        *MessagesRoutes(service).routes(),
    ]


def assemble(
    engine: AsyncGenerator,
    version: str,
    *,
    bound: str | None = "127.0.0.1",
    authenticators: Sequence[InstalledExtension] = (),
) -> Applications:
    """Return the applications that serve an engine.

    Args:
        version: of Hardpoint.
        bound: address that the users' application listens on; None is a Unix socket.
        authenticators: the server's own, asked before those of plugins.

    Raises:
        ConfigError, PluginError: an extension is wrong, or two are at odds.
    """
    installed = [
        *authenticators,
        *engine.server_extensions(ServerContext(engine=engine, version=version)),
    ]
    faults = ServerFaults()
    transforms = Transforms(in_order(installed, Transform), faults)
    service = Service(engine, version, transforms, faults)
    settings = service.settings
    page = page_routes() if settings.page else []
    routes = routes_of(installed, core_routes(service, page), settings.replace_routes)
    asked: list[Owned] = in_order(installed, Authenticator)
    service.has_keys = bool(asked)
    users = Application(
        service,
        [(route, owned) for route, owned in routes if not route.admin],
        faults,
        guard=Guard(bound, settings.allowed_hosts, settings.allowed_origins),
        authentication=Authentication(asked, faults, with_page_files(settings.open_routes, page)),
        middleware=in_order(installed, Middleware),
    )
    return Applications(service, users)
