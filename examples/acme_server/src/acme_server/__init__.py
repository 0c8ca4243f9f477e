"""Additions of a company to its server: usage per client, a rate limit, a house rule, and keys."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hardpoint.plugins import hookimpl
from hardpoint.plugins.server import ServerContext, ServerExtension

from .keys import key_authenticator
from .limits import rate_limit
from .rules import house_rule
from .usage import UsageRoute

__all__ = ["AcmeServer"]


class AcmeServer:
    """Adds to a server; settings come from the environment, since hooks have no options.

    ACME_KEYS holds `name=key` pairs with commas between them; without it no key is needed.
    ACME_PER_MINUTE is the number of requests that a client may make in a minute.
    """

    contract = 1

    @hookimpl
    def server_extensions(self, server: ServerContext) -> Sequence[ServerExtension]:
        """Return the route, the middleware, the transform and, with keys, the authenticator."""
        usage = UsageRoute(server)
        limit = rate_limit(int(os.environ.get("ACME_PER_MINUTE", "600")))
        extensions: list[ServerExtension] = [usage.route(), limit, house_rule(usage.count)]
        if keys := os.environ.get("ACME_KEYS"):
            extensions.append(key_authenticator(keys))
        return extensions
