"""Checks what plugins add to a server when it starts, before a request can meet a fault."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec

from hardpoint.errors import PluginContractError, shown
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.server import (
    Authenticator,
    InstalledExtension,
    Middleware,
    Route,
    ServerExtension,
    Transform,
)

_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")


def checked_extensions(extensions: Any, source: Source) -> list[InstalledExtension]:
    """Return the result of a plugin's hook `server_extensions`, with the plugin.

    Raises:
        PluginContractError: naming the plugin and what is wrong.
    """
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
    """Yield what is wrong with an extension."""
    if not isinstance(extension, Route):
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
