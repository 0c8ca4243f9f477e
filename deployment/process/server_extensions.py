"""The server extensions that plugins return from the hook `server_extensions`, and their checks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec

from hardpoint.errors import PluginContractError, shown
from hardpoint.host.registry.hooks import HookSet
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

_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")


def server_extensions(hooks: HookSet, server: ServerContext) -> list[InstalledExtension]:
    """Call the hook; return the server extensions of plugins, in order of enabling.

    Raises:
        PluginFaultError: naming the plugin whose implementation failed; the cause is chained.
        PluginContractError: naming the plugin that returned something else.
    """
    return [
        installed
        for source, extensions in hooks.call_each("server_extensions", server=server)
        for installed in _checked_extensions(extensions, source)
    ]


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
        struct = getattr(route, field)
        if struct is not None and not (
            inspect.isclass(struct) and issubclass(struct, msgspec.Struct)
        ):
            yield f"{field}: expected a class that derives from msgspec.Struct, got {shown(struct)}"


def _transform_problems(transform: Transform) -> Iterator[str]:
    for field in ("request", "response"):
        if (change := getattr(transform, field)) is not None:
            yield from _async_problem(field, change)
    if transform.event is not None and not callable(transform.event):
        yield f"event: expected a function, got {shown(transform.event)}"
    elif transform.event is not None and _is_async(transform.event):
        yield "event: expected a plain function, got an `async def`"
    if transform.end is not None and (not callable(transform.end) or _is_async(transform.end)):
        yield f"end: expected a plain function, got {shown(transform.end)}"
    if not (transform.request or transform.response or transform.event or transform.end):
        yield "it has none of request, response, event and end"


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
