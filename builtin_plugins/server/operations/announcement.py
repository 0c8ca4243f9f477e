"""The lines that `hardpoint serve` prints when it answers requests."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from typing import TYPE_CHECKING, Any

from hardpoint.builtin_plugins.server.access.guard import accepted_names

if TYPE_CHECKING:
    from .addresses import BoundAddress


def announce(service: Any, users: BoundAddress, admin: BoundAddress | None) -> None:
    """Print the addresses of a server, and on standard error whether anybody may use it."""
    with contextlib.suppress(OSError):  # the reader may have closed the pipe
        print(f"Serving {service.names[0]} at {users.url}", flush=True)
        if admin is not None:
            print(f"Serving administrators at {admin.url}", flush=True)
        if (warning := exposure(service, users)) is not None:
            print(f"hardpoint: warning: {warning}", file=sys.stderr, flush=True)


def exposure(service: Any, users: BoundAddress) -> str | None:
    """Return a warning if other machines can use the server without a key, otherwise None."""
    if service.has_keys or users.host is None or _is_loopback(users.host):
        return None
    names = accepted_names(users.host, service.settings.allowed_hosts)
    accepted = "any" if "*" in names else ", ".join(sorted(names))
    return (
        "other machines can use this server without a key (--api-key or server.keys_file sets "
        f"one); accepted host names: {accepted} (--allowed-hosts or server.allowed_hosts)"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
