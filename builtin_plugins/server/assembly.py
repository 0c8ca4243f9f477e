"""Puts a server together: an engine, its plugins' extensions, and the two applications."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator as AsyncIterator
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.plugins import ConfigError
from hardpoint.plugins.server import (
    AsyncGenerator,
    Authenticator,
    Client,
    InstalledExtension,
    Middleware,
    Route,
    Transform,
)

from .access.counts import Counts
from .access.cross_origin import CrossOrigin
from .access.guard import Guard
from .application import AdminAuthentication, Application, Authentication
from .config import ServerConfig
from .dialects.chat.route import ChatDialect
from .dialects.completions.route import CompletionDialect
from .dialects.invocations import InvocationRoute
from .dialects.messages import MessagesDialect
from .dialects.pooling.io_processors import PoolingRoute
from .dialects.pooling.vectors import VectorRoutes
from .dialects.rendering import RenderRoute
from .dialects.responses.route import ResponsesDialect
from .dialects.sessions import SessionRoutes
from .dialects.tokenization import TokenRoutes
from .dialects.tokens import GenerateDialect
from .extensions import Transforms, backgrounds_of, in_order, routes_of, store_of
from .faults import Owned, ServerFaults
from .openapi import OpenAPIRoute
from .operations.addresses import BoundAddress
from .requests.reading import call_of
from .routes.admin import AdminRoutes
from .routes.api_docs import api_docs_routes
from .routes.models import StatusRoutes
from .routes.page import live_routes, page_routes, with_page_files
from .service import Service
from .streaming import while_connected
from .timing import without_limit

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)


@dataclass(frozen=True)
class Applications:
    """The applications of a server.

    Attributes:
        users: application of the users' address.
        admin: application of the admin address; None without one.
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
        *StatusRoutes(service).routes(),
        *OpenAPIRoute(service).routes(),
        *ChatDialect(service).routes(),
        *RenderRoute(service).routes(),
        *CompletionDialect(service).routes(),
        *ResponsesDialect(service).routes(),
        *MessagesDialect(service).routes(),
        *GenerateDialect(service).routes(),
        *TokenRoutes(service).routes(),
        *InvocationRoute(service).routes(),
        *VectorRoutes(service).routes(),
        *PoolingRoute(service).routes(),
        *SessionRoutes(service).routes(),
        *page,
    ]


def admin_routes(service: Service, page: Sequence[Route] = ()) -> list[Route]:
    """Return the server's own routes of the admin address.

    Args:
        page: those of the live view.
    """
    status = ("/health", "/version", "/metrics", "/load")
    return [
        *page,
        *AdminRoutes(service).routes(),
        *(route for route in StatusRoutes(service).routes() if route.path in status),
    ]


