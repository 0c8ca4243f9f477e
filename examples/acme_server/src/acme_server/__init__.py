"""Additions of a company to its server: usage per client, a rate limit, a house rule, and keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import HookContext, hookimpl
from hardpoint.plugins.server import ServerContext

from .keys import key_authenticator
from .limits import rate_limit
from .rules import house_rule
from .usage import UsageRoute

if TYPE_CHECKING:
    from hardpoint.plugins.server.extension import ServerExtension

__all__ = ["AcmeServer"]


class AcmeServer:
    """Adds to a server.

    The environment variable ACME_KEYS holds `name=key` pairs with commas between them, since
    secrets stay out of configuration files; without it no key is needed.
    """

    contract = 1

    class Options(plugins.Options):
        """Options of the plugin.

        Attributes:
            per_minute: number of requests that a client may make in a minute.
        """

        per_minute: Annotated[int, Meta(ge=1)] = 600

    options: Options

    def __init__(self, context: HookContext) -> None:
        """Keep the options, which were checked."""
        self.options = context.options

    @hookimpl
    def server_extensions(self, server: ServerContext) -> Sequence[ServerExtension]:
        """Return the route, the middleware, the transform and, with keys, the authenticator."""
        usage = UsageRoute(server)
        limit = rate_limit(self.options.per_minute)
        extensions: list[ServerExtension] = [usage.route(), limit, house_rule(usage.count)]
        if keys := os.environ.get("ACME_KEYS"):
            extensions.append(key_authenticator(keys))
        return extensions
