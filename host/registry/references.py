"""Plugins as Python objects: in a configuration, or provided by hooks.

Another process finds an object by its FQCN alone, so that stands for the object from here on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import msgspec

from hardpoint.errors import (
    ConfigError,
    PluginContractError,
    PluginFaultError,
    PluginLoadError,
    PluginNotFoundError,
    shown,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.server.hook_specs import HookSpecs
from hardpoint.typed import join_path, suggest

from .adapt import ComponentAdapters
from .blame import faults_as
from .discovery import InstalledPlugin
from .kinds import KINDS
from .loading import hook_functions, inspecting, snake_case

_PATHS = (
    "plugins.enable",
    "plugins.replace",
    *(path for k in KINDS.values() for path in (k.chosen_by, k.named_by) if path),
)
"""The configuration paths of references, of lists of them and of tables of them."""

_HOOK = HookSpecs.hardpoint_components.__name__


def with_references(value: Any, path: str, origin: str) -> Any:
    """Return a configuration value with FQCNs in the place of classes and functions.

    Structs that may hold references become tables; all else is returned unchanged.

    Args:
        value: value at the path, maybe nested.
        path: dotted; empty for the whole configuration.
        origin: origin of the value, for error messages.

    Raises:
        ConfigError: an object can be found by no FQCN; it is named, with the fix.
    """
    try:
        return _replaced(value, path, origin)
    except ConfigError:
        raise
    except Exception:  # it contains itself, or raises when read, which the conversion reports
        return value


def _replaced(value: Any, path: str, origin: str) -> Any:
    if not any(_contains(path, other) or _contains(other, path) for other in _PATHS):
        return value
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {
            key: _replaced(item, join_path(path, str(key)), origin) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(item, f"{path}[{index}]", origin) for index, item in enumerate(value)]
    is_plain = value is None or isinstance(value, str | bytes | int | float)
    if is_plain or not any(_contains(other, path) for other in _PATHS):
        return value
    return _fqcn(value, path, origin)


def _contains(outer: str, inner: str) -> bool:
    return not outer or f"{inner}.".startswith((f"{outer}.", f"{outer}["))


def _fqcn(target: Any, path: str, origin: str) -> str:
    if not (inspect.isclass(target) or inspect.isfunction(target)):
        raise ConfigError(
            f"{path}: expected a name, an FQCN like package.module:Class, or a class, got a "
            f"{type(target).__module__}.{type(target).__qualname__}; an object of a module is "
            f"enabled by its FQCN (from {origin})"
        )
    value, problem = find_reference(target)
    if problem:
        raise ConfigError(f"{path}: {problem} (from {origin})")
    return value


def find_reference(target: Any) -> tuple[str, str]:
    """Return the FQCN under which any process finds an object, and why there is none.

    Either is empty. The FQCN of a module is its name; an object that is no class, function or
    module is found under a name of the module that defines its class, or of the program itself.
    """
    if isinstance(target, ModuleType):
        if target.__name__ != "__main__" and sys.modules.get(target.__name__) is target:
            return target.__name__, ""
        return "", f"no process can import the module {target.__name__!r}; make it a file"
    if not (inspect.isclass(target) or inspect.isfunction(target)):
        return _reference_of_object(target)
    module, qualname = target.__module__, target.__qualname__
    advice = f'define it at the top level of a module, as "{module}:{target.__name__}"'
    if target.__name__ == "<lambda>":
        advice = f'define it with a name at the top level of a module, as "{module}:name"'
    if "<" in qualname:
        return "", (
            f"{module}:{qualname} exists only inside a function, where neither an import "
            f"nor another process can find it; {advice}"
        )
    existing: Any = sys.modules.get(module)
    for part in qualname.split("."):
        existing = getattr(existing, part, None)
    if existing is not target:
        stands_for = "has no such object" if existing is None else "has another object of that name"
        return "", f"{module}:{qualname} cannot be found, for its module {stands_for}; {advice}"
    return f"{module}:{qualname}", ""


def _reference_of_object(target: Any) -> tuple[str, str]:
    cls = type(target)
    for module in (cls.__module__, "__main__"):
        for name, value in vars(sys.modules.get(module, object)).items():
            if value is target:
                return f"{module}:{name}", ""
    return "", (
        f"no module has this object of {cls.__module__}:{cls.__qualname__} under a name; give it "
        f'one at the top level of the module, as "{cls.__module__}:name"'
    )


def default_name(value: str, installed: Sequence[InstalledPlugin]) -> str:
    """Return the name of an FQCN without another one: its entry point's, or by its class."""
    known = next((plugin for plugin in installed if plugin.value == value), None)
    if known is not None:
        return known.name
    module, _, qualname = value.partition(":")
    return snake_case((qualname or module).rpartition(".")[2])


