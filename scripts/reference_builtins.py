"""The reference pages of the built-in plugins: their descriptions, options and arguments."""

from __future__ import annotations

import importlib
import inspect
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.host.registry.kinds import KINDS
from hardpoint.plugins import LogitsProcessor
from hardpoint.typed.describing import struct_fields

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ROOT / "docs" / "parser-outputs.json"
"""An output of a model for each parser, with the parts that the parser finds in it."""

BUILTINS_TEXT = """\
The built-in logits processors, scheduling policies and grammar backends, and all other built-in
plugins that have options or arguments. [Parsers](parsers.md) are on a page of their own, and
[the gallery](gallery.md) lists all plugins.

An option is set in the table `[plugin.NAME]` of [the configuration](../configuration.md). A request
gives an argument in `plugin_args`, under the name of the plugin. `plugins.disable` and
`plugins.replace` change the default set, and `hardpoint plugins show NAME` prints its values."""
PARSERS_TEXT = """\
[Reasoning and tool calls](../reasoning-and-tools.md) shows how to select a parser, and lists the
models of each. Names of other engines are accepted too."""
PROCESSORS_TEXT = """\
Processors run in the order of their phases. A processor applies to requests that set one of its
fields of `SamplingParams`, and does not run for other requests."""
ALWAYS = ("logits_processors", "scheduling_policies", "grammars")
"""Kinds whose plugins are all described, also without options."""
PARSERS = ("reasoning_parsers", "tool_parsers")


def builtin_classes() -> dict[str, dict[str, Any]]:
    """Return the classes of the built-in plugins by kind and name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, dict[str, Any]] = {}
    for group, entries in project["entry-points"].items():
        kind = group.removeprefix("hardpoint.")
        for name, target in sorted(entries.items()) if kind in KINDS else ():
            module, _, attribute = target.partition(":")
            if attribute:
                cls = getattr(importlib.import_module(module), attribute)
                found.setdefault(kind, {})[name] = cls
    return found


def builtins_page(note: str) -> str:
    """Return the page of the plugins with options or arguments."""
    lines = ["# Built-in plugins", "", note, "", BUILTINS_TEXT, ""]
    classes = builtin_classes()
    for kind in KINDS.values():
        described = {
            name: cls
            for name, cls in classes.get(kind.name, {}).items()
            if kind.name not in PARSERS
            if kind.name in ALWAYS or any(_tables(name, cls))
        }
        if kind.name == "logits_processors":
            described = dict(sorted(described.items(), key=lambda item: _position(*item)))
        if described:
            lines += [f"## {kind.name}", "", kind.summary, ""]
        if kind.name == "logits_processors":
            lines += [PROCESSORS_TEXT, ""]
        for name, cls in described.items():
            lines += [f"### {name}", "", *_description(cls), "", *_tables(name, cls)]
    return _page(lines)


def _position(name: str, cls: type[LogitsProcessor]) -> tuple[int, int, str]:
    """Return the place of a built-in logits processor in the pipeline."""
    return cls.phase.value, len(cls.after), name


def _tables(name: str, cls: Any) -> Iterator[str]:
    """Yield the tables of a plugin: its place in the pipeline, options and arguments."""
    if hasattr(cls, "params_fields") and hasattr(cls, "phase"):
        fields = ", ".join(f"`{field}`" for field in cls.params_fields)
        after = "".join(f", after `{other}`" for other in cls.after)
        form = "dense" if issubclass(cls, LogitsProcessor) else "sparse"
        greedy = "yes: greedy requests skip it" if cls.argmax_invariant else "no"
        yield from (
            "| property | value |",
            "|---|---|",
            f"| fields of `SamplingParams` | {fields} |",
        )
        yield from (f"| phase | `{cls.phase.name}`{after} |", f"| form | {form} |")
        yield from (f"| argmax-invariant | {greedy} |", "")
    for title, struct in (
        (f"Options, `[plugin.{name}]`", getattr(cls, "Options", None)),
        ("Arguments of a request", getattr(cls, "Arguments", None)),
    ):
        if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
            continue
        if described := struct_fields(struct):
            yield from (
                f"**{title}**",
                "",
                "| name | type | default | meaning |",
                "|---|---|---|---|",
            )
            for option in described:
                default = "required" if option.required else f"`{_json(option.default)}`"
                cells = (f"`{option.name}`", option.type_text, default, option.doc)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
            yield ""


def parser_classes() -> dict[str, Any]:
    """Return the classes of the parsers by name."""
    classes = builtin_classes()
    return {name: cls for kind in PARSERS for name, cls in classes[kind].items()}


def parsers_page(note: str) -> str:
    """Return the page of the parsers, each with a recorded output."""
    outputs = json.loads(OUTPUTS.read_text(encoding="utf-8"))
    lines = ["# Reasoning and tool parsers", "", note, "", PARSERS_TEXT, ""]
    for name, cls in sorted(parser_classes().items()):
        recorded = outputs[name]
        aliases = ", ".join(f"`{other}`" for other in cls.other_names) or "none"
        tokens = ", ".join(f"`{token}`" for token in cls.required_tokens) or "none"
        fence = "````" if "```" in recorded["output"] else "```"
        lines += [f"## {name}", "", *_description(cls), "", "Output of the model:", ""]
        lines += [f"{fence}text", *recorded["output"].split("\n"), fence, ""]
        lines += ["Parts:", "", "```text", *recorded["parts"], "```", ""]
        lines += ["| property | value |", "|---|---|"]
        lines += [f"| finds | {', '.join(cls.roles)} |", f"| other names | {aliases} |"]
        lines += [f"| required special tokens | {tokens} |", f"| source | {recorded['source']} |"]
        lines += ["", *_tables(name, cls)]
    return _page(lines)


def _description(cls: Any) -> list[str]:
    """Return the docstring of a class up to its first section."""
    text = inspect.cleandoc(cls.__doc__ or "")
    lines = []
    for line in text.splitlines():
        if line in ("Attributes:", "Args:", "Returns:", "Raises:", "Example:"):
            break
        lines.append(line)
    return lines


def _json(value: Any) -> str:
    return "none" if value is None else json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


def _page(lines: list[str]) -> str:
    """Join lines without trailing space."""
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"
