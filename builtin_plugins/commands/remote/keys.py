"""`hardpoint keys`: the keys of engines that join over a network."""

from __future__ import annotations

import argparse

from hardpoint.plugins import Command, CommandContext
from hardpoint.toolkit.curve_keys import KeyFolder, check_new, make_client, revoke_client


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND DIR ..."
    parser.description = "Make, list and revoke the keys of engines that join over a network."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    new = actions.add_parser("new", help="make a key for each NAME")
    new.description = (
        "Make a key pair for each NAME, and one for the program that they join, if DIR has none. "
        "DIR is its parallel.keys; DIR/NAME is for the machine NAME alone, as --keys of its engine."
    )
    new.add_argument("folder", metavar="DIR", help="the folder of the keys")
    new.add_argument("names", metavar="NAME", nargs="+", help="such as the name of a machine")
    listed = actions.add_parser("list", help="print the names of keys that are accepted")
    listed.description = "Print the names of the keys that are accepted, one a line."
    listed.add_argument("folder", metavar="DIR", help="the folder of the keys")
    revoke = actions.add_parser("revoke", help="let the owner of a key join no more")
    revoke.description = "Let NAME join no more; an engine that has joined with its key is ended."
    revoke.add_argument("folder", metavar="DIR", help="the folder of the keys")
    revoke.add_argument("names", metavar="NAME", nargs="+", help="the owner of a key")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    match options.action:
        case "new":
            for name in options.names:  # all of them before any is made
                check_new(options.folder, name)
            for name in dict.fromkeys(options.names):
                made = make_client(options.folder, name)
                if not context.quiet:
                    print(f"{name}: move {made} to its machine; it is used with --keys")
        case "list":
            for name in sorted(KeyFolder(options.folder, "keys").names().values()):
                print(name)
        case "revoke":
            for name in options.names:
                revoke_client(options.folder, name)
    return 0


COMMAND = Command("keys", "make and revoke the keys of engines", _configure, _run)
