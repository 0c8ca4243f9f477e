"""The tables that plugins of kind `hooks` add to the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from hardpoint.errors import PluginConflictError, PluginContractError, shown
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.plugins.config_tables import PluginsConfig
from hardpoint.plugins.manifest import Source
from hardpoint.registry.kinds import PLANNED
from hardpoint.typed import Strict

from .discovery import advice, discover
from .loading import import_object, inspecting
from .selection import Selection

Tables = dict[str, type[Strict]]

_NAME = re.compile("[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""What a variable of the environment can name, where `__` goes one level down."""


def find_tables(plugins: PluginsConfig, config_sources: ConfigSources) -> Tables:
    """Return the tables of the hooks that a configuration enables, which are imported.

    Raises:
        PluginError, ConfigError: a component cannot be enabled, or declares no valid table.
    """
    found = discover(plugins.foreign_groups)
    chosen = Selection(EngineConfig(plugins=plugins), config_sources, found).enabled()
    return declared_tables(
        (import_object(item.source) if item.target is None else item.target, item.source)
        for item in chosen
        if item.kind.interface is None
    )


def declared_tables(hooks: Iterable[tuple[Any, Source]]) -> Tables:
    """Return the tables that hooks declare as `config_table`, by name.

    Raises:
        PluginContractError: naming the plugin and what is wrong with its declaration.
        PluginConflictError: two plugins declare one table, or one that Hardpoint has.
    """
    tables: Tables = {}
    sources: dict[str, Source] = {}
    for target, source in hooks:
        with inspecting(source):
            declared = getattr(target, "config_table", None)
        if declared is None:
            continue
        name, tables[name] = _checked(declared, source)
        if (other := sources.setdefault(name, source)) is not source:
            raise PluginConflictError(
                f"two plugins declare the configuration table {name!r}: {other} and {source}"
            )
    return tables


def declarer_of(table: str) -> str:
    """Return which plugin may declare a table that none does, as the end of a message.

    Metadata alone is read, so it is the plugin of hooks that has the table's name.
    """
    named = (f.label for f in discover() if (f.kind, f.name) == ("hooks", table))
    if label := next(named, None):
        return f"; {label} may declare it, and is not enabled"
    return advice("hooks", table)


def _checked(declared: Any, source: Source) -> tuple[str, type[Strict]]:
    """Return the name and type of a declared table."""
    match declared:
        case (str() as name, type() as table) if issubclass(table, Strict):
            pass
        case _:
            raise PluginContractError(
                f"{source}: its config_table must be a name and a class derived from "
                f'hardpoint.typed.Strict, such as ("acme", AcmeConfig), got {shown(declared)}'
            )
    if not _NAME.fullmatch(name):
        raise PluginContractError(
            f"{source}: its config_table: expected a name of small letters, digits and single "
            f"'_', got {name!r}"
        )
    if name in EngineConfig.__struct_fields__ or name in {*PLANNED, *PLANNED.values()}:
        raise PluginConflictError(
            f"{source}: its config_table: Hardpoint itself has the configuration table {name!r}"
        )
    for field in msgspec.structs.fields(table):
        if field.required:
            raise PluginContractError(
                f"{source}: its config_table: {table.__name__}.{field.name} needs a default, since "
                f"a configuration may leave it out"
            )
    return name, table
