"""The enabled hooks, verified when registered; errors name the plugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import pluggy

from hardpoint.errors import PluginContractError, PluginFaultError, PluginLoadError
from hardpoint.host.system.plugin_settings import READ, changed
from hardpoint.plugins.component import Source
from hardpoint.plugins.server.hook_specs import HookSpecs
from hardpoint.plugins.server.hooks import HookContext, hookimpl

from .blame import describe, faults_as, innermost, raise_unless_fault
from .loading import inspecting, takes_context


class HookSet:
    """Calls hooks in order of enabling, last enabled first, as pluggy does."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookimpl.project_name)
        self._manager.add_hookspecs(HookSpecs)
        self._sources: dict[str, Source] = {}

    def add(self, target: Any, source: Source, options: Any = None) -> None:
        """Register a module, class or object; of a class, make an object with its options.

        Raises:
            PluginContractError: it implements an unknown hook, or asks for unknown arguments.
            PluginLoadError: its constructor failed; the cause is chained.
        """
        plugin = _built(target, source, options) if inspect.isclass(target) else target
        with inspecting(source):
            equal = [name for name, other in self._manager.list_name_plugin() if other == plugin]
        if equal:  # pluggy takes equal objects for one
            raise PluginContractError(
                f"{source}: it equals {equal[0]!r}, another plugin; let only an object itself "
                f"be equal to it, as @dataclass(eq=False) does"
            )
        self._sources[source.name] = source
        try:
            self._manager.register(plugin, name=source.name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as cause:
            known = ", ".join(name for name in vars(HookSpecs) if not name.startswith("_"))
            detail = " ".join(str(cause).split())
            raise PluginContractError(f"{source}: {detail}; hooks are: {known}") from cause
        for caller in self._manager.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    _check_runs(impl, caller.name, source)

    def has(self, hook: str) -> bool:
        """Return whether any plugin implements a hook, so that callers may skip the call."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def implementers(self, hook: str) -> str:
        """Return which plugin or plugins implement a hook, for messages."""
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        return str(self._sources[impls[0].plugin_name]) if len(impls) == 1 else _one_of(impls)

    def route(self, hook: str, route: Callable[[Source, Callable[..., Any]], Any]) -> None:
        """Replace each function that implements a hook by the result of `route` for it."""
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            if not (impl.hookwrapper or impl.wrapper):  # those are generators
                routed = route(self._sources[impl.plugin_name], impl.function)
                impl.function = functools.update_wrapper(routed, impl.function)

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook; return the results of its implementations.

        Raises:
            PluginFaultError: names the plugin with the failed implementation; the cause is chained.
        """
        caller = getattr(self._manager.hook, hook)
        settings = READ[0]()
        try:
            results: list[Any] = caller(**arguments)
        except BaseException as cause:
            raise_unless_fault(cause)
            plugin = self._responsible_plugin(caller, cause)
            raise PluginFaultError(
                f"{plugin}: its hook {hook} failed: {describe(cause)}"
            ) from cause
        finally:
            if READ[0]() != settings:
                changed(settings, self.implementers(hook), f"hook {hook}")
        return results

    def call_each(self, hook: str, **arguments: Any) -> Iterator[tuple[Source, Any]]:
        """Call the implementations of a hook one by one; yield plugins and results, as enabled.

        Raises:
            PluginFaultError: names the plugin with the failed implementation; the cause is chained.
        """
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            if impl.wrapper or impl.hookwrapper:  # which have nothing to wrap: each is called alone
                continue
            source = self._sources[impl.plugin_name]
            with faults_as(PluginFaultError, f"{source}: its hook {hook}"):
                result = impl.function(**{name: arguments[name] for name in impl.argnames})
            yield source, result

    def _responsible_plugin(self, caller: pluggy.HookCaller, error: BaseException) -> str:
        impls = caller.get_hookimpls()

        def plugin_of(frame: FrameType) -> str | None:
            matching = [impl for impl in impls if frame.f_code in _codes(impl.function)]
            if len(matching) > 1:  # several objects of one class
                values = list(frame.f_locals.values())
                matching = [i for i in matching if any(i.plugin is value for value in values)]
            return matching[0].plugin_name if len(matching) == 1 else None

        owner = innermost(error, plugin_of)
        return str(self._sources[owner[0]]) if owner else _one_of(impls)


def _built(cls: type, source: Source, options: Any) -> Any:
    context = HookContext(name=source.name, options=options, source=source)
    with faults_as(PluginLoadError, f"{source}: its constructor"):
        return cls(context) if takes_context(cls) else cls()


def _check_runs(impl: pluggy.HookImpl, hook: str, source: Source) -> None:
    is_wrapper = impl.wrapper or impl.hookwrapper
    if inspect.iscoroutinefunction(impl.function):
        problem = "is an `async def`, which is never awaited"
    elif inspect.isgeneratorfunction(impl.function) and not is_wrapper:
        problem = "yields, and is no wrapper: add `wrapper=True` to its hookimpl"
    else:
        return
    raise PluginContractError(f"{source}: its hook {hook} {problem}")


def _one_of(impls: Sequence[pluggy.HookImpl]) -> str:
    return f"one of the plugins {', '.join(impl.plugin_name for impl in impls)}"


def _codes(function: Any) -> list[CodeType]:
    codes = (getattr(code, "__code__", None) for code in (function, inspect.unwrap(function)))
    return [code for code in codes if code is not None]
