"""docs/kv-connectors.md: every setting and every option of a built-in store, with its default."""

from __future__ import annotations

import pkgutil
import re

import msgspec
import pytest
from support.processes import ROOT

from hardpoint.builtin_plugins.kv_connectors.stores import StoresConnector
from hardpoint.host.registry.discovery import discover
from hardpoint.plugins.config_tables import KVConnectorConfig

PAGE = (ROOT / "docs" / "kv-connectors.md").read_text(encoding="utf-8")
STORES = [plugin for plugin in discover() if plugin.kind == "kv_stores" and plugin.builtin]
TABLES = {
    "kv_connector": KVConnectorConfig,
    "plugin.stores": StoresConnector.Options,
    **{f"plugin.{plugin.name}": pkgutil.resolve_name(plugin.value).Options for plugin in STORES},
}


def rows(table):
    """Return the default as text of each setting of a table on the page."""
    text = PAGE.split(f"\n`[{table}]`", 1)[1].split("|\n\n", 1)[0]
    defaults = {}
    for names, default in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", text, re.MULTILINE):
        settings = re.findall(r"`(\w+)`", names)
        of_each = default.split(", ") if ", " in default else [default] * len(settings)
        defaults.update(zip(settings, of_each, strict=True))
    return defaults


def shown(field):
    """Return the texts with the default of a field on the page."""
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return {"required"}
    if field.name == "use":
        return {"`stores` if there are some"}
    value = field.default
    if value is msgspec.NODEFAULT or value is None:
        return {"none"}
    if isinstance(value, bool):
        return {str(value).lower()}
    if isinstance(value, str):
        return {f"`{value}`", f'`"{value}"`'}
    sizes = {value / (1 << 20): "MiB", value / (1 << 30): "GiB"}
    return {f"{value:g}"} | {f"{count:g} {unit}" for count, unit in sizes.items()}


@pytest.mark.parametrize("table", TABLES)
def test_every_setting_is_described_with_its_default(table):
    fields = {field.name: field for field in msgspec.structs.fields(TABLES[table])}
    defaults = rows(table)
    assert sorted(defaults) == sorted(fields)
    wrong = {
        name: default for name, default in defaults.items() if default not in shown(fields[name])
    }
    assert wrong == {}


def test_every_store_is_recommended_for_something():
    table = PAGE.split("## Choose a store", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert {plugin.name for plugin in STORES} <= set(named)
