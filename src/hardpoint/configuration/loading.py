"""Builds the configuration: file, then environment, then arguments; later ones win.

Tables are merged, every other value is replaced. Each value remembers who set it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from hardpoint.configuration.names_of_vllm import key_hint
from hardpoint.configuration.whole_numbers import whole_number
from hardpoint.errors import shown
from hardpoint.host.registry.discovery import InstalledPlugin, discover
from hardpoint.host.registry.model_files import alias_of
from hardpoint.host.registry.plugin_options import Tables, declared_tables
from hardpoint.host.registry.references import with_handed_over, with_references
from hardpoint.host.registry.selection import Selection
from hardpoint.plugins import ConfigError, EngineConfig, HardpointError
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import PluginsConfig
from hardpoint.typed import convert, join_path, parse_value, plain_data, split_setting
from hardpoint.typed.describing import type_at

__all__ = [
    "PREFIX",
    "ConfigBuilder",
    "config_from",
    "default_config_type",
    "file_table",
    "filled",
    "find_tables",
    "load_config",
    "setting_paths",
]

DEFAULT_FILE = "hardpoint.toml"
PREFIX = "HARDPOINT__"


def load_config(
    path: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[EngineConfig, ConfigSources]:
    """Return the configuration of a command line, and where each value came from.

    Args:
        path: a TOML file; None is `hardpoint.toml` in the working directory, if there is one.
        settings: as `--set` takes them, such as `scheduler.policy=fair`.
        model: as `--model` takes it; wins over `settings`.
        environ: None is the process's own.

    Raises:
        ConfigError: naming path, value, the expected value, and the value's origin.
    """
    table = file_table(path)

    def fill(builder: ConfigBuilder) -> None:
        builder.add_table(*table)
        builder.add_environment(os.environ if environ is None else environ)
        for setting in settings:
            builder.add_setting(setting)
        if model is not None:
            builder.add_table({"model": model}, "argument --model")

    return _built(fill)


def config_from(
    value: str | Path | Mapping[str, Any] | EngineConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    caller: str = "LLM",
    passed_plugins: Sequence[InstalledPlugin] = (),
) -> tuple[EngineConfig, ConfigSources]:
    """Return the configuration of a Python call, and where each value came from.

    Reads neither `hardpoint.toml` nor the environment: a program configures itself.

    Args:
        value: the argument `config`: the path of a TOML file, a nested mapping or an
            EngineConfig; None is the defaults.
        overrides: arguments given by name, by dotted path such as `tokenizer.path`; None is not
            given.
        caller: name of the called class, for the config_sources.
        passed_plugins: the plugins that the call hands over, which may declare tables.

    Raises:
        ConfigError: as `load_config`.
    """
    origin = f"argument {caller}(config=...)"
    table: tuple[Mapping[str, Any], str] = {}, origin
    if isinstance(value, EngineConfig):
        plain = _plain(with_references(value, "", origin), "config")
        table = _changes(plain, _plain(type(value)(), "")), origin
    elif isinstance(value, Mapping):
        table = with_references(value, "", origin), origin
    elif isinstance(value, str | Path):
        table = file_table(value)
    elif value is not None:
        raise ConfigError(
            f"config: expected a path, a mapping or an EngineConfig, got {shown(value)} "
            f"(from {origin})"
        )

    def fill(builder: ConfigBuilder) -> None:
        builder.add_table(*table)
        for path, override in (overrides or {}).items():
            if override is not None:
                steps = path.split(".")
                builder.put(steps, override, f"argument {caller}({steps[0]}=...)")

    return _built(fill, passed_plugins)


def default_config_type() -> type[EngineConfig]:
    """Return the type of a configuration with the tables of the plugins enabled by default."""
    return EngineConfig.with_tables(find_tables(PluginsConfig(), ConfigSources()))


def find_tables(
    plugins: PluginsConfig,
    config_sources: ConfigSources,
    passed_plugins: Sequence[InstalledPlugin] = (),
) -> Tables:
    """Return the tables of the hooks that a configuration enables, which are imported.

    Args:
        plugins: the table `plugins`.
        config_sources: sources of its values.
        passed_plugins: the plugins that the program passes, see `handed_over`.

    Raises:
        PluginError, ConfigError: a component cannot be enabled, or declares no valid table.
    """
    installed = with_handed_over(discover(plugins.foreign_groups), passed_plugins)
    selection = Selection(EngineConfig(plugins=plugins), config_sources, installed)
    chosen, load = selection.enabled(), selection.adapters.import_object
    return declared_tables(
        (load(item.source) if item.target is None else item.target, item.source)
        for item in chosen
        if item.kind.interface is None
    )


def file_table(path: str | Path | None) -> tuple[dict[str, Any], str]:
    """Return the content of a file, or of the default one if it exists, and its origin.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None and not Path(DEFAULT_FILE).is_file():
        return {}, ""
    file = Path(DEFAULT_FILE if path is None else path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")), f"file {file}"
    except FileNotFoundError:
        raise ConfigError(f"config: there is no file {str(file)!r}") from None
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"config: {str(file)!r} is not valid TOML: {cause}") from None
    except (OSError, ValueError) as cause:  # also of a name that no file can have
        raise ConfigError(f"config: {str(file)!r} cannot be read: {cause}") from None


