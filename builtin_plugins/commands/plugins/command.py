"""`hardpoint plugins`: the installed and enabled plugins, and the reasons; packages of new ones."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.builtin_plugins.commands.shown import toml, without_userinfo
from hardpoint.builtin_plugins.commands.tables import print_table
from hardpoint.builtin_plugins.scaffold import command as new_package
from hardpoint.plugins import Command, CommandContext
from hardpoint.toolkit.proof import describe_proof
from hardpoint.typed import FieldDoc

from .check import configure_check, run_check

if TYPE_CHECKING:
    from hardpoint.plugins.server.commands import ComponentDetails, ComponentInfo


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = (
        "Show which plugins are installed, which are on, and why; make the package of a new "
        "one, or check one."
    )
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
        "Print the kind of a plugin, its options and arguments, and whether it passes "
        "all checks of loading. A plugin that is not on is imported for this."
    )
    show.add_argument("name", metavar="PLUGIN", help="a name, KIND/NAME, or package.module:Class")
    for action in (listing, show):
        action.add_argument("--json", action="store_true", help="print JSON")
    new_package.configure(actions.add_parser("new", help="make the package of a new plugin"))
    configure_check(
        actions.add_parser("check", help="run the conformance suite of one plugin or package")
    )


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    if options.action == "new":
        return new_package.run(options, context)
    if options.action == "check":
        return run_check(options, context)
    config, config_sources = context.load_config()
    catalog = context.load_catalog(config, config_sources)
    if options.action == "list":
        _print_list(catalog.components(), as_json=options.json)
        return 0
    details = catalog.details(options.name)
    print(json.dumps(_details_json(details), indent=2) if options.json else _details_text(details))
    return 0


def _print_list(components: Sequence[ComponentInfo], *, as_json: bool) -> None:
    proof = functools.cache(_proof_of)
    if as_json:
        listed = [{**_as_json(i), "proof": proof(i.distribution)} for i in components]
        print(json.dumps(listed, indent=2))
        return
    headers = ["kind", "name", "from", "state", "order", "why"]
    rows = [[i.kind, i.name, i.package, _state(i), _order(i), _reason(i)] for i in components]
    proofs = [proof(info.distribution) for info in components]
    if any(proofs):
        headers.insert(5, "proof")
        for row, text in zip(rows, proofs, strict=True):
            row.insert(5, text)
    print_table(headers, rows, dim=[not info.enabled for info in components])


def _proof_of(distribution: str) -> str:
    """Return the state of a package's proof; Hardpoint itself and modules have none."""
    return "" if distribution == "hardpoint" else describe_proof(distribution)


def _state(info: ComponentInfo) -> str:
    return "on" if info.enabled else "off"


def _order(info: ComponentInfo) -> str:
    return f"{info.place} {info.phase}" if info.place and info.phase else ""


def _reason(info: ComponentInfo) -> str:
    return f"{info.reason}, through adapter {info.adapter}" if info.adapter else info.reason


def _origin_json(info: ComponentInfo) -> dict[str, object]:
    return {
        "kind": info.kind,
        "name": info.name,
        "class": info.value,
        "distribution": info.distribution,
        "version": info.version,
        "on": info.enabled,
        "why": info.reason,
    }


def _as_json(info: ComponentInfo) -> dict[str, object]:
    return _origin_json(info) | {
        "place": info.place,
        "phase": info.phase,
        "adapter": info.adapter,
    }


def _details_json(details: ComponentDetails) -> dict[str, Any]:
    info = details.info
    return _origin_json(info) | {
        "summary": details.summary,
        "interface": details.interface,
        "adapter": details.adapter,
        "contract": details.contract,
        "stability": details.stability,
        "phase": details.phase,
        "place": info.place,
        "options": without_userinfo(dict(details.options)),
        "options_schema": details.options_schema,
        "arguments_schema": details.arguments_schema,
        "input_schema": details.input_schema,
        "problem": details.problem,
        "others": [_as_json(other) for other in details.others],
    }


def _details_text(details: ComponentDetails) -> str:
    info = details.info
    facts = {
        "interface": f"{details.interface}, contract {details.contract} ({details.stability})",
        "adapter": details.adapter,
        "class": info.value,
        "from": info.package,
        "state": f"{'on' if info.enabled else 'off'}: {info.reason}",
        "checks": details.problem or "it passes all that loading checks",
        "also": "; ".join(map(_other, details.others)),
        "phase": details.phase,
        "order": info.place and f"{info.place} of its kind",
        "hooks": ", ".join(details.hooks),
        "params": ", ".join(details.params_fields),
    }
    lines = [f"{info.kind}/{info.name}"]
    if details.summary:
        lines += [f"  {details.summary}"]
    lines += ["", *(f"  {name:<10} {fact}" for name, fact in facts.items() if fact)]
    if details.option_fields is not None:
        table = info.name if re.fullmatch(r"[\w-]+", info.name, re.ASCII) else toml(info.name)
        lines += ["", f"options, under [plugin.{table}]"]
        configured = {
            option: f"{toml(details.options[option])} from {source}"
            for option, source in details.option_sources.items()
        }
        lines += _field_lines(details.option_fields, configured)
    if details.argument_fields is not None:
        lines += ["", f'arguments of a request, under plugin_args["{info.name}"]']
        lines += _field_lines(details.argument_fields, {})
    if details.input_fields is not None:
        lines += ["", "input of a call, `data` over HTTP"]
        lines += _field_lines(details.input_fields, {})
    return "\n".join(lines)


def _other(info: ComponentInfo) -> str:
    return f"{info.value} from {info.package} has this name, and is {_state(info)}"


def _field_lines(fields: Sequence[FieldDoc], configured: Mapping[str, str]) -> list[str]:
    if not fields:
        return ["  none"]
    width = max(len(field.name) for field in fields)
    lines = []
    for field in fields:
        value = configured.get(field.name) or _default(field)
        lines.append(f"  {field.name:<{width}}  {field.type_text}; {value}")
        if field.doc:
            lines.append(f"  {'':<{width}}  {field.doc}")
    return lines


def _default(field: FieldDoc) -> str:
    return "required" if field.required else f"default {toml(field.default)}"


COMMAND = Command("plugins", "show plugins and why they are on; make a new one", _configure, _run)
