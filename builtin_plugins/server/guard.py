"""Checks before anything else: the Host, the Origin and the type of the body."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Scope

from hardpoint.plugins.typed import shown

from .errors import AnswerError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Refuses requests that a web page of somebody else may have made a browser send."""

    def __init__(
        self, bound: str | None, allowed: Collection[str] | None, origins: Collection[str] = ()
    ) -> None:
        """Know the names of the server.

        Args:
            bound: the address that it listens on; None for a Unix socket, which no browser
                reaches.
            allowed: names that requests may use; None is loopback names and the bound address.
            origins: of pages that may use it, such as "https://example.org".
        """
        self._any = allowed is not None and "*" in allowed
        self._names = {*_LOOPBACK} if allowed is None else {name.lower() for name in allowed}
        if bound is not None and allowed is None:
            self._names.add(bound.lower())
        self._default = allowed is None
        self._is_socket = bound is None
        self._origins = frozenset(origins)

    def check(self, scope: Scope) -> None:
        """Check a request.

        Raises:
            AnswerError: its Host, Origin or Content-Type is not allowed.
        """
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name == b"host" and name in headers:
                raise AnswerError(400, "host: expected one Host header, got several")
            headers[name] = value
        host = _host(headers.get(b"host", b"").decode("latin-1"))
        if not self._allows(host, scope):
            raise AnswerError(
                403,
                f"host: {shown(host, 100)} is no name of this server; "
                "server.allowed_hosts lists them",
                code="host_not_allowed",
            )
        if (origin := headers.get(b"origin")) is not None:
            self._check_origin(origin.decode("latin-1"), headers)
        if scope["method"] in ("POST", "PUT", "PATCH"):
            _check_type(headers)

    def _allows(self, host: str, scope: Scope) -> bool:
        if self._any or host in self._names:
            return True
        if not self._default:
            return False
        if self._is_socket:
            return True
        # Bound to all addresses: the one that this connection came to is one of its names. No page
        # of somebody else can have it as its own, as it could have a name.
        local = scope.get("server") or ("", 0)
        return _is_address(host) and host == local[0]

    def _check_origin(self, origin: str, headers: dict[bytes, bytes]) -> None:
        if "*" in self._origins or origin in self._origins:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        parts = urlsplit(origin)
        if parts.netloc.lower() == host and parts.scheme in ("http", "https"):
            return
        raise AnswerError(
            403,
            f"origin: pages of {shown(origin, 100)} may not use this server; "
            "server.allowed_origins lists those that may",
            code="origin_not_allowed",
        )


def _host(header: str) -> str:
    """Return the name of a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_type(headers: dict[bytes, bytes]) -> None:
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    type_ = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if has_body and type_ != "application/json":
        raise AnswerError(415, f"content-type: expected application/json, got {shown(type_, 100)}")
