"""`hardpoint bench`: its three commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from hardpoint.plugins import Command, CommandContext

from . import serve, startup, sweep


class _Action(NamedTuple):
    """A command below `hardpoint bench`, as the fields of `Command`."""

    summary: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, CommandContext], int]


_ACTIONS = {
    "serve": _Action("send a load to a server", serve.configure, serve.run),
    "sweep": _Action("send loads to servers of several settings", sweep.configure, sweep.run),
    "startup": _Action("measure the stages of a start", startup.configure, startup.run),
}


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = "Measure servers, settings and starts."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    for name, action in _ACTIONS.items():
        action.configure(actions.add_parser(name, help=action.summary))


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    return _ACTIONS[options.action].run(options, context)


COMMAND = Command("bench", "Measure servers, settings and starts.", _configure, _run)
