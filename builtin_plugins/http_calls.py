"""Calls of a command to a server that runs: JSON over HTTP, HTTPS or a Unix socket."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
from typing import Any, NamedTuple

from hardpoint.plugins import HardpointError, RequestError

_CONNECT_SECONDS = 10.0
_UNIX = "unix:"
_HIGHEST_PORT = 65535
_VISIBLE = re.compile(r"[\x21-\x7e]+")


class HttpAnswer(NamedTuple):
    """An answer.

    Attributes:
        content: the decoded JSON; None if it was none.
    """

    status: int
    content: Any

    @property
    def message(self) -> str | None:
        """The message of the error that it holds; None if it holds none."""
        try:
            return f"{self.content['error']['message']} ({self.status})"
        except (KeyError, TypeError):
            return None


def environment_key(*names: str) -> str | None:
    """Return the key in the first environment variable that is not empty; None without one.

    Raises:
        RequestError: no header can have it; the message does not repeat it.
    """
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return None
    if not _VISIBLE.fullmatch(os.environ[name]):
        raise RequestError(
            f"{name}: expected a key of visible ASCII characters, got one with a blank, a line end "
            "or another character"
        )
    return os.environ[name]


def is_host(name: str) -> bool:
    """Return whether a connection can be tried to a host of that name or address."""
    try:
        return _VISIBLE.fullmatch(name.encode("idna").decode()) is not None
    except UnicodeError:  # a part of the name is empty or too long
        return False


def post_json(
    address: str, path: str, body: dict[str, Any], *, option: str, key: str | None = None
) -> HttpAnswer:
    """Post JSON; wait for the answer as long as it takes.

    Args:
        address: unix:PATH, HOST:PORT, http://HOST:PORT or https://HOST:PORT.
        option: the command's option that gives the address, for messages.
        key: sent as a bearer token.

    Raises:
        RequestError: the address is malformed.
        HardpointError: it cannot be reached.
    """
    connection = _connection(address, option)
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.connect()
        assert connection.sock is not None
        connection.sock.settimeout(None)
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        status, answer = response.status, response.read()
    except (OSError, http.client.HTTPException) as cause:
        raise HardpointError(f"{option}: {address} cannot be reached: {cause}") from cause
    finally:
        connection.close()
    try:
        return HttpAnswer(status, json.loads(answer))
    except ValueError:
        return HttpAnswer(status, None)


class _UnixConnection(http.client.HTTPConnection):
    """A connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: str, option: str) -> http.client.HTTPConnection:
    if address.startswith(_UNIX) and "\0" not in address:
        return _UnixConnection(address.removeprefix(_UNIX))
    scheme, separator, place = address.rpartition("://")
    host, _, port = place.rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    has_scheme = not separator or scheme in {"http", "https"}
    if not has_scheme or not is_host(host) or not _is_port(port):
        raise RequestError(
            f"{option}: expected unix:PATH, HOST:PORT or https://HOST:PORT, got {address!r}"
        )
    if scheme == "https":
        secure = ssl.create_default_context()
        return http.client.HTTPSConnection(
            host, int(port), timeout=_CONNECT_SECONDS, context=secure
        )
    return http.client.HTTPConnection(host, int(port), timeout=_CONNECT_SECONDS)


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(_HIGHEST_PORT)) and int(text) <= _HIGHEST_PORT