def with_handed_over(
    installed: Sequence[InstalledPlugin], passed_plugins: Sequence[InstalledPlugin]
) -> list[InstalledPlugin]:
    """Return all plugins that can be enabled; a passed plugin replaces the installed one."""
    return [*(plugin for plugin in installed if plugin not in passed_plugins), *passed_plugins]


def provided_by(
    target: Any,
    source: Source,
    installed: Sequence[InstalledPlugin],
    adapters: ComponentAdapters,
    origin: str,
) -> list[InstalledPlugin]:
    """Return the components that a plugin of hooks provides, as if they were installed.

    Args:
        target: its module, class or object.
        adapters: adapt components that derive from no interface.
        origin: the setting that enables them, too; empty if none does.

    Raises:
        PluginFaultError: its hook failed; the cause is chained.
        PluginContractError: the hook returned something else than components by their names.
        PluginLoadError: no FQCN finds a component.
    """
    with inspecting(source):
        hook = _hook_of(target, source)
    if hook is None:
        return []
    with faults_as(PluginFaultError, f"{source}: its hook {_HOOK}"):
        returned = hook()
        components = dict(returned) if isinstance(returned, Mapping) else None
    if components is None:
        raise PluginContractError(
            f"{source}: its hook {_HOOK} returned {shown(returned)}, expected a mapping of names "
            f"to classes"
        )
    return [
        offer
        for name, component in components.items()
        for offer in offered_plugins(name, component, source, installed, adapters, origin)
    ]


def offered_plugins(
    reference: Any,
    component: Any,
    source: Source,
    installed: Sequence[InstalledPlugin],
    adapters: ComponentAdapters,
    origin: str,
) -> list[InstalledPlugin]:
    """Return a component that is given by name as if it were installed, for each of its kinds.

    Args:
        reference: the name, or `kind/name`.
        source, installed, adapters, origin: as for `provided_by`.

    Raises:
        PluginError: no FQCN finds it, or it does not fit its name.
    """
    kind_name, name = _split(reference, source)
    value, problem = find_reference(component)
    if problem:
        raise PluginLoadError(f"{source}: its component {name!r}: {problem}")
    offered = Source(name, value, source.distribution, source.version, source.origin)
    kinds = adapters.kinds_of(component, offered)
    if kind_name and kind_name not in [kind.name for kind in kinds]:
        raise PluginContractError(
            f"{source}: its hook {_HOOK} gives {value} as {reference!r}, and it is of kind "
            f"{kinds[0].name}"
        )
    if kinds[0].interface is None:
        raise PluginContractError(
            f"{source}: its hook {_HOOK} gives {value}, which has hooks itself; enable it, too, "
            f"instead of providing it"
        )
    offers = []
    for kind in kinds:
        if kind_name in ("", kind.name):
            same = (f for f in installed if (f.kind, f.value) == (kind.name, value))
            known = next(same, offered)
            offers.append(
                InstalledPlugin(
                    kind.name, name, value, known.distribution, known.version, origin=origin
                )
            )
    return offers


def _split(reference: Any, source: Source) -> tuple[str, str]:
    kind, _, name = reference.rpartition("/") if isinstance(reference, str) else ("", "", "")
    if not name or "." in name:
        raise PluginContractError(
            f"{source}: its hook {_HOOK} returned the name {shown(reference)}, expected a name "
            f'without \'.\', such as "gumbel" or "samplers/gumbel"'
        )
    if kind and kind not in KINDS:
        raise PluginNotFoundError(
            f"{source}: its hook {_HOOK} returned the name {reference!r}, and there is no kind "
            f"{kind!r}{suggest(kind, list(KINDS))}; kinds here: {', '.join(KINDS)}"
        )
    return kind, name


def _hook_of(target: Any, source: Source) -> Any:
    implemented = hook_functions(target)
    if _HOOK not in implemented:
        return None
    name = implemented[_HOOK]
    is_bound = isinstance(inspect.getattr_static(target, name), staticmethod | classmethod)
    if inspect.isclass(target) and not is_bound:
        raise PluginContractError(
            f"{source}: its {name} is called before an object of the class is made; write "
            f"@staticmethod above its @hookimpl"
        )
    return getattr(target, name)
