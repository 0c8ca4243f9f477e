"""The settings that `GET /engines/settings` shows, and the changes that `PATCH` allows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hardpoint.plugins import EngineConfig, RequestError
from hardpoint.typed import Strict

if TYPE_CHECKING:
    from hardpoint.plugins.server.settings import LiveSettings


_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
_HIDDEN = "***"
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""The path of a class; an option may name one that its component wraps."""
_NAMING = ("scheduler.policy", "parallel.balancer", "stats.sinks")
"""Settings whose values are names of plugins."""


class ChangedPlugins(Strict):
    """Changes of plugins, see `AsyncLLM.plugins.change`; all names have to be in `plugins.live`."""

    enable: list[str] = []
    disable: list[str] = []
    replace: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {}


class SetSettings(Strict):
    """Changes of settings and plugins: all of them are made, or none."""

    config: dict[str, Any] = {}
    plugins: ChangedPlugins = ChangedPlugins()
    running: Literal["finish", "end"] = "finish"


def check_names(body: SetSettings, config: EngineConfig) -> None:
    """Check that a change names plugins of `plugins.live` alone.

    Raises:
        RequestError: it names another one, or gives code by its path.
    """
    for path, name in _named(body):
        check_name(path, name, config)


def check_name(path: str, name: Any, config: EngineConfig) -> None:
    """Check that the name of a plugin at a path of a request is one of `plugins.live`.

    Raises:
        RequestError: it is another one, or code by its path.
    """
    if not name or not isinstance(name, str) or ":" in name or "." in name or "/" in name:
        # A class by its path would be code that a request chooses.
        raise RequestError(f"{path}: expected the name of a plugin, got {str(name)[:100]!r}")
    if name not in config.plugins.live:
        known = ", ".join(config.plugins.live) or "nothing"
        raise RequestError(
            f"{path}: {name[:100]!r} is not among the plugins that may change over HTTP "
            f"(plugins.live has {known})"
        )


def _named(body: SetSettings) -> Iterator[tuple[str, Any]]:
    plugins = body.plugins
    for field, names in (("enable", plugins.enable), ("disable", plugins.disable)):
        for index, name in enumerate(names):
            yield f"plugins.{field}[{index}]", name
    for name, use in plugins.replace.items():
        yield f"plugins.replace.{name}", name
        yield f"plugins.replace.{name}", use
    for name, options in plugins.options.items():
        yield f"plugins.options.{name}", name
        yield from named_in(f"plugins.options.{name}", options)
    for path, value in body.config.items():
        for name in _named_by(path, value):
            yield f"config.{path}", name
        if path.startswith("plugin."):
            yield from named_in(f"config.{path}", value)


def named_in(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the components that a value of options names: wrapped ones, and classes by paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_in(f"{path}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from named_in(path, item)
    elif isinstance(value, str) and (path.endswith(".wraps") or _CLASS.fullmatch(value)):
        yield path, value


def _named_by(path: str, value: Any) -> list[Any]:
    """Return the names of plugins that a setting has, or that its path has.

    Raises:
        RequestError: it belongs into another field.
    """
    table, _, rest = path.partition(".")
    if table == "plugins" and rest in ("enable", "disable", "replace"):
        raise RequestError(f"config.{path}: expected in plugins.{rest}, not here")
    if table == "plugin":
        return [rest.partition(".")[0]]
    if path not in _NAMING:
        return []
    return value if isinstance(value, list) else [value]


def shown_settings(settings: LiveSettings) -> dict[str, Any]:
    """Return settings as plain data, without secrets."""
    values = {
        path: {
            "value": _without_secret(_name_of(path, setting.value), setting.value),
            "origin": setting.origin,
            "change": setting.change,
        }
        for path, setting in settings.values.items()
    }
    return {
        "generation": settings.generation,
        "fingerprint": settings.fingerprint,
        "settings": values,
    }


def _name_of(path: str, value: Any) -> str:
    """Return the name by which a value may be a secret; a number of tokens has none."""
    is_amount = isinstance(value, int | float | None) and not path.startswith("plugin.")
    return "" if is_amount else path.rpartition(".")[2]


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without secrets and without users of URLs."""
    return {name: _without_secret(name, value) for name, value in options.items()}


def _without_secret(name: str, value: Any) -> Any:
    if _SECRET.search(name):
        return _HIDDEN
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, str):
        return _USER_OF_URL.sub(_HIDDEN, value)
    if isinstance(value, Sequence):
        return [_without_secret("", item) for item in value]
    return value
