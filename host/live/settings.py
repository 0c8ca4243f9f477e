"""The next settings of an engine: configuration and plugins after a live change."""

from __future__ import annotations

import dataclasses
import hashlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.errors import ConfigError, PluginNotFoundError, shown
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.host.registry.kinds import KINDS, Number, value_at
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.host.registry.references import default_name, with_references
from hardpoint.host.registry.selection import Selection
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import CHANGE, PluginUse, Reference
from hardpoint.plugins.server.settings import LiveSettings, Setting
from hardpoint.typed import Strict, convert, stable_bytes, suggest

Running = Literal["finish", "end"]
"""What requests do that use a component which is replaced or disabled: finish with it, or end."""

_OPTIONS = "plugin"
_POLICIES, _POLICY = "scheduling_policies", "scheduler.policy"


@dataclass(frozen=True)
class Settings:
    """The configuration of an engine, the sources of its values, and its plugins."""

    config: EngineConfig
    sources: ConfigSources
    plugins: PluginSet

    def shown(self) -> LiveSettings:
        """Return the settings as callers see them."""
        config, manifest = self.config, self.plugins.manifest
        changes = dict(settings_of(type(config)))
        plain = {path: value_at(config, path) for path in changes}
        for name, table in config.plugin.items():
            table_entries = [e for e in manifest.entries if name in (e.name, f"{e.kind}/{e.name}")]
            is_live = all(can_change(self.plugins, entry) for entry in table_entries)
            for option, value in table.items():
                path = f"{_OPTIONS}.{name}.{option}"
                changes[path], plain[path] = "live" if is_live else "restart", value
        values = {
            path: Setting(
                value=msgspec.to_builtins(plain[path], enc_hook=str),
                origin=self.sources.of(path),
                change=change,
            )
            for path, change in changes.items()
        }
        content = stable_bytes(({path: s.value for path, s in values.items()}, manifest.hash))
        fingerprint = hashlib.sha256(content).hexdigest()
        return LiveSettings(generation=manifest.generation, fingerprint=fingerprint, values=values)


class PluginChanges(Strict):
    """Changes of plugins, by the names under which they are enabled.

    Attributes:
        enable: as `plugins.enable`, in addition to the enabled plugins.
        disable: names of enabled components.
        replace: the component that takes an enabled one's place, by the latter's name.
        options: the options of components, by name; they replace the earlier ones.
    """

    enable: list[Reference | PluginUse] = []
    disable: list[str] = []
    replace: dict[str, Reference] = {}
    options: dict[str, dict[str, Any]] = {}


class Policy(Strict):
    """A scheduling policy, and its options alone."""

    use: Reference
    options: dict[str, Any] = {}


class ChangeRequest(Strict):
    """A request for a live change, as plain data.

    Attributes:
        origin: who asks, for messages and `GET /engines/settings`.
        config: values of the configuration, by dotted path.
        plugins: changes of plugins.
        policy: the scheduling policy.
        running: treatment of requests with a logits processor that is replaced or disabled.
    """

    origin: str
    config: dict[str, Any] = {}
    plugins: PluginChanges = PluginChanges()
    policy: Policy | None = None
    running: Running = "finish"

    @classmethod
    def of(cls, origin: str, **fields: Any) -> ChangeRequest:
        """Return the request of a caller, with references in the place of classes.

        Raises:
            ConfigError: a field is wrong; names it.
        """
        if (values := fields.get("config")) is not None and isinstance(values, Mapping):
            fields["config"] = {k: with_references(v, str(k), origin) for k, v in values.items()}
        if (changes := fields.get("plugins")) is not None and isinstance(changes, Mapping):
            table = {name: changes.get(name) for name in ("enable", "replace")}
            named = {name: value for name, value in table.items() if value is not None}
            fields["plugins"] = {**changes, **with_references(named, "plugins", origin)}
        if (policy := fields.get("policy")) is not None:
            use = with_references(policy.get("use"), _POLICY, origin)
            fields["policy"] = {**policy, "use": convert(use, str, path=_POLICY)}
        return convert({"origin": origin, **fields}, cls, path="")

    def __str__(self) -> str:
        """Return a description for logs, without the values of options, which may be secrets."""
        parts = [
            path if path.startswith(f"{_OPTIONS}.") else f"{path} = {shown(value)}"
            for path, value in self.config.items()
        ]
        changes = self.plugins
        parts += [f"enable {shown(item)}" for item in changes.enable]
        parts += [f"disable {shown(item)}" for item in changes.disable]
        parts += [f"replace {shown(name)} by {shown(use)}" for name, use in changes.replace.items()]
        parts += [
            f"options of {name}: {', '.join(options)}" for name, options in changes.options.items()
        ]
        if self.policy is not None:
            parts.append(f"{_POLICY} = {shown(self.policy.use)}")
        return "; ".join(parts) or "nothing"

    def settings(self, before: Settings) -> Settings:
        """Return the next settings.

        Raises:
            ConfigError: a value is wrong, there is no such setting, or it needs a restart.
            PluginError: there is no such component, or it cannot be loaded.
        """
        if self.policy is not None:
            return with_policy(before, self.policy.use, self.policy.options, self.origin)
        return with_plugins(before, self.plugins, self.config, self.origin)


