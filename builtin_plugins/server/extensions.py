"""Runs the extensions of plugins in order; each plugin is responsible for its faults."""

from __future__ import annotations

import contextlib
import graphlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.routing import compile_path
from starlette.types import Scope

from hardpoint.errors import PluginConflictError
from hardpoint.plugins import ConfigError
from hardpoint.plugins.server import (
    Authenticator,
    Background,
    Call,
    InstalledExtension,
    Middleware,
    ResponseStore,
    Route,
    Transform,
)

from .faults import BlamedError, BrokenContractError, Owned, ServerFaults

ExtensionT = TypeVar("ExtensionT", Authenticator, Middleware, Transform)


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


def backgrounds_of(installed: Sequence[InstalledExtension]) -> list[Owned]:
    """Return the work that goes on while requests are answered."""
    return [
        Owned(item.plugin, item.source, item.extension)
        for item in installed
        if isinstance(item.extension, Background)
    ]


def store_of(installed: Sequence[InstalledExtension], num_processes: int) -> Owned | None:
    """Return the store of responses; None without one.

    Args:
        num_processes: processes that answer requests.

    Raises:
        PluginConflictError: two plugins bring one.
        ConfigError: it keeps responses for one process, and there are several.
    """
    stores = [item for item in installed if isinstance(item.extension, ResponseStore)]
    if not stores:
        return None
    (first, *others), store = stores, stores[0].extension
    if others:
        raise PluginConflictError(
            f"server_extensions: expected one ResponseStore, got that of {first.source} and that "
            f"of {others[0].source}"
        )
    if num_processes > 1 and isinstance(store, ResponseStore) and not store.is_shared:
        raise ConfigError(
            f"server.workers: expected 1, because the ResponseStore of {first.source} keeps the "
            "responses of one process; one with is_shared serves several"
        )
    return Owned(first.plugin, first.source, store)


def routes_of(
    installed: Sequence[InstalledExtension], core: Sequence[Route], replaceable: Sequence[str]
) -> list[tuple[Route, Owned | None]]:
    """Return all routes with their owners; routes of plugins come last.

    Raises:
        PluginConflictError: two plugins, or a plugin and the server, have a route of one path.
        ConfigError: `server.replace_routes` lists a path that the server does not have.
    """
    paths = {route.path for route in core}
    if unknown := [path for path in replaceable if path not in paths]:
        raise ConfigError(
            f"server.replace_routes: expected paths of the server's own routes, got {unknown[0]!r}"
        )
    added: list[tuple[Route, Owned | None]] = []
    taken: dict[tuple[str, bool, str], InstalledExtension] = {}
    replaced: set[tuple[str, bool]] = set()
    for item in installed:
        route = item.extension
        if not isinstance(route, Route):
            continue
        hidden = [
            core_route
            for core_route in core
            if core_route.admin == route.admin and _covers(core_route, route)
        ]
        for core_route in hidden:
            if core_route.path not in replaceable:
                raise PluginConflictError(
                    f"{item.source}: its route {route.path} is the server's own {core_route.path}; "
                    f"server.replace_routes = [{core_route.path!r}] lets it replace that"
                )
            replaced.add((core_route.path, core_route.admin))
        for method in route.methods:
            key = (_shape(route.path), route.admin, method)
            if (other := taken.setdefault(key, item)) is not item:
                raise PluginConflictError(
                    f"the route {method} {route.path} is added twice: "
                    f"by {other.source} and by {item.source}"
                )
        added.append((route, Owned(item.plugin, item.source, route)))
    remaining = [(route, None) for route in core if (route.path, route.admin) not in replaced]
    return [*remaining, *added]


def _shape(path: str) -> str:
    return re.sub(r"{\w+(:\w+)?}", lambda match: f"{{{match[1] or ':str'}}}", path)


def _covers(core_route: Route, added: Route) -> bool:
    if _shape(core_route.path) == _shape(added.path):
        return True
    pattern, _, _ = compile_path(core_route.path)
    return pattern.match(re.sub(r"{\w+(:\w+)?}", "1", added.path)) is not None


