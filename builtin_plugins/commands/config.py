"""`hardpoint config`: the configuration, the sources of its values, and its schema."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.plugins import Command, CommandContext, RequestError
from hardpoint.typed import json_schema

from .setup.template import configuration_file
from .shown import toml, without_userinfo
from .tables import print_table

_WRONG = 2


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = "Show, check or begin the configuration."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    show = actions.add_parser("show", help="print each value and where it came from")
    show.description = "Print each value of the configuration and where it came from."
    show.add_argument("--json", action="store_true", help="print a JSON object by path")
    check = actions.add_parser("check", help="print all errors")
    check.description = (
        "Check the file, the environment and the command line, and print all errors at once. The "
        "plugins are resolved and their options checked; no model is read. The exit code is "
        f"{_WRONG} if there is an error."
    )
    init = actions.add_parser("init", help="write a file with all settings as comments")
    init.description = (
        "Write a configuration file in which every setting is a comment with its description, its "
        "type and its default. A file that exists is not replaced."
    )
    init.add_argument(
        "file",
        nargs="?",
        default="hardpoint.toml",
        metavar="FILE",
        help="the file; - is standard output (default: hardpoint.toml)",
    )
    schema = actions.add_parser("schema", help="print the JSON Schema of the configuration")
    schema.description = "Print the JSON Schema of the configuration."


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    if options.action == "schema":
        print(json.dumps(json_schema(context.config_type()), indent=2))
        return 0
    if options.action == "check":
        return _check(context)
    if options.action == "init":
        return _init(options.file, context)
    config, config_sources = context.load_config()
    values = _flat(msgspec.to_builtins(config), "")
    if options.json:
        shown = {
            path: {"value": without_userinfo(v), "origin": config_sources.of(path)}
            for path, v in values.items()
        }
        print(json.dumps(shown, indent=2))
        return 0
    rows = [(path, toml(value), config_sources.of(path)) for path, value in values.items()]
    print_table(("path", "value", "origin"), rows, dim=[row[2] == "default" for row in rows])
    return 0


def _check(context: CommandContext) -> int:
    errors, warnings = context.check_config()
    for error in errors:
        context.show_error(error)
    if errors:
        return _WRONG
    if not context.quiet:
        remark = f", with {len(warnings)} warnings" if warnings else ""
        print(f"The configuration is valid{remark}.")
    return 0


def _init(name: str, context: CommandContext) -> int:
    text = configuration_file(context.config_type())
    if name == "-":
        print(text, end="")
        return 0
    try:
        with Path(name).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(f"FILE: {name} exists, and is not replaced") from None
    except (OSError, ValueError) as cause:
        raise RequestError(f"FILE: {name!r} cannot be written: {cause}") from None
    if not context.quiet:
        print(f"Wrote {name}.")
    return 0


def _flat(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        flat.update(_flat(value, path) if isinstance(value, dict) and value else {path: value})
    return flat


COMMAND = Command("config", "show, check or begin the configuration", _configure, _run)
