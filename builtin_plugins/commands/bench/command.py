"""`hardpoint bench`: its three commands."""

from __future__ import annotations

import argparse

from hardpoint.plugins import Command, CommandContext

from . import serve, startup, sweep

_ACTIONS = {
    "serve": (serve, "send a load to a server"),
    "sweep": (sweep, "send loads to servers of several settings"),
    "startup": (startup, "measure the stages of a start"),
}


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = "Measure servers, settings and starts."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    for name, (module, text) in _ACTIONS.items():
        module.configure(actions.add_parser(name, help=text))


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    module, _ = _ACTIONS[options.action]
    return module.run(options, context)


COMMAND = Command("bench", "Measure servers, settings and starts.", _configure, _run)
