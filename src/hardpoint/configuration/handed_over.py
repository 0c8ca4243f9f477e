"""Plugins that a program hands over to `LLM` or `AsyncLLM` as Python objects."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import chain, count
from types import ModuleType
from typing import Any

from hardpoint.errors import ConfigError, shown
from hardpoint.host.registry.adapt import ADAPTER_KIND, ComponentAdapters, load_adapters
from hardpoint.host.registry.discovery import InstalledPlugin, discover
from hardpoint.host.registry.loading import hook_functions, inspecting, marks_hooks, snake_case
from hardpoint.host.registry.references import find_reference, offered_plugins
from hardpoint.plugins.component import ComponentAdapter, Source
from hardpoint.plugins.server.hook_specs import ENGINE_HOOKS


def handed_over(plugins: Sequence[object] | None, caller: str) -> list[InstalledPlugin]:
    """Return the plugins that a program hands over as `plugins`, as if they were installed.

    Args:
        plugins: modules, classes or objects: of hooks, or components themselves.
        caller: name of the called class, for messages.

    Raises:
        ConfigError: the list holds something else, or one object twice.
        PluginError: one cannot be looked at, or is a component that no FQCN finds.
    """
    if not isinstance(plugins, list | tuple | None):
        raise ConfigError(
            f"plugins: expected a list of modules, classes or objects, got {shown(plugins)} "
            f"(from argument {caller}(plugins=...))"
        )
    if not plugins:
        return []
    installed, passed = discover(), list[InstalledPlugin]()
    adapters = _adapters_among(plugins, installed, caller)
    for index, target in enumerate(plugins):
        if isinstance(target, str):
            raise ConfigError(
                f"plugins[{index}]: expected a module, a class or an object, got {target!r}; names "
                f"and FQCNs go to plugins.enable (from argument {caller}(plugins=...))"
            )
        if any(target is other for other in plugins[:index]):
            raise ConfigError(
                f"plugins[{index}]: {shown(target)} is in the list twice "
                f"(from argument {caller}(plugins=...))"
            )
        origin = f"plugins= of {caller}, item {index}"
        passed += _handed(target, origin, installed, passed, adapters)
    return passed


def _adapters_among(
    plugins: Sequence[object], installed: Sequence[InstalledPlugin], caller: str
) -> ComponentAdapters:
    sources = [f.source("default") for f in installed if f.kind == ADAPTER_KIND and f.builtin]
    for index, target in enumerate(plugins):
        if inspect.isclass(target) and issubclass(target, ComponentAdapter):
            origin = f"plugins= of {caller}, item {index}"
            sources.append(Source.of_module(_name_of(target), _value_of(target), origin))
    return ComponentAdapters(lambda: load_adapters(sources))


def _handed(
    target: Any,
    origin: str,
    installed: Sequence[InstalledPlugin],
    earlier: list[InstalledPlugin],
    adapters: ComponentAdapters,
) -> list[InstalledPlugin]:
    is_importable = inspect.isclass(target) or isinstance(target, ModuleType)
    cls = target if is_importable else type(target)
    described = Source.of_module(_name_of(cls), _value_of(cls), origin)
    with inspecting(described):
        is_hooks = marks_hooks(target)
    if not is_hooks:
        return offered_plugins(described.name, target, described, installed, adapters, origin)
    value, problem = find_reference(target)
    engine_hooks = [name for name in hook_functions(target) if name in ENGINE_HOOKS]
    known = next((f for f in installed if (f.kind, f.value) == ("hooks", value)), None)
    stays = bool(problem) or not (is_importable or engine_hooks)
    names = [plugin.name for plugin in earlier if plugin.kind == "hooks"]
    return [
        InstalledPlugin(
            "hooks",
            known.name if known else _unused(described.name, names),
            f"{described.value}{'' if is_importable else '()'}" if problem else value,
            known.distribution if known else described.distribution,
            known.version if known else described.version,
            origin=origin,
            target=target,
            stays=stays,
            problem=f"the engine's process calls its {engine_hooks[0]}, and {problem}"
            if problem and engine_hooks
            else "",
        )
    ]


def _name_of(target: Any) -> str:
    return snake_case(target.__name__.rpartition(".")[2])


def _value_of(target: Any) -> str:
    if isinstance(target, ModuleType):
        return target.__name__
    return f"{target.__module__}:{target.__qualname__}"


def _unused(name: str, names: Sequence[str]) -> str:
    numbered = (f"{name}_{number}" for number in count(2))
    return next(unused for unused in chain([name], numbered) if unused not in names)