def with_config(before: Settings, values: Mapping[str, Any], origin: str) -> Settings:
    """Return the settings with other values of the configuration.

    Args:
        values: by dotted path, such as "scheduler.max_waiting" or "plugin.fair.tag".
        origin: who changes them, for messages.

    Raises:
        ConfigError: a value is wrong, there is no such setting, or it needs a restart.
        PluginError: a component cannot be loaded.
    """
    config = before.config
    for path, value in values.items():
        if path.partition(".")[0] == _OPTIONS:
            config = _with_option(config, path, value)
            continue
        names = path.split(".")
        if _change_of(type(config), path) != "live":
            raise ConfigError(
                f"{path}: it cannot be changed while the engine runs; restart the engine with the "
                f"new value (live settings: {', '.join(live_paths(type(config)))})"
            )
        config = _with_value(config, names, value, path)
        if path == _POLICY and value != before.config.scheduler.policy:
            old = before.plugins.one(_POLICIES)
            if not any(_table_of(other, old) for other in values):
                config = _without_options(dataclasses.replace(before, config=config), old).config
    after = _resolved(before, config, _sources(before.sources, values, origin))
    for path in values:
        entries = after.plugins.manifest.tree()
        if path.startswith(f"{_OPTIONS}.") and not any(_table_of(path, entry) for entry in entries):
            raise ConfigError(f"{path}: expected an option of a plugin that is on (from {origin})")
    return after


def with_plugins(
    before: Settings, changes: PluginChanges, config: Mapping[str, Any], origin: str
) -> Settings:
    """Return the settings with other plugins, and other values of the configuration.

    Args:
        config: values by dotted path.
        origin: who changes them, for messages.

    Raises:
        ConfigError: an option is wrong.
        PluginError: there is no such component, or it cannot be loaded.
    """
    plugins = before.config.plugins
    enable = list(plugins.enable)
    disable, replace = list(plugins.disable), dict(plugins.replace)
    values, found = dict(config), before.plugins.found
    for name in changes.disable:
        named = _named(before.plugins, name, "disable")
        if named.chosen_by is not None:
            raise ConfigError(
                f"disable: {name!r} is the component that {named.chosen_by} chooses; replace it"
            )
        entry = named.entry
        remaining = [item for item in enable if not _names(item, entry, found)]
        if len(remaining) == len(enable):
            disable.append(f"{entry.kind}/{entry.name}")
        enable = remaining
        replace.pop(entry.name, None)
        before = _without_options(before, entry)
    for item in changes.enable:
        disable = [name for name in disable if not _enables(item, name, found)]
        enable.append(item)
    for name, use in changes.replace.items():
        named = _named(before.plugins, name, "replace")
        if named.chosen_by is None:
            _replace(named.entry, use, enable, replace, found)
        elif named.number is Number.ONE:
            values[named.chosen_by] = use
        else:
            chosen = value_at(before.config, named.chosen_by)
            entry = named.entry
            values[named.chosen_by] = [
                use if _names(item, entry, found) else item for item in chosen
            ]
    if (enable, disable, replace) != (plugins.enable, plugins.disable, plugins.replace):
        values |= {
            "plugins.enable": enable,
            "plugins.disable": disable,
            "plugins.replace": replace,
        }
    options = {f"{_OPTIONS}.{name}": table for name, table in changes.options.items()}
    return with_config(before, values | options, origin)


