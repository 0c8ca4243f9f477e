"""`hardpoint scale`: changes the number of engines of a server, through its admin address."""

from __future__ import annotations

import argparse
import http
import json
from typing import Any

from hardpoint.builtin_plugins.http_calls import environment_key, post_json
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import Command, CommandContext, HardpointError, RequestError

_KEY = "HARDPOINT_ADMIN_KEY"


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
        answer = _post(address, "/engines/scale", body | {"engines": options.engines})
    else:
        answer = _post(address, "/engines/retire", body | {"ranks": _ranks(options.retire)})
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
    answer = post_json(address, path, body, option="--admin", key=environment_key(_KEY))
    if answer.status == http.HTTPStatus.OK and isinstance(answer.content, dict):
        return answer.content
    kind = RequestError if answer.status == http.HTTPStatus.BAD_REQUEST else HardpointError
    raise kind(
        answer.message
        or f"--admin: {address} answered {answer.status}, expected the admin address of a server"
    )


COMMAND = Command(
    name="scale",
    summary="change the number of engines of a running server",
    configure=_configure,
    run=_run,
)
