"""The enabled hooks: verified when registered, and what they return; errors name the plugin."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, get_args

import msgspec
import pluggy

from hardpoint.errors import PluginContractError, PluginFaultError, PluginLoadError, shown
from hardpoint.host.system.plugin_settings import READ, changed
from hardpoint.plugins.component import Source
from hardpoint.plugins.server import (
    Authenticator,
    Background,
    InstalledExtension,
    Middleware,
    ResponseStore,
    Route,
    ServerContext,
    ServerExtension,
    Transform,
)
from hardpoint.plugins.server.hook_specs import HookSpecs
from hardpoint.plugins.server.hooks import HookContext, hookimpl

from .blame import describe, faults_as, innermost, raise_unless_fault
from .loading import inspecting, takes_context

_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")


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
        """Replace each function that implements a hook by what `route` returns for it."""
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            if not (impl.hookwrapper or impl.wrapper):  # those are generators
                routed = route(self._sources[impl.plugin_name], impl.function)
                impl.function = functools.update_wrapper(routed, impl.function)

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook; return what its implementations returned.

        Raises:
            PluginFaultError: naming the plugin whose implementation failed; the cause is chained.
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

    def server_extensions(self, server: ServerContext) -> list[InstalledExtension]:
        """Call the hook of that name; return what plugins add to a server, in order of enabling.

        Raises:
            PluginFaultError: naming the plugin whose implementation failed; the cause is chained.
            PluginContractError: naming the plugin that returned something else.
        """
        installed: list[InstalledExtension] = []
        for impl in self._manager.hook.server_extensions.get_hookimpls():
            if impl.wrapper or impl.hookwrapper:  # which have nothing to wrap: each is called alone
                continue
            source = self._sources[impl.plugin_name]
            arguments = {"server": server} if "server" in impl.argnames else {}
            with faults_as(PluginFaultError, f"{source}: its hook server_extensions"):
                extensions = impl.function(**arguments)
            installed += _checked_extensions(extensions, source)
        return installed

    def _responsible_plugin(self, caller: pluggy.HookCaller, error: BaseException) -> str:
        impls = caller.get_hookimpls()

        def plugin_of(frame: FrameType) -> str | None:
            matching = [impl for impl in impls if frame.f_code in _codes(impl.function)]
            if len(matching) > 1:  # several objects of one class
                values = list(frame.f_locals.values())
                matching = [i for i in matching if any(i.plugin is value for value in values)]
            return matching[0].plugin_name if len(matching) == 1 else None

        found = innermost(error, plugin_of)
        return str(self._sources[found[0]]) if found else _one_of(impls)


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
    found = (getattr(code, "__code__", None) for code in (function, inspect.unwrap(function)))
    return [code for code in found if code is not None]


def _checked_extensions(extensions: Any, source: Source) -> list[InstalledExtension]:
    kinds = get_args(ServerExtension)
    if not isinstance(extensions, Sequence) or not all(isinstance(e, kinds) for e in extensions):
        raise PluginContractError(
            f"{source}: its hook server_extensions must return a list of "
            f"{', '.join(kind.__name__ for kind in kinds)} of hardpoint.plugins.server, "
            f"got {shown(extensions)}"
        )
    for extension in extensions:
        for problem in _problems(extension):
            raise PluginContractError(f"{source}: its {_named(extension)}: {problem}")
    return [InstalledExtension(source.name, str(source), extension) for extension in extensions]


def _named(extension: ServerExtension) -> str:
    name = type(extension).__name__
    return f"{name} {shown(extension.path)}" if isinstance(extension, Route) else name


def _problems(extension: ServerExtension) -> Iterator[str]:
    if isinstance(extension, Middleware | Transform | Authenticator):
        yield from _order_problems(extension)
    match extension:
        case Route():
            yield from _route_problems(extension)
        case Middleware():
            if not callable(extension.wrap):
                yield f"wrap: expected a function of an application, got {shown(extension.wrap)}"
        case Transform():
            yield from _transform_problems(extension)
        case Authenticator():
            yield from _async_problem("authenticate", extension.authenticate)
        case ResponseStore():
            for field in ("put", "get", "delete"):
                yield from _async_problem(field, getattr(extension, field))
            yield from _seconds_problem(extension.retain_seconds)
        case Background():
            yield from _async_problem("run", extension.run)


def _seconds_problem(seconds: Any) -> Iterator[str]:
    if seconds is None or (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        return
    yield f"retain_seconds: expected seconds > 0 or None, got {shown(seconds)}"


def _order_problems(extension: Middleware | Transform | Authenticator) -> Iterator[str]:
    for field in ("before", "after"):
        names = getattr(extension, field)
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not all(isinstance(name, str) for name in names):
            yield f"{field}: expected a list of names of plugins, got {shown(names)}"


def _route_problems(route: Route) -> Iterator[str]:
    from starlette.routing import compile_path  # noqa: PLC0415 - for servers alone

    if not isinstance(route.path, str) or not route.path.startswith("/"):
        yield f"path: expected one that begins with /, got {shown(route.path)}"
        return
    try:
        compile_path(route.path)
    except (ValueError, AssertionError) as cause:
        yield f"path: {cause}"
    methods = route.methods
    if isinstance(methods, str) or not methods or any(m not in _METHODS for m in methods):
        yield f"methods: expected some of {', '.join(_METHODS)}, got {shown(methods)}"
    yield from _async_problem("endpoint", route.endpoint)
    types = route.body_types
    if isinstance(types, str) or not types or any(t != str(t).lower() for t in types):
        yield f"body_types: expected media types in lower case, got {shown(types)}"
    for field in ("request_type", "response_type"):
        given = getattr(route, field)
        if given is not None and not (inspect.isclass(given) and issubclass(given, msgspec.Struct)):
            yield f"{field}: expected a class that derives from msgspec.Struct, got {shown(given)}"


def _transform_problems(transform: Transform) -> Iterator[str]:
    for field in ("request", "response"):
        if (change := getattr(transform, field)) is not None:
            yield from _async_problem(field, change)
    if transform.event is not None and not callable(transform.event):
        yield f"event: expected a function, got {shown(transform.event)}"
    elif transform.event is not None and _is_async(transform.event):
        yield "event: expected a plain function, got an `async def`"
    if not (transform.request or transform.response or transform.event):
        yield "it has none of request, response and event"


def _async_problem(field: str, function: Any) -> Iterator[str]:
    if not callable(function):
        yield f"{field}: expected an `async def`, got {shown(function)}"
    elif not _is_async(function):
        yield f"{field}: expected an `async def`, got a plain function"


def _is_async(function: Any) -> bool:
    while hasattr(function, "func"):  # of functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