def with_policy(before: Settings, use: str, options: Mapping[str, Any], origin: str) -> Settings:
    """Return the settings with another scheduling policy, and its options alone.

    Args:
        use: entry-point name or FQCN.
        options: the policy's own.
        origin: who changes it, for messages.

    Raises:
        ConfigError, PluginError: the policy or one of its options is wrong.
    """
    config, sources = before.config, _sources(before.sources, {_POLICY: use}, origin)
    old = before.plugins.one(_POLICIES).name
    tables = {k: v for k, v in config.plugin.items() if k not in (old, f"{_POLICIES}/{old}")}
    scheduler = msgspec.structs.replace(config.scheduler, policy=use)
    config = msgspec.structs.replace(config, scheduler=scheduler, plugin=tables)
    if options:
        (chosen,) = Selection(config, sources, before.plugins.found).chosen(
            KINDS[_POLICIES], _POLICY
        )
        others = (e.name for e in before.plugins.manifest.entries if e.kind != _POLICIES)
        table = f"{_POLICIES}/{chosen.name}" if chosen.name in others else chosen.name
        sources = _sources(sources, {f"{_OPTIONS}.{table}": options}, origin)
        config = msgspec.structs.replace(config, plugin={**tables, table: dict(options)})
    return _resolved(before, config, sources)


def without_plugin(
    config: EngineConfig, entry: PluginEntry, installed: Sequence[InstalledPlugin]
) -> EngineConfig:
    """Return a configuration that does not enable a component of a kind of many."""
    plugins = config.plugins
    enable = [item for item in plugins.enable if not _names(item, entry, installed)]
    disable = plugins.disable
    if len(enable) == len(plugins.enable):
        disable = [*disable, f"{entry.kind}/{entry.name}"]
    replace = {name: use for name, use in plugins.replace.items() if name != entry.name}
    plugins = msgspec.structs.replace(plugins, enable=enable, disable=disable, replace=replace)
    return msgspec.structs.replace(config, plugins=plugins)


def live_paths(config_type: type[msgspec.Struct] = EngineConfig) -> list[str]:
    """Return the paths of the settings that change live."""
    return [path for path, change in settings_of(config_type) if change == "live"]


