"""An enabled component, as the configuration or a default names it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hardpoint.plugins.manifest import Source

from .kinds import Kind

NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060\ufeff]{1,100}")
NAMES = "1 to 100 printable characters without blanks"
"""The names that tables, requests and messages can have."""


@dataclass(frozen=True)
class SelectedPlugin:
    """An enabled component.

    Attributes:
        path: the configuration path that names it; empty for built-in defaults.
        target: the imported object, if selecting it needed an import.
        stays: whether only the frontend has it.
    """

    kind: Kind
    source: Source
    path: str = ""
    target: Any = None
    stays: bool = False

    @property
    def name(self) -> str:
        """The name under which it is enabled."""
        return self.source.name

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, name and value; those of its `PluginEntry`."""
        return self.kind.name, self.name, self.source.value

    def answers_to(self, reference: str) -> bool:
        """Return whether a reference is its name, with or without its kind, or its FQCN."""
        return reference in (self.name, f"{self.kind.name}/{self.name}", self.source.value)


def name_of(reference: str, among: Iterable[SelectedPlugin]) -> str:
    """Return a hint at the name of a component where only names count, if there is one."""
    for item in among:
        if item.answers_to(reference):
            return f"; {reference} is enabled as {item.name!r}, so write {toml_key(item.name)}"
    return ""


def toml_key(name: str) -> str:
    """Return a name as a key of a TOML document, in quotes where TOML needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
