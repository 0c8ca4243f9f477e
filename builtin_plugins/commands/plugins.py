"""`hardpoint plugins`: what is installed, what is on, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from hardpoint.plugins import Command, CommandContext

from .details import Details
from .listing import Listed, find_listed, list_components
from .tables import print_table


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = "Show which plugins are installed, which are on, and why."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    listing = actions.add_parser("list", help="print every plugin, on or not")
    listing.description = (
        "Print every plugin that is installed or on, and why. Plugins that are not on are not "
        "imported. Logits processors are in the order in which they run."
    )
    show = actions.add_parser("show", help="print all about one plugin")
    show.description = (
        "Print what a plugin is and the options and arguments that it takes. A plugin that is "
        "not on is imported for this."
    )
    show.add_argument("name", metavar="NAME", help="a name, or KIND/NAME")
    for action in (listing, show):
        action.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    config, config_sources = context.load_config()
    plugins = context.load_plugins(config, config_sources)
    components = list_components(plugins, config, config_sources)
    if options.action == "list":
        _print_list(components, as_json=options.json)
        return 0
    details = Details.load(find_listed(components, options.name), plugins, config_sources)
    print(json.dumps(details.as_json(), indent=2) if options.json else details.as_text())
    return 0


def _print_list(components: Sequence[Listed], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_as_json(each) for each in components], indent=2))
        return
    rows = [
        (each.kind, each.name, each.package, "on" if each.on else "off", each.order, _why(each))
        for each in components
    ]
    headers = ("kind", "name", "from", "state", "order", "why")
    print_table(headers, rows, dim=[not each.on for each in components])


def _why(each: Listed) -> str:
    return f"{each.why}, through adapter {each.adapter}" if each.adapter else each.why


def _as_json(each: Listed) -> dict[str, object]:
    return {
        "kind": each.kind,
        "name": each.name,
        "class": each.source.value,
        "distribution": each.source.distribution,
        "version": each.source.version,
        "on": each.on,
        "why": each.why,
        "place": each.place,
        "phase": each.phase,
        "adapter": each.adapter,
    }


COMMAND = Command("plugins", "Show plugins and why they are on.", _configure, _run)