class Transforms:
    """The transforms of a server, in order.

    Attributes:
        changes_requests, changes_responses, changes_events: whether any transform does.
    """

    def __init__(
        self, transforms: Sequence[Owned] = (), faults: ServerFaults | None = None
    ) -> None:
        """Use transforms in the order of requests; answers pass them in the reverse order."""
        self._faults = faults or ServerFaults()
        self._requests = _having(transforms, "request")
        self._responses = _having(list(reversed(transforms)), "response")
        self._events = _having(list(reversed(transforms)), "event")
        self._ends = _having(list(reversed(transforms)), "end")
        self._failed: set[str] = set()  # ids of calls whose stream an error has ended
        self.changes_requests = bool(self._requests)
        self.changes_responses = bool(self._responses)
        self.changes_events = bool(self._events)

    async def request(self, call: Call, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a request as the transforms leave it.

        Raises:
            RequestError, HTTPException: a transform refuses the request.
            BlamedError: a transform failed.
        """
        for owned, change in self._requests:
            body = await self._faults.run(
                owned, "request transform", _changed, change, call, body, may_refuse=True
            )
        return body

    async def response(self, call: Call, body: dict[str, Any]) -> bytes:
        """Return the JSON of a whole answer as the transforms leave it.

        Raises:
            BlamedError: a transform failed.
        """
        encoded = b""
        for owned, change in self._responses:
            encoded = await self._faults.run(
                owned, "response transform", _encoded, change, call, body
            )
            body = msgspec.json.decode(encoded)
        return encoded

    def begin(self, scope: Scope, call: Call) -> None:
        """Remember the call of a request or a WebSocket until `end`."""
        if self._ends:
            scope["state"]["call"] = call

    def fail(self, call: Call) -> None:
        """Note that an error has ended the stream of a call."""
        if self._ends:
            self._failed.add(call.request_id)

    def end(self, scope: Scope) -> None:
        """Notify the transforms of the end of a call, if it has begun. A fault is counted."""
        state = scope["state"]
        if (call := state.get("call")) is None:
            return
        has_failed = call.request_id in self._failed or "refused" in state
        self._failed.discard(call.request_id)
        # A client closes a WebSocket as a rule, so that its end there is no abort.
        is_complete = state.get("is_complete") or scope["type"] == "websocket"
        how = "failed" if has_failed else "finished" if is_complete else "aborted"
        for owned, end in self._ends:
            try:
                end(call, how)
            except Exception as cause:
                self._faults.blame(owned, "end of a call", cause)

    def blame_request(self) -> BlamedError:
        """Return the answer to a right request that the transforms made a wrong one."""
        (owned, _), *more = self._requests
        if more:
            sources = ", ".join(owned.source for owned, _ in self._requests)
            owned = Owned(owned.plugin, f"one of {sources}", None)
        wrong = BrokenContractError("it made a wrong body of a right one")
        return self._faults.blame(owned, "request transform", wrong)

    async def events(
        self, call: Call, events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream as the transforms leave them.

        Raises:
            BlamedError: a transform failed.
        """
        async with contextlib.aclosing(events):
            async for block in events:
                changed = [self._event(call, event) for event in block.split(b"\n\n") if event]
                if content := b"".join(changed):
                    yield content

    def _event(self, call: Call, event: bytes) -> bytes:
        head, data = _parts(event)
        if not data.startswith(b"{"):
            return event + b"\n\n"
        changed = self.event_data(call, data)
        return b"" if changed is None else head + b"data: " + changed + b"\n\n"

    def event_data(self, call: Call, data: bytes) -> bytes | None:
        """Return the data of one event as the transforms leave it; None leaves it out.

        Raises:
            BlamedError: a transform failed.
        """
        for owned, change in self._events:
            began = time.perf_counter()
            try:
                body = change(call, msgspec.json.decode(data))
                if body is None:
                    return None
                data = _object(body)
            except BaseException as cause:
                raise self._faults.passed(owned, "event transform", cause) from None
            finally:
                taken = time.perf_counter() - began
                self._faults.check_blocking(owned, "event transform", taken)
        return data


def _parts(event: bytes) -> tuple[bytes, bytes]:
    """Return the part before the data of an event, and the data."""
    head, separator, data = event.partition(b"\ndata: ")
    return (head + b"\n", data) if separator else (b"", event.removeprefix(b"data: "))


async def _changed(
    change: Callable[..., Awaitable[Any]], call: Call, body: dict[str, Any]
) -> dict[str, Any]:
    changed = await change(call, body)
    if not isinstance(changed, dict):
        raise BrokenContractError(f"it returned a {type(changed).__name__}, expected a dict")
    return changed


async def _encoded(
    change: Callable[..., Awaitable[Any]], call: Call, body: dict[str, Any]
) -> bytes:
    return _object(await change(call, body))


def _object(body: Any) -> bytes:
    if not isinstance(body, dict):
        raise BrokenContractError(f"it returned a {type(body).__name__}, expected a dict")
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError):
        raise BrokenContractError("it returned what JSON cannot hold") from None


def _having(transforms: Sequence[Owned], part: str) -> list[tuple[Owned, Callable[..., Any]]]:
    functions = ((owned, getattr(owned.part, part)) for owned in transforms)
    return [(owned, change) for owned, change in functions if change is not None]