def settings_of(type_: type[msgspec.Struct], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each setting, but for options of plugins, and how it changes."""
    for name, hint in typing.get_type_hints(type_, include_extras=True).items():
        path = f"{above}{name}"
        if path == _OPTIONS or name not in type_.__struct_fields__:
            continue
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from settings_of(hint, f"{path}.")
        else:
            yield path, _change_of_type(hint)


def _change_of_type(hint: Any) -> str:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, Meta) and meta.extra and CHANGE in meta.extra:
            return str(meta.extra[CHANGE])
    return "restart"


def _change_of(config_type: type[EngineConfig], path: str) -> str:
    known = dict(settings_of(config_type))
    if path not in known:
        raise ConfigError(f"{path}: there is no such setting{suggest(path, list(known))}")
    return known[path]


def _table_of(path: str, entry: PluginEntry) -> bool:
    name = path.partition(".")[2].partition(".")[0]
    return path.startswith(f"{_OPTIONS}.") and name in (entry.name, f"{entry.kind}/{entry.name}")


def _with_value(table: Any, names: Sequence[str], value: Any, path: str) -> Any:
    name, *rest = names
    if rest:
        value = _with_value(getattr(table, name), rest, value, path)
        return msgspec.structs.replace(table, **{name: value})
    fields = {field: getattr(table, field) for field in table.__struct_fields__}
    return convert(fields | {name: value}, type(table), path=path.rpartition(".")[0])


def _with_option(config: EngineConfig, path: str, value: Any) -> EngineConfig:
    name, _, option = path.partition(".")[2].partition(".")
    if option:
        value = {**config.plugin.get(name, {}), option: value}
    table = convert(value, dict[str, Any], path=f"{_OPTIONS}.{name}")
    return msgspec.structs.replace(config, plugin={**config.plugin, name: table})


def _sources(before: ConfigSources, paths: Mapping[str, Any], origin: str) -> ConfigSources:
    unchanged = {
        known: source
        for known, source in before.by_path.items()
        if not any(f"{known}.".startswith((f"{path}.", f"{path}[")) for path in paths)
    }
    return ConfigSources({**unchanged, **dict.fromkeys(paths, origin)})


def _without_options(settings: Settings, entry: PluginEntry) -> Settings:
    config, entries = settings.config, settings.plugins.manifest.entries
    names = {f"{entry.kind}/{entry.name}"}
    if all(other.kind == entry.kind for other in entries if other.name == entry.name):
        names.add(entry.name)
    tables = {name: table for name, table in config.plugin.items() if name not in names}
    return dataclasses.replace(settings, config=msgspec.structs.replace(config, plugin=tables))


@dataclass(frozen=True)
class _NamedEntry:
    entry: PluginEntry
    chosen_by: str | None
    number: Number


def _named(plugins: PluginSet, name: str, path: str) -> _NamedEntry:
    """Return the enabled component of a name, or of `kind/name`."""
    entries = plugins.manifest.entries
    matches = [e for e in entries if name in (e.name, f"{e.kind}/{e.name}", e.value)]
    if not matches:
        known = [entry.name for entry in entries if can_change(plugins, entry)]
        raise PluginNotFoundError(
            f"{path}: no component {shown(name)} is enabled{suggest(name, known)}"
        )
    if len({entry.value for entry in matches}) > 1:
        choices = " or ".join(f'"{entry.kind}/{entry.name}"' for entry in matches)
        raise ConfigError(f"{path}: {name!r} could be {choices}")
    kind = KINDS[matches[0].kind]
    return _NamedEntry(matches[0], kind.chosen_by, kind.number)


def _names(item: Any, entry: PluginEntry, installed: Sequence[InstalledPlugin]) -> bool:
    """Return whether an item of the configuration enables a component under its name."""
    use, name = _use_of(item)
    if use == entry.value:
        return (name or default_name(use, installed)) == entry.name
    if name is not None:
        return name == entry.name and ":" not in use
    return use in (entry.name, entry.path)


def _enables(item: Any, name: str, installed: Sequence[InstalledPlugin]) -> bool:
    """Return whether an item would enable a component that is disabled by a name."""
    use, own_name = _use_of(item)
    plugins = [f for f in installed if use in f.references]
    if own_name is not None:
        plugins = [plugin for plugin in plugins if plugin.name == own_name]
    return any(name in plugin.references for plugin in plugins)


def _use_of(item: Any) -> tuple[str, str | None]:
    """Return the reference and the name, if it has one, of an item of the configuration."""
    if isinstance(item, PluginUse):
        return item.use, item.name
    if isinstance(item, Mapping):
        return str(item.get("use")), item.get("name")
    return str(item), None


def _replace(
    entry: PluginEntry,
    use: Any,
    enable: list[Any],
    replace: dict[str, Any],
    installed: Sequence[InstalledPlugin],
) -> None:
    for index, item in enumerate(enable):
        if _names(item, entry, installed):
            enable[index] = PluginUse(use=use, name=entry.name)
            return
    replace[entry.name] = use


def _resolved(before: Settings, config: EngineConfig, sources: ConfigSources) -> Settings:
    """Return settings with the plugins that a configuration names, in the next generation."""
    old = before.plugins
    fresh = resolve_plugins(config, sources, old.found)
    was, now = ({(e.kind, e.name): e for e in p.manifest.entries} for p in (old, fresh))
    sets = ((old, was), (fresh, now))
    changed: set[str] = set()
    for key in sorted(was.keys() | now.keys()):
        if not _are_same(was.get(key), now.get(key)):
            kind, name = key
            if (why := KINDS[kind].restart) is not None:
                raise ConfigError(
                    f"plugins: {kind}/{name}: components of kind {kind} cannot be changed while "
                    f"the engine runs: {why}; restart it with the new configuration"
                )
            for plugins, entries in sets:
                if (entry := entries.get(key)) is not None and not can_change(plugins, entry):
                    raise ConfigError(
                        f"plugins: {entry.source}: it cannot be changed while the engine runs: its "
                        f"class does not set changes_live = True; restart it with the new "
                        f"configuration"
                    )
            changed.add(kind)
    return Settings(config, sources, old.successor(fresh, changed))


def can_change(plugins: PluginSet, entry: PluginEntry) -> bool:
    """Return whether the component of an entry can be changed while an engine runs."""
    return KINDS[entry.kind].can_change(plugins.loaded(entry))


def _are_same(first: PluginEntry | None, second: PluginEntry | None) -> bool:
    return first is not None and first.is_same(second)
