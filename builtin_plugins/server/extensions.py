"""What plugins add to a server: in order, each with its faults blamed on it."""

from __future__ import annotations

import graphlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from hardpoint.plugins import ConfigError, RequestError
from hardpoint.plugins.errors import PluginConflictError
from hardpoint.plugins.server import (
    Authenticator,
    Call,
    InstalledExtension,
    Middleware,
    Route,
    Transform,
)
from hardpoint.plugins.typed import reason_of

from .errors import AnswerError, plugin_fault

_log = logging.getLogger("hardpoint")

ExtensionT = TypeVar("ExtensionT", Authenticator, Middleware, Transform)


@dataclass(frozen=True)
class Owned:
    """An extension's part and the plugin that it is of."""

    plugin: str
    source: str
    part: Any


@dataclass
class ServerFaults:
    """How many requests each plugin's extensions ended."""

    counts: Counter[str] = field(default_factory=Counter)

    def blame(self, owned: Owned, what: str, cause: BaseException) -> AnswerError:
        """Count a fault, log it, and return the answer to the request."""
        self.counts[owned.plugin] += 1
        message = f"{owned.source}: its {what} failed: {reason_of(cause)}"
        _log.error("%s", message, exc_info=cause)
        return plugin_fault(f"{owned.source}: its {what} failed: {type(cause).__name__}")


def in_order(installed: Sequence[InstalledExtension], type_: type[ExtensionT]) -> list[Owned]:
    """Return the extensions of a type by `before` and `after`, else as they were enabled.

    Raises:
        PluginConflictError: `before` and `after` make a cycle.
    """
    chosen = [i for i in installed if isinstance(i.extension, type_)]
    graph: dict[int, set[int]] = {index: set() for index in range(len(chosen))}
    for index, item in enumerate(chosen):
        extension: Any = item.extension
        for other, named in enumerate(chosen):
            if named.plugin in extension.before and other != index:
                graph[other].add(index)
            if named.plugin in extension.after and other != index:
                graph[index].add(other)
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as cycle:
        names = " -> ".join(chosen[index].plugin for index in cycle.args[1])
        raise PluginConflictError(
            f"server_extensions: before and after of {type_.__name__} make a cycle: {names}"
        ) from None
    result: list[Owned] = []
    ready: list[int] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        first = ready.pop(0)
        result.append(Owned(chosen[first].plugin, chosen[first].source, chosen[first].extension))
        sorter.done(first)
    return result


def routes_of(
    installed: Sequence[InstalledExtension], core: Sequence[Route], replaceable: Sequence[str]
) -> list[tuple[Route, Owned | None]]:
    """Return all routes, with the owners of those that plugins add.

    Raises:
        PluginConflictError: two plugins, or a plugin and the server, have a route of one path.
        ConfigError: `server.replace_routes` lists a path that the server does not have.
    """
    paths = {route.path for route in core}
    if unknown := [path for path in replaceable if path not in paths]:
        raise ConfigError(
            f"server.replace_routes: expected paths of the server's own routes, got {unknown[0]!r}"
        )
    found: dict[tuple[str, bool, str], tuple[Route, Owned]] = {}
    replaced: set[str] = set()
    for item in installed:
        route = item.extension
        if not isinstance(route, Route):
            continue
        if not route.path.startswith("/"):
            raise ConfigError(
                f"{item.source}: the path of its route must begin with /, got {route.path!r}"
            )
        if route.path in paths and route.path not in replaceable:
            raise PluginConflictError(
                f"{item.source}: its route {route.path} is one of the server's own; "
                f"server.replace_routes = [{route.path!r}] lets it replace that"
            )
        replaced.add(route.path)
        for method in route.methods:
            key = (route.path, route.admin, method.upper())
            if key in found:
                raise PluginConflictError(
                    f"two plugins add the route {method.upper()} {route.path}: "
                    f"{found[key][1].source} and {item.source}"
                )
            found[key] = route, Owned(item.plugin, item.source, route)
    added = {id(route): (route, owned) for route, owned in found.values()}
    kept = [(route, None) for route in core if route.path not in replaced]
    return [*added.values(), *kept]


class Transforms:
    """The transforms of a server, in order.

    Attributes:
        changes_responses, changes_events: whether any transform does.
    """

    def __init__(
        self, transforms: Sequence[Owned] = (), faults: ServerFaults | None = None
    ) -> None:
        """Use transforms in the order of requests; answers pass them in the reverse order."""
        self._faults = faults or ServerFaults()
        self._requests = _having(transforms, "request")
        self._responses = _having(list(reversed(transforms)), "response")
        self._events = _having(list(reversed(transforms)), "event")
        self.changes_responses = bool(self._responses)
        self.changes_events = bool(self._events)

    async def request(self, call: Call, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a request as the transforms leave it.

        Raises:
            RequestError: raised by a transform.
            AnswerError: a transform failed.
        """
        return await self._run(self._requests, "request transform", call, body)

    async def response(self, call: Call, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a whole answer as the transforms leave it; raises as `request`."""
        return await self._run(self._responses, "response transform", call, body)

    async def _run(
        self, transforms: Sequence[tuple[Owned, Any]], what: str, call: Call, body: dict[str, Any]
    ) -> dict[str, Any]:
        for owned, change in transforms:
            try:
                body = await change(call, body)
            except RequestError:
                raise
            except Exception as cause:
                raise self._faults.blame(owned, what, cause) from cause
            if not isinstance(body, dict):
                wrong = TypeError(f"it returned a {type(body).__name__}, expected a dict")
                raise self._faults.blame(owned, what, wrong)
        return body

    async def events(
        self, call: Call, events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream as the transforms leave them.

        Raises:
            AnswerError: a transform failed.
        """
        async for block in events:
            changed = [self._event(call, event) for event in block.split(b"\n\n") if event]
            if kept := b"".join(changed):
                yield kept

    def _event(self, call: Call, event: bytes) -> bytes:
        head, _, data = event.partition(b"data: ")
        if not data.startswith(b"{"):
            return event + b"\n\n"
        body: Any = msgspec.json.decode(data)
        for owned, change in self._events:
            try:
                body = change(call, body)
            except Exception as cause:
                raise self._faults.blame(owned, "event transform", cause) from cause
            if body is None:
                return b""
        return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


def _having(transforms: Sequence[Owned], part: str) -> list[tuple[Owned, Callable[..., Any]]]:
    found = ((owned, getattr(owned.part, part)) for owned in transforms)
    return [(owned, change) for owned, change in found if change is not None]
