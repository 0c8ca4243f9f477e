"""Checks before anything else: the Host, the Origin and the type of the body."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from starlette.types import Scope

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.plugins import ConfigError
from hardpoint.typed import shown

from .cross_origin import checked_origins

JSON = ("application/json",)
"""The media types of bodies, where a route has no others."""

_ALL_ADDRESSES = ("0.0.0.0", "::")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
_FORM = "application/x-www-form-urlencoded"  # which `curl -d` sends by default
_ONCE = (b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-encoding")
"""Headers that proxies and servers may read differently where there are several."""


class Guard:
    """Refuses requests that a web page of somebody else may have made a browser send."""

    def __init__(
        self, bound: str | None, allowed: Collection[str] | None, origins: Collection[str] = ()
    ) -> None:
        """Know the names of the server.

        Args:
            bound: the address that it listens on; None for a Unix socket, which no browser
                reaches.
            allowed: names that requests may use; None is loopback names, the bound address, and
                the machine's own names if all addresses are bound.
            origins: origins of pages that may use it, such as "https://example.org".

        Raises:
            ConfigError: a name or an origin is malformed.
        """
        self._names = accepted_names(bound, allowed)
        self._any = "*" in self._names
        self._default = allowed is None
        self._is_socket = bound is None
        self._origins = checked_origins(origins)

    def check(self, scope: Scope, body_types: Collection[str] | None = JSON) -> None:
        """Check a request.

        Args:
            body_types: media types that its body may have; None for a path without a route.

        Raises:
            AnswerError: its Host, Origin or Content-Type is not allowed, or it has two of one.
        """
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in headers and name in _ONCE:
                header = name.decode("latin-1")
                raise AnswerError(400, f"{header}: expected one such header, got several")
            headers[name] = value
        self._check_host(headers.get(b"host", b"").decode("latin-1"), scope)
        if (origin := headers.get(b"origin")) is not None:
            self._check_origin(origin.decode("latin-1").lower(), headers)
        else:
            self._check_site(headers)
        if body_types is not None and scope["method"] in ("POST", "PUT", "PATCH"):
            _check_type(headers, body_types)

    def _check_host(self, header: str, scope: Scope) -> None:
        if self._any or (self._is_socket and self._default):
            return
        if not header:
            raise AnswerError(400, "host: expected a Host header, got none")
        name = _host(header)
        if name is None or not self._allows(name, scope):
            raise AnswerError(
                403,
                f"host: {shown(header, 100)} is not a name of this server; "
                "server.allowed_hosts (--allowed-hosts) lists the names that it accepts",
                code="host_not_allowed",
            )

    def _allows(self, host: str, scope: Scope) -> bool:
        if host in self._names:
            return True
        if not self._default:
            return False
        # Bound to all addresses: the one that this connection came to is one of its names. No page
        # of somebody else can have it as its own, as it could have a name.
        local = scope.get("server") or ("", 0)
        return _is_address(host) and host == _plain(local[0])

    def _check_origin(self, origin: str, headers: dict[bytes, bytes]) -> None:
        if "*" in self._origins or origin in self._origins:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and origin in (f"http://{host}", f"https://{host}"):
            return
        raise AnswerError(
            403,
            f"origin: pages of {shown(origin, 100)} may not use this server; "
            "server.allowed_origins lists those that may",
            code="origin_not_allowed",
        )

    def _check_site(self, headers: dict[bytes, bytes]) -> None:
        """Reject requests without an Origin from pages of other sites, such as images.

        A link to the server may be followed.
        """
        if "*" in self._origins or headers.get(b"sec-fetch-mode") == b"navigate":
            return
        if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise AnswerError(
                403,
                "sec-fetch-site: pages of other sites may not use this server; "
                "server.allowed_origins lists those that may",
                code="origin_not_allowed",
            )


def accepted_names(bound: str | None, allowed: Collection[str] | None) -> set[str]:
    """Return the host names that requests may use, as `Guard` takes these arguments.

    Raises:
        ConfigError: a name is malformed.
    """
    if allowed is not None:
        return {_checked_name(name) for name in allowed}
    names = {*_LOOPBACK}
    if bound is not None:
        names.add(_plain(bound))
    if bound in _ALL_ADDRESSES:
        # A web page can make neither of these its own: a bare host name has no public domain.
        host = socket.gethostname().lower().rstrip(".")
        short = host.partition(".")[0]
        names |= {name for name in (host, short, f"{short}.local") if _HOST.fullmatch(name)}
    return names


def _host(header: str) -> str | None:
    match = _HOST.fullmatch(header)
    if match is None:
        return None
    address, name = match[1], match[2]
    if address is not None:
        return _plain(address) if _is_address(address) else None
    return _plain(name.removesuffix("."))


def _checked_name(name: str) -> str:
    host = (
        name
        if name == "*"
        else _host(f"[{name}]" if name.count(":") > 1 > name.count("[") else name)
    )
    if host is None:
        raise ConfigError(
            f"server.allowed_hosts: expected names or addresses such as 'llm.example.org', or "
            f"'*' for any, got {shown(name, 100)}"
        )
    return host


def _plain(name: str) -> str:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_type(headers: dict[bytes, bytes], body_types: Collection[str]) -> None:
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    if not has_body:
        return
    type_ = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if type_ not in body_types:
        wanted = " or ".join(body_types)
        hint = "; with curl, add -H 'Content-Type: application/json'" if type_ == _FORM else ""
        raise AnswerError(415, f"content-type: expected {wanted}, got {shown(type_, 100)}{hint}")
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.lower() != "identity":
        raise AnswerError(415, f"content-encoding: expected none, got {shown(coding, 100)}")
