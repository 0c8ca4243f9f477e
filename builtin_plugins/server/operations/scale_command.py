"""`hardpoint scale`: changes the number of engines of a server, through its admin address."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
from typing import Any

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import Command, CommandContext, HardpointError, RequestError

_KEY = "HARDPOINT_ADMIN_KEY"
_CONNECT_SECONDS = 10.0
_UNIX = "unix:"


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start or retire engines of a running server, through its admin address, until there are "
        "N, or retire those of --retire. Requests go on: those of an engine that goes have time "
        "to end, and then go on at another one. Print the engines that there are."
    )
    add = parser.add_argument
    add("engines", nargs="?", type=int, metavar="N", help="how many engines there should be")
    add("--retire", metavar="RANKS", help="numbers of engines that go, separated by commas")
    add(
        "--admin",
        metavar="ADDRESS",
        help="unix:PATH, HOST:PORT or https://HOST:PORT (default: server.admin of the "
        f"configuration); the administrator's key, where it needs one, is read from {_KEY}",
    )
    add(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long the requests of engines that go may run on there (default: 30)",
    )
    add("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    if (options.engines is None) == (options.retire is None):
        raise RequestError("scale: expected either N or --retire RANKS")
    address = options.admin
    if address is None:
        config, _ = context.load_config()
        address = config.table(ServerConfig).admin
    if address is None:
        raise RequestError(
            "--admin: expected the admin address of the server, for example unix:PATH"
        )
    body: dict[str, Any] = {"drain_seconds": options.drain_seconds}
    if options.retire is None:
        answer = _post(address, "/scale", body | {"engines": options.engines})
    else:
        answer = _post(address, "/retire", body | {"ranks": _ranks(options.retire)})
    if options.json:
        print(json.dumps(answer))
    else:
        listed = ", ".join(map(str, answer["ranks"]))
        print(f"engines: {listed} (change {answer['epoch']})")
    return 0


def _ranks(text: str) -> list[int]:
    ranks = text.split(",")
    if not all(rank.strip().isdecimal() for rank in ranks):
        raise RequestError(f"--retire: expected numbers of engines such as 1,3, got {text!r}")
    return [int(rank) for rank in ranks]


def _post(address: str, path: str, body: dict[str, Any]) -> Any:
    """Return the answer of the admin address to a request.

    Raises:
        RequestError: the address is malformed, or the server refused the request.
        HardpointError: the server cannot be reached, or cannot do that now.
    """
    connection = _connection(address)
    headers = {"content-type": "application/json"}
    if key := os.environ.get(_KEY):
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.connect()
        assert connection.sock is not None
        connection.sock.settimeout(None)  # engines take their time to start and to drain
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        status, answer = response.status, response.read()
    except (OSError, http.client.HTTPException) as cause:
        raise HardpointError(f"--admin: {address} cannot be reached: {cause}") from cause
    finally:
        connection.close()
    try:
        decoded = json.loads(answer)
    except ValueError:
        decoded = None
    if status == http.HTTPStatus.OK and isinstance(decoded, dict):
        return decoded
    kind = RequestError if status == http.HTTPStatus.BAD_REQUEST else HardpointError
    raise kind(_message(address, status, decoded))


def _message(address: str, status: int, decoded: Any) -> str:
    try:
        return f"{decoded['error']['message']} ({status})"
    except (KeyError, TypeError):
        return f"--admin: {address} answered {status}, expected the admin address of a server"


class _UnixConnection(http.client.HTTPConnection):
    """A connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: str) -> http.client.HTTPConnection:
    if address.startswith(_UNIX):
        return _UnixConnection(address.removeprefix(_UNIX))
    scheme, separator, place = address.rpartition("://")
    host, colon, port = place.rstrip("/").rpartition(":")
    if not (colon and host and port.isdecimal()) or (separator and scheme not in {"http", "https"}):
        raise RequestError(
            f"--admin: expected unix:PATH, HOST:PORT or https://HOST:PORT, got {address!r}"
        )
    host = host.removeprefix("[").removesuffix("]")
    if scheme == "https":
        secure = ssl.create_default_context()
        return http.client.HTTPSConnection(
            host, int(port), timeout=_CONNECT_SECONDS, context=secure
        )
    return http.client.HTTPConnection(host, int(port), timeout=_CONNECT_SECONDS)


COMMAND = Command(
    name="scale",
    summary="change the number of engines of a running server",
    configure=_configure,
    run=_run,
)