def assemble(
    engine: AsyncGenerator,
    version: str,
    *,
    bound: str | None = "127.0.0.1",
    authenticators: Sequence[InstalledExtension] = (),
    admin: BoundAddress | None = None,
    admin_authenticators: Sequence[InstalledExtension] = (),
    counts: Counts | None = None,
    of_admin: bool = False,
) -> Applications:
    """Return the applications that serve an engine.

    Args:
        version: version of Hardpoint.
        bound: address that the users' application listens on; None is a Unix socket.
        authenticators: the server's own, asked before those of plugins.
        admin: address of the administrators; None is no address.
        admin_authenticators: authenticators of the administrators; plugins have no part in them.
        counts: counts of several processes that serve; None are those of this one.
        of_admin: whether other processes serve the users.

    Raises:
        ConfigError, PluginError: an extension is wrong, or two are at odds; administrators have
            keys and no one to ask for them.
    """
    settings = engine.config.table(ServerConfig)
    _check_root_path(settings.root_path)
    counts = counts or Counts()
    faults = ServerFaults(settings.extension_seconds, engine.config.plugins.slow_seconds, counts)
    service = Service(engine, version, faults, counts, of_admin=of_admin)
    context = _Context(engine=engine, version=version, service=service)
    installed = [*authenticators, *engine.plugins.server_extensions(context)]
    service.transforms = Transforms(in_order(installed, Transform), faults)
    service.response_store = store_of(installed, settings.workers)
    service.background = backgrounds_of(installed)
    page = [*page_routes(), *api_docs_routes()] if settings.page else []
    for_users = [item for item in installed if not _is_for_admin(item)]
    routes = routes_of(for_users, core_routes(service, page), settings.replace_routes)
    service.routes = [route for route, _ in routes]
    checks: list[Owned] = in_order(installed, Authenticator)
    service.has_keys = bool(checks)
    uncounted = [route.path for route, _ in routes if not route.is_counted]
    opened = with_page_files(settings.open_routes, page)
    authentication = Authentication(checks, faults, opened, counts=counts, uncounted=uncounted)
    users = Application(
        service,
        routes,
        faults,
        guard=Guard(bound, settings.allowed_hosts, settings.allowed_origins),
        authentication=authentication,
        middleware=in_order(installed, Middleware),
        cross_origin=CrossOrigin(settings.allowed_origins),
    )
    context.users = users
    if admin is None:
        return Applications(service, users)
    admins = in_order(admin_authenticators, Authenticator)
    return Applications(service, users, _for_admins(service, faults, admin, installed, admins))


@dataclass(kw_only=True)
class _Context:
    """The `ServerContext` of extensions; their bodies and work have limits of their own."""

    engine: AsyncGenerator
    version: str
    service: Service
    users: Application | None = None

    async def read(self, request: Request, type_: type[StructT]) -> StructT:
        with without_limit():
            return await self.service.requests.read_plain(request, type_)

    async def body_parts(self, request: Request, max_bytes: int) -> AsyncIterator[bytes, None]:
        parts = self.service.requests.receiver.parts(request, max_bytes)
        async with contextlib.aclosing(parts):
            while True:
                with without_limit():
                    part = await anext(parts, None)
                if part is None:
                    return
                yield part

    async def ask(self, client: Client, path: str, body: bytes) -> Response:
        if self.users is None:
            raise RuntimeError("ask: the server has no routes yet, while its extensions are made")
        return await self.users.ask(client, path, body)

    def model(self, name: str | None) -> str:
        return self.service.base_model(name)

    def check_prompt(self, *parts: Any, name: str = "prompt") -> None:
        self.service.check_prompt(*parts, name=name)

    def options(self, request: Request, asked: Any) -> Any:
        return self.service.extras(call_of(request), asked)

    async def while_connected(
        self, request: Request, work: Coroutine[Any, Any, T], *, generates: bool = False
    ) -> T:
        with without_limit(), contextlib.closing(work):
            counted = self.service.counted(lambda: work) if generates else work
            return await while_connected(request, counted)


def _for_admins(
    service: Service,
    faults: ServerFaults,
    address: BoundAddress,
    installed: Sequence[InstalledExtension],
    administrators: Sequence[Owned],
) -> Application:
    """Return the application of the administrators' address.

    Raises:
        ConfigError: they have keys, and none can be checked.
    """
    settings = service.engine.config.table(ServerConfig)
    if not administrators and (address.host is not None or settings.admin_keys_file is not None):
        raise ConfigError("server.admin_keys_file: expected keys that can be checked, got none")
    live = live_routes() if settings.page else []
    added = [item for item in installed if _is_for_admin(item)]
    return Application(
        service,
        routes_of(added, admin_routes(service, live), ()),
        faults,
        guard=Guard(address.host, None),
        authentication=AdminAuthentication(administrators, faults, [route.path for route in live]),
        is_admin=True,
    )


def _check_root_path(path: str) -> None:
    if path and not re.fullmatch(r"(/[^/?#]+)+", path):
        raise ConfigError(
            f"server.root_path: expected a path such as '/llm', without a slash at the end, got "
            f"{path!r}"
        )


def _is_for_admin(item: InstalledExtension) -> bool:
    return isinstance(item.extension, Route) and item.extension.admin
