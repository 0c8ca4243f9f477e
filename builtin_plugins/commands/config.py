"""`hardpoint config`: the configuration, the sources of its values, and its schema."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from hardpoint.plugins import Command, CommandContext
from hardpoint.typed import json_schema

from .shown import toml, without_userinfo
from .tables import print_table


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = "Show the configuration: its values with their sources, or its schema."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    show = actions.add_parser("show", help="print each value and where it came from")
    show.description = "Print each value of the configuration and where it came from."
    show.add_argument("--json", action="store_true", help="print a JSON object by path")
    schema = actions.add_parser("schema", help="print the JSON Schema of the configuration")
    schema.description = "Print the JSON Schema of the configuration."


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    if options.action == "schema":
        print(json.dumps(json_schema(context.config_type()), indent=2))
        return 0
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


def _flat(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        flat.update(_flat(value, path) if isinstance(value, dict) and value else {path: value})
    return flat


COMMAND = Command("config", "Show the configuration.", _configure, _run)
