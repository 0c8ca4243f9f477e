"""Cross-origin requests: headers that let pages of other sites use the server."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.responses import Response
from starlette.types import Scope

from hardpoint.plugins import ConfigError
from hardpoint.typed import shown

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(?:, ?[A-Za-z0-9-]{1,64}){0,63}")
_READABLE = b"x-request-id, retry-after, x-should-retry, x-hardpoint-ignored-fields"
_METHODS = b"GET, POST, DELETE"
_AGE = b"600"


class CrossOrigin:
    """Adds the headers by which browsers let pages of allowed origins read answers.

    The guard refuses the requests of all other pages. Cookies are no part of it: the server has
    none.
    """

    def __init__(self, origins: Collection[str] = ()) -> None:
        """Know the origins.

        Raises:
            ConfigError: one is malformed.
        """
        self._origins = checked_origins(origins)

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the further headers of an answer."""
        if not self._origins:
            return []
        origin = _header(scope, b"origin")
        vary = (b"vary", b"origin")
        if origin is None:
            return [vary]
        if "*" not in self._origins and origin.decode("latin-1").lower() not in self._origins:
            return [vary]
        allowed = b"*" if "*" in self._origins else origin
        return [
            vary,
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", _READABLE),
        ]

    def preflight(self, scope: Scope) -> Response | None:
        """Return the answer to a browser that asks before a request; None if it is no such one.

        Browsers ask without a key.
        """
        method = _header(scope, b"access-control-request-method")
        allowed = any(name == b"access-control-allow-origin" for name, _ in self.headers(scope))
        if scope["method"] != "OPTIONS" or method is None or not allowed:
            return None
        response = Response(status_code=204)
        response.raw_headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _AGE),
        ]
        names = _header(scope, b"access-control-request-headers") or b""
        if _NAMES.fullmatch(names.decode("latin-1")):
            response.raw_headers.append((b"access-control-allow-headers", names))
        return response


def checked_origins(origins: Collection[str]) -> frozenset[str]:
    """Return origins as browsers send them.

    Raises:
        ConfigError: one is malformed.
    """
    names = frozenset(origin.lower() for origin in origins)
    for origin in names:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                "server.allowed_origins: expected origins such as 'https://example.org', without "
                f"a path or a slash at the end, or '*' for any, got {shown(origin, 100)}"
            )
    return names


def _header(scope: Scope, name: bytes) -> bytes | None:
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if values else None
