"""A configuration file with every setting as a comment, from the docstrings of the settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import msgspec

from hardpoint.builtin_plugins.commands.shown import toml
from hardpoint.typed.describing import FieldDoc, first_paragraph, struct_fields

__all__ = ["configuration_file"]

_HEAD = """\
# The configuration of Hardpoint: `hardpoint config show` prints the values in use and where each
# came from, `hardpoint config check` all errors. Remove the `#` before a setting to change it;
# the value shown is the default. An environment variable such as HARDPOINT__SCHEDULER__POLICY
# wins over this file, and `--set scheduler.policy=fair` over both."""
_WIDTH = 98


def configuration_file(type_: type[msgspec.Struct]) -> str:
    """Return the text of the file: each setting with its description, type and default."""
    return "\n".join([_HEAD, *_lines(type_, "")]) + "\n"


def _lines(table: type[msgspec.Struct], path: str) -> Iterator[str]:
    """Yield a table's values, then the tables in it, as TOML wants them."""
    fields = struct_fields(table)
    if path:
        yield from ("", f"[{path}]")
        yield from _comment(first_paragraph(table))
    for field in fields:
        if field.table is None:
            yield from _setting(field)
    for field in fields:
        if field.table is not None:
            yield from _lines(field.table, f"{path}.{field.name}" if path else field.name)


def _setting(field: FieldDoc) -> Iterator[str]:
    default = None if field.required else msgspec.to_builtins(field.default)
    yield ""
    yield from _comment(f"{field.doc or field.name} ({field.type_text})")
    if default is None:
        yield f"# {field.name} =   # no default"
    else:
        yield f"# {field.name} = {toml(default)}"


def _comment(text: str) -> list[str]:
    prefix = "# "
    # Code stays in one line: the rest of `{ use = "disk", name = "ssd" }` would read as a setting.
    lines = textwrap.wrap(
        re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), text),
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]
