"""Loads components: adapts foreign objects and earlier contracts, and checks them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hardpoint.errors import (
    HardpointError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
    shown,
)
from hardpoint.host.registry.adapters.contract_1 import adapt_earlier
from hardpoint.plugins.component import AdaptedComponent, Component, ComponentAdapter, Source
from hardpoint.plugins.component.manifest import PluginEntry

from .adapters.external_packages import object_hint
from .blame import faults_as
from .kinds import KINDS, PluginKind
from .loading import check_component, import_object, inspecting, kinds_of, marks_hooks, snake_case

ADAPTER_KIND = "component_adapters"

Adapter = tuple[Source, type[ComponentAdapter]]


class ComponentAdapters:
    """The enabled component adapters of an engine, in the order in which they are asked.

    They are imported when an object needs one, which is no component.
    """

    def __init__(self, load: Callable[[], Sequence[Adapter]]) -> None:
        """`load` imports and checks the adapters; it is called each time that one is needed."""
        self._load = load
        self._is_adapter: dict[str, bool] = {}  # by FQCN

    def own(self, fqcn: str, path: str) -> list[Source]:
        """Return the identity of the adapter that an FQCN names, if it can be imported as it is."""
        if ":" not in fqcn:
            return []
        source = Source.of_module(snake_case(fqcn.rpartition(".")[2]), fqcn, path)
        if fqcn not in self._is_adapter:
            self._is_adapter[fqcn] = _is_adapter(source)
        return [source] if self._is_adapter[fqcn] else []

    def import_object(self, source: Source) -> Any:
        """Import the object of `source.value`, with stand-ins of adapters for missing modules.

        Raises:
            PluginLoadError, PluginNotFoundError: as `loading.import_object`.
        """
        try:
            return import_object(source, self._stand_ins)
        except PluginNotFoundError:
            if (module := sys.modules.get(source.value.partition(":")[0])) is None:
                raise
            for name in _missing_imports(module):
                if (context := self._stand_ins(name)) is not None:
                    with faults_as(PluginLoadError, f"{source}: its import"), context:
                        importlib.reload(module)
                    return import_object(source)
            raise

    def adapt(self, target: Any, source: Source, kind: PluginKind | None = None) -> Any:
        """Return the component of a foreign object; any other object unchanged.

        Args:
            kind: the kind that is needed; None is any.

        Raises:
            PluginContractError: it nearly has a form that an adapter knows.
        """
        is_component = inspect.isclass(target) and issubclass(target, Component)
        if is_component or isinstance(target, ModuleType) or marks_hooks(target):
            return target
        for adapter_source, adapter in self._load():
            if _matches(adapter, adapter_source, target, kind):
                return _checked(adapter.adapt(target, source), adapter_source, source)
        return target

    def kinds_of(self, target: Any, source: Source) -> list[PluginKind]:
        """Return the kinds of an imported object, after it is adapted.

        Raises:
            PluginContractError: it is no component, nor has hooks, and no adapter matches it.
        """
        with inspecting(source):
            return kinds_of(self.adapt(target, source), source, object_hint(target))

    def _stand_ins(self, module: str) -> Any:
        for source, adapter in self._load():
            with inspecting(source):
                if (context := adapter.stand_ins(module)) is not None:
                    return context
        return None


def _missing_imports(module: ModuleType) -> list[str]:
    """Return the packages that a module's code imports and that are not installed.

    A module may define less if such an import fails.
    """
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return sorted(name for name in names if not _is_installed(name))


def _is_installed(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except ValueError:  # a module that is being imported has no spec
        return True


NO_ADAPTERS = ComponentAdapters(tuple)


def load_adapters(sources: Sequence[Source]) -> list[Adapter]:
    """Import and check component adapters.

    Raises:
        PluginError: one cannot be imported, or does not keep its kind's contract.
    """
    unique = {source.value: source for source in sources}.values()
    return [(source, load_component(KINDS[ADAPTER_KIND], source)) for source in unique]


def adapters_of(entries: Sequence[PluginEntry]) -> ComponentAdapters:
    """Return the component adapters among the entries of a manifest."""
    adapter_entries = sorted((e for e in entries if e.kind == ADAPTER_KIND), key=lambda e: e.place)
    return ComponentAdapters(lambda: load_adapters([entry.source for entry in adapter_entries]))


def load_component(
    kind: PluginKind, source: Source, target: Any = None, adapters: ComponentAdapters = NO_ADAPTERS
) -> Any:
    """Import a component unless `target` is given, adapt and check it.

    Raises:
        PluginError: it cannot be imported, or does not keep its kind's contract.
    """
    if target is None:
        target = adapters.import_object(source)
    with inspecting(source):
        adapted = adapters.adapt(target, source, kind)
        if adapter_of(adapted) and kind.interface and issubclass(adapted, kind.interface):
            target = adapted
        target = adapt_earlier(target, kind)
        check_component(target, kind, source, object_hint(target, kind.name))
    return target


def configured(target: Any, options: Any, source: Source) -> Any:
    """Return an adapted component with its checked options applied; any other one unchanged.

    Raises:
        ConfigError: the options do not fit the external object.
        PluginContractError: the external object fails when it is looked at.
    """
    if not adapter_of(target):
        return target
    with inspecting(source):
        return target.configured(options)


def adapter_of(target: Any) -> str | None:
    """Return the external form of an adapted component; None if it is not adapted."""
    is_adapted = inspect.isclass(target) and issubclass(target, AdaptedComponent)
    return target.adapter if is_adapted else None


def _is_adapter(source: Source) -> bool:
    try:
        target = import_object(source)
    except HardpointError:  # raised again when the component itself is loaded
        return False
    return inspect.isclass(target) and issubclass(target, ComponentAdapter)


def _matches(
    adapter: type[ComponentAdapter], adapter_source: Source, target: Any, kind: PluginKind | None
) -> bool:
    result = adapter.matches(target, kind.name if kind else None)
    if not isinstance(result, bool):
        raise PluginContractError(
            f"{adapter_source}: its matches returned {shown(result)}, expected True or False"
        )
    return result


def _checked(component: Any, adapter_source: Source, source: Source) -> Any:
    bases = (AdaptedComponent, Component)
    if inspect.isclass(component) and all(issubclass(component, base) for base in bases):
        return component
    raise PluginContractError(
        f"{adapter_source}: its adapt returned {shown(component)} for {source}, expected a class "
        f"derived from hardpoint.plugins.AdaptedComponent and the interface of its kind"
    )