def _built(
    fill: Callable[[ConfigBuilder], None], passed_plugins: Sequence[InstalledPlugin] = ()
) -> tuple[EngineConfig, ConfigSources]:
    """Return the configuration of the values that `fill` gives to a builder.

    They are given twice: which tables there are depends on the plugins that they enable.
    """
    first = filled(EngineConfig, fill)
    problem = None
    try:
        type_ = EngineConfig.with_tables(find_tables(*first.plugins(), passed_plugins))
    except HardpointError as error:  # whatever uses plugins raises it again
        type_, problem = default_config_type(), error
    return filled(type_, fill).build(problem)


def filled(type_: type[EngineConfig], fill: Callable[[ConfigBuilder], None]) -> ConfigBuilder:
    """Return a builder with all values; plugins that the model needs come first."""
    builder = ConfigBuilder(type_)
    fill(builder)
    if (alias := alias_of(builder.model)) is None or not alias.config:
        return builder
    whole = ConfigBuilder(type_)
    whole.add_table(alias.config, f"model {builder.model!r}")
    fill(whole)
    whole.enable_besides(alias.config["plugins"]["enable"])
    return whole


def _declarer_of(table: str) -> str:
    """Return which plugin may declare a table that none does, as the end of a message.

    Metadata alone is read, so it is the plugin of hooks that has the table's name.
    """
    named = (f.label for f in discover() if (f.kind, f.name) == ("hooks", table))
    if label := next(named, None):
        return f"; {label} may declare it, and is not enabled"
    return ""


