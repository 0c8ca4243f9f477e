"""Images by URL: fetched from public addresses alone, within limits, by a client without memory.

A host is resolved once per hop, all its addresses are checked, and one of these very addresses is
dialled, so that a name cannot point elsewhere between check and use. No proxy is used, no cookie or
credential is sent, and messages never have an address that a name was resolved to.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import SplitResult, urljoin, urlsplit

from hardpoint.errors import RequestError
from hardpoint.plugins.config.engine import RemoteImagesConfig

from .addresses import is_public, is_unusual_host

__all__ = ["Fetcher", "resolve_host"]

_MAX_REDIRECTS = 3
_MAX_URL = 4096
_MAX_HEAD_BYTES = 128 << 10
_MOST_DIALLED = 3
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?\Z")
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)


class _RefusedError(Exception):
    """The rest of a message about a URL that is not fetched."""


@dataclass(frozen=True)
class _Target:
    """Where to fetch from.

    Attributes:
        path: with the query, as it is sent.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host.

    Raises:
        OSError: it has none.
    """
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


class Fetcher:
    """Fetches images. Usable from several threads at once."""

    def __init__(
        self,
        settings: RemoteImagesConfig,
        max_bytes: int,
        *,
        resolve: Callable[[str, int], Sequence[str]] = resolve_host,
        permits: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Open nothing.

        Args:
            max_bytes: maximum size of an image.
            resolve: returns the addresses of a host and a port, or raises an OSError.
            permits: whether an address may be dialled.
            tls: how certificates are checked; None is by the system's authorities.
        """
        self._settings, self._max_bytes = settings, max_bytes
        self._resolve, self._permits, self._tls = resolve, permits, tls

    def fetch(self, url: str, place: str) -> bytes:
        """Return the content of a URL.

        Args:
            place: names the URL in messages.

        Raises:
            RequestError: URLs are not fetched here, or this one is not.
        """
        if not self._settings.enabled:
            raise RequestError(
                f"{place}: expected a data: URL, because images are not fetched from elsewhere "
                f"here (images.remote.enabled)"
            )
        deadline = time.monotonic() + self._settings.seconds
        try:
            return self._follow(url, deadline)
        except _RefusedError as refused:
            raise RequestError(f"{place}: {refused}") from None
        except TimeoutError:
            raise RequestError(
                f"{place}: it took more than {self._settings.seconds:g} s to fetch "
                f"(images.remote.seconds)"
            ) from None
        except (OSError, http.client.HTTPException, ValueError):
            # Which step failed, and how, would describe the network to a stranger.
            raise RequestError(f"{place}: its host does not answer as it should") from None

    def _follow(self, url: str, deadline: float) -> bytes:
        before = None
        for _ in range(_MAX_REDIRECTS + 1):
            target = self._target(url)
            if before == "https" and target.scheme == "http":
                raise _RefusedError("it leads from https to http")
            before = target.scheme
            result = self._get(target, deadline)
            if isinstance(result, bytes):
                return result
            url = urljoin(url, result)
        raise _RefusedError(f"it leads to more than {_MAX_REDIRECTS} others, one after the other")

    def _target(self, url: str) -> _Target:
        if len(url) > _MAX_URL:
            raise _RefusedError(f"expected a URL of at most {_MAX_URL} characters")
        if not url.isascii() or "\\" in url or any(c <= " " or c == "\x7f" for c in url):
            raise _RefusedError("expected a URL of printable ASCII characters without blanks")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _RefusedError("expected a URL such as https://example.com/image.png") from None
        if parts.scheme not in _PORTS:
            raise _RefusedError("expected a URL that begins with https:// or http://")
        if parts.username is not None or parts.password is not None:
            raise _RefusedError("expected a URL without a user's name or password")
        host = self._host(parts)
        port = _PORTS[parts.scheme] if port is None else port
        if port not in self._settings.ports:
            allowed = ", ".join(map(str, self._settings.ports))
            raise _RefusedError(
                f"expected a URL with one of the ports {allowed} (images.remote.ports)"
            )
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return _Target(parts.scheme, host, port, path)

    def _host(self, parts: SplitResult) -> str:
        host = (parts.hostname or "").lower()
        is_six = ":" in host
        if is_unusual_host(host) or not (is_six or _HOST.match(host)):
            raise _RefusedError("expected a URL with the name of a host, in its usual form")
        host = host.removesuffix(".")
        allowed = self._settings.hosts
        if allowed is not None and not any(_is_of(host, pattern) for pattern in allowed):
            raise _RefusedError("its host is not allowed by images.remote.hosts")
        return host

    def _get(self, target: _Target, deadline: float) -> bytes | str:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(self._connected(target, deadline))
            connection.settimeout(_left(deadline))
            connection.sendall(
                f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n"
                "User-Agent: hardpoint\r\nAccept: image/png, image/jpeg, image/webp, image/gif\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            source = _Incoming(connection, deadline, self._max_bytes + _MAX_HEAD_BYTES)
            response = http.client.HTTPResponse(cast(socket.socket, source), method="GET")
            stack.callback(response.close)
            response.begin()
            if response.status in _REDIRECTS and (location := response.headers.get("location")):
                return location
            if response.status != http.HTTPStatus.OK:
                raise _RefusedError(f"its host answered with the status {response.status}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise _RefusedError("its host sent a compressed answer, which was not asked for")
            return self._content(response)

    def _content(self, response: http.client.HTTPResponse) -> bytes:
        limit = self._max_bytes
        declared = response.length
        content = b"" if declared is not None and declared > limit else response.read(limit + 1)
        if len(content) > limit or (declared is not None and declared > limit):
            raise _RefusedError(
                f"expected an image of at most {limit} bytes (images.max_bytes), got more"
            )
        if declared is not None and len(content) < declared:
            raise _RefusedError("its host sent less than it announced")
        return content

    def _connected(self, target: _Target, deadline: float) -> socket.socket:
        addresses = _within(deadline, lambda: list(self._resolve(target.host, target.port)))
        # A missing name and a name that leads inside look the same from outside.
        if not addresses or not all(map(self._permits, addresses)):
            raise _RefusedError("its host has no public address")
        raw = _dialled(addresses[:_MOST_DIALLED], target.port, deadline)
        if target.scheme == "http":
            return raw
        context = ssl.create_default_context() if self._tls is None else self._tls
        try:
            raw.settimeout(_left(deadline))
            return context.wrap_socket(raw, server_hostname=target.host)
        except BaseException:
            raw.close()
            raise


def _is_of(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _left(deadline: float) -> float:
    """Return the seconds until a time.

    Raises:
        TimeoutError: it is over.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _within(deadline: float, resolve: Callable[[], list[str]]) -> list[str]:
    """Return addresses, or none if there are none; the system's resolver takes no time limit.

    Raises:
        TimeoutError: it took too long.
    """
    results: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def run() -> None:
        addresses: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):
            addresses = resolve()
        results.put(addresses)

    threading.Thread(target=run, name="image host", daemon=True).start()
    try:
        return results.get(timeout=_left(deadline))
    except queue.Empty:
        raise TimeoutError from None


def _dialled(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            seconds = _left(deadline) / 2  # so that there is time for another one
            return socket.create_connection((address, port), timeout=seconds)
    return socket.create_connection((addresses[-1], port), timeout=_left(deadline))


class _Incoming:
    """The input of a connection, until a deadline and up to a size; for `HTTPResponse`."""

    def __init__(self, connection: socket.socket, deadline: float, max_bytes: int) -> None:
        self._reader = _Reader(connection, deadline, max_bytes)

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002
        return io.BufferedReader(self._reader)


class _Reader(io.RawIOBase):
    """Reads from a connection."""

    def __init__(self, connection: socket.socket, deadline: float, max_bytes: int) -> None:
        super().__init__()
        self._connection, self._deadline, self._left = connection, deadline, max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self._deadline))
        count = self._connection.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise _RefusedError("expected an image that is not larger than images.max_bytes")
        return count
