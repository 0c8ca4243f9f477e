"""Which addresses of the Internet images may be fetched from: public ones alone."""

from __future__ import annotations

import ipaddress
import re

__all__ = ["is_public", "is_unusual_host"]

_CLOSED_4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # behind the NAT of a provider
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, where clouds have their metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)

_OPEN_6 = ipaddress.IPv6Network("2000::/3")
"""Public unicast; ::ffff:0:0/96, 64:ff9b::/96, fc00::/7, fe80::/10 and ff00::/8 are outside."""

_CLOSED_6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which holds an IPv4 address
        "3fff::/20",  # documentation
    )
)

_ISATAP = (0x00005EFE, 0x02005EFE)
"""Third quarter of an address with an IPv4 address as its last one."""


def is_public(address: str) -> bool:
    """Return whether an address, in its usual form, is one of the public Internet.

    Addresses that hold another one, such as NAT64 addresses, count as not public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return not any(parsed in network for network in _CLOSED_4)
    if parsed.scope_id is not None or parsed not in _OPEN_6:
        return False
    third = int(parsed) >> 32 & 0xFFFFFFFF
    return third not in _ISATAP and not any(parsed in network for network in _CLOSED_6)


_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\Z")


def is_unusual_host(host: str) -> bool:
    """Return whether a host is an IPv4 address in another form than four decimal numbers.

    Systems take 2130706433, 0x7f.1 and 0177.0.0.1 for 127.0.0.1.
    """
    last = host.rstrip(".").rpartition(".")[2]
    if not _NUMBER.match(last):
        return False
    try:
        return str(ipaddress.IPv4Address(host)) != host
    except ValueError:
        return True