class ConfigBuilder:
    """Merges values from several origins and records the origin of each."""

    def __init__(self, type_: type[EngineConfig]) -> None:
        self._type = type_
        self._tree: dict[str, Any] = {}
        self._config_sources: dict[str, str] = {}
        self._variables: dict[str, str] = {}

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Add the variables that start with `HARDPOINT__`; `__` goes one level down."""
        names = self._variables  # also those of earlier calls
        for name in sorted(environ):
            if name.startswith(PREFIX):
                steps = _steps_of_variable(name)
                path = join_path(*steps)
                if path in names:
                    raise ConfigError(
                        f"{path}: set twice, by {names[path]} and {name} (from environment)"
                    )
                names[path] = name
                self.put(steps, self._value(environ[name], steps), f"environment {name}")

    def add_setting(self, setting: str) -> None:
        """Add a value as `--set` takes it."""
        steps, text = split_setting(setting, "--set", "scheduler.policy=fair")
        self.put(steps, self._value(text, steps), f"argument --set {join_path(*steps)}")

    def add_table(self, table: Mapping[str, Any], origin: str) -> None:
        """Add the values of nested tables."""
        for key, value in _plain(table, "", origin).items():
            self.put([_name(key, (), origin)], value, origin)

    @property
    def model(self) -> Any:
        """The model; None if none is given as text."""
        name = self._tree.get("model")
        return name if isinstance(name, str) else None

    def enable_besides(self, needed: Sequence[Any]) -> None:
        """Enable further plugins, before the configured ones."""
        enabled = self._tree.get("plugins", {}).get("enable")
        if isinstance(enabled, list):
            enabled[:0] = [plugin for plugin in needed if plugin not in enabled]

    def plugins(self) -> tuple[PluginsConfig, ConfigSources]:
        """Return the table `plugins`, and the sources of values."""
        table = convert(self._tree.get("plugins", {}), PluginsConfig, path="plugins")
        return table, ConfigSources(self._config_sources)

    def build(self, problem: HardpointError | None) -> tuple[EngineConfig, ConfigSources]:
        """Check the whole and return it.

        Args:
            problem: why plugins of the configuration, and so their tables, are not known.
        """
        config_sources = ConfigSources(self._config_sources)
        unknown = [key for key in self._tree if key not in self._type.__struct_fields__]
        if unknown and problem is not None:
            raise problem
        try:
            return convert(self._tree, self._type, path=""), config_sources
        except ConfigError as error:
            message = str(error)
            if message.startswith(tuple(unknown)):
                if hint := key_hint(unknown[0]):
                    message = f"{unknown[0]}: unknown field"
                message += hint or _declarer_of(unknown[0])
            raise ConfigError(config_sources.locate(message)) from None

    def discard(self, steps: Sequence[str | int]) -> int:
        """Remove the innermost value on a path; return the number of its steps, 0 without one."""
        holder: Any = None
        value: Any = self._tree
        depth = 0
        for step in steps:
            if not _has(value, step):
                break
            holder, value = value, value[step]
            depth += 1
        if depth:
            del holder[steps[depth - 1]]
        return depth

    def put(self, steps: Sequence[str], value: Any, origin: str) -> None:
        """Set a value; a table is merged into the current one, key by key."""
        table, path = self._open(steps, origin), join_path(*steps)
        plain = _plain(value, path, origin)
        if isinstance(plain, dict):
            if not isinstance(table.get(steps[-1]), dict):
                table[steps[-1]] = {}
            self._record_table(steps, origin)
            for key, item in plain.items():
                self.put([*steps, _name(key, steps, origin)], item, origin)
            return
        for below in [known for known in self._config_sources if known.startswith(f"{path}.")]:
            del self._config_sources[below]
        table[steps[-1]] = plain
        self._config_sources[path] = origin

    def _open(self, steps: Sequence[str], origin: str) -> dict[str, Any]:
        table = self._tree
        for depth, step in enumerate(steps[:-1], start=1):
            path = join_path(*steps[:depth])
            inner = table.setdefault(step, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"{join_path(*steps)}: cannot be set, for {path} is no table but {inner!r}, "
                    f"from {self._config_sources[path]} (from {origin})"
                )
            self._record_table(steps[:depth], origin)
            table = inner
        return table

    def _record_table(self, steps: Sequence[str], origin: str) -> None:
        """Record the last origin of a table.

        A struct has none: fields that are not set in it keep their defaults.
        """
        if not isinstance(type_at(self._type, steps), types.StructType):
            self._config_sources[join_path(*steps)] = origin

    def _value(self, text: str, steps: Sequence[str]) -> Any:
        """Return the value of a text: the text itself where a string is required."""
        value, wanted = parse_value(text), type_at(self._type, steps)
        if (number := whole_number(text)) is not None and _wants_count(wanted):
            return number
        if isinstance(value, str) or not _wants_text(wanted, value):
            return value
        return text


def _has(value: Any, step: str | int) -> bool:
    """Return whether a table has a key, or a list an index."""
    if isinstance(step, int):
        return isinstance(value, list) and step < len(value)
    return isinstance(value, dict) and step in value


def _steps_of_variable(name: str) -> list[str]:
    """Return the path of an environment variable.

    Names are written in capitals and stand for small letters. A step after `PLUGIN__` or
    `PLUGINS__REPLACE__` may have capitals of its own: with a small letter, it is kept.
    """
    steps = name.removeprefix(PREFIX).split("__")
    if not all(steps):
        raise ConfigError(
            f"{name}: expected a path such as {PREFIX}SCHEDULER__POLICY, got an empty step "
            f"(from environment)"
        )
    small = [step.lower() for step in steps]
    fixed = 1 if small[0] == "plugin" else 2 if small[:2] == ["plugins", "replace"] else len(steps)
    return small[:fixed] + [step.lower() if step.isupper() else step for step in steps[fixed:]]


def _wants_count(info: types.Type | None) -> bool:
    if isinstance(info, types.Metadata):
        return _wants_count(info.type)
    if isinstance(info, types.UnionType):
        others = (types.FloatType, types.StrType)
        options = [o.type if isinstance(o, types.Metadata) else o for o in info.types]
        return any(map(_wants_count, options)) and not any(isinstance(o, others) for o in options)
    return isinstance(info, types.IntType)


def _wants_text(info: types.Type | None, value: object) -> bool:
    if isinstance(info, types.Metadata):
        return _wants_text(info.type, value)
    if isinstance(info, types.UnionType):
        options = [o.type if isinstance(o, types.Metadata) else o for o in info.types]
        if isinstance(value, bool) and any(isinstance(o, types.BoolType) for o in options):
            return False
        return any(_wants_text(o, value) for o in options) and not any(
            isinstance(o, types.IntType | types.FloatType) for o in options
        )
    return isinstance(info, types.StrType | types.LiteralType)


def _plain(value: Any, path: str, origin: str = "default") -> Any:
    try:
        return plain_data(value, path=path, paths=True)
    except ConfigError as error:
        raise ConfigError(f"{error} (from {origin})") from None


def _name(key: Any, steps: Sequence[str], origin: str) -> str:
    if not isinstance(key, str):
        where = join_path(*steps) or "config"
        raise ConfigError(f"{where}: expected names as keys, got {key!r} (from {origin})")
    return key


def _changes(table: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in table.items():
        current = default.get(key)
        if isinstance(value, dict) and isinstance(current, dict):
            if inner := _changes(value, current):
                changed[key] = inner
        elif value != current:
            changed[key] = value
    return changed


def setting_paths(config_type: type[EngineConfig]) -> Iterator[str]:
    """Yield the paths of all settings, such as "scheduler.policy"."""

    def paths(table: Mapping[str, Any], start: str) -> Iterator[str]:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                yield from paths(value, f"{start}{key}.")
            else:
                yield f"{start}{key}"

    return paths(msgspec.to_builtins(config_type()), "")
