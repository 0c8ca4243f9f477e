"""The client of engines that another process owns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.core.client.base import DeathWatcher
from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.errors import engine_dead
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineConfig, IterationStats
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.server.engine_set import EngineSet
from hardpoint.process.client.base import UtilityCalls
from hardpoint.process.client.output_queue import OutputQueue
from hardpoint.process.client.process_client import EngineStart, RequestSockets, Sink
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.engine_process import EngineProcess
from hardpoint.process.protocol import EngineCoreReadyResponse
from hardpoint.process.utility_calls import result_type
from hardpoint.typed import convert

from .messages import CALL, NOTICES, OWNER, EnginesSummary, Notice

_POLL_MS = 100
_FIGURES_INTERVAL_S = 0.1


class RelayedClient(RequestSockets, UtilityCalls):
    """Sends requests to engines of another process, and receives their outputs.

    Implements `RemoteClient`. The owner of the engines restarts, scales and replaces them.

    Attributes:
        ready: the ready response of the engines.
        activity: an empty record: the owner reports how an engine ended.
        view: the engines, as the owner has reported them last.
    """

    in_process = False

    def __init__(
        self, start: EngineStart, folder: Path, view: EnginesSummary, sink: Sink | None
    ) -> None:
        """Connect to the owner.

        Args:
            start: parameters of the engines, as this process would start them.
            folder: folder of the sockets, which the owner has made.
            view: the engines now.
            sink: as that of `ProcessClient`.

        Raises:
            EngineDeadError: the owner does not answer in time.
            PluginLoadError: it has other plugins.
        """
        super().__init__(start.config.engine.call_timeout_seconds)
        self.view = view
        self.activity = Activity()
        self._outputs = OutputQueue()
        self._sink: Sink = sink or self._outputs.put
        with contextlib.ExitStack() as undo:
            self._sockets = EngineSockets(manifest_hash=start.manifest.hash, folder=folder)
            undo.callback(self._sockets.close)
            self.ready = self._wait_until_ready(start.config.engine.start_timeout_seconds)
            undo.pop_all()
        self._is_open = True
        self._sockets.read(self._sink, self._ended)

    def _wait_until_ready(self, seconds: float) -> EngineCoreReadyResponse:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (ready := self._sockets.poll_ready(_POLL_MS)) is not None:
                return ready
        raise EngineDeadError("the process that owns the engines does not answer")

    def _ended(self, error: Exception | None) -> None:
        self.fail(error or EngineDeadError("the process that owns the engines has ended"))

    def fail(self, error: Exception) -> None:
        """Be dead, because the engines are."""
        self._sockets.fail(error)
        if self._is_open:
            self._is_open = False
            self._sink(engine_dead(error))

    @property
    def pid(self) -> int:
        """The process id of the first engine that serves; 0 if none does."""
        return next(iter(self.view.pids.values()), 0)

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the engines that serve, by rank."""
        return self.view.pids

    @property
    def ranks(self) -> Collection[int]:
        """The numbers of the engines."""
        return self.view.ranks

    @property
    def is_serving(self) -> bool:
        """Whether an engine accepts requests."""
        return self.view.is_serving

    @property
    def num_restarts(self) -> int:
        """How often engines were restarted."""
        return self.view.num_restarts

    def call(self, method: str, *args: Any, rank: int | None = None) -> Future[Any]:
        """Call one of the engines' utilities without waiting."""
        if method == EngineUtilities.live_change.name:  # the owner asks the engines
            done: Future[Any] = Future()
            done.set_result([])
            return done
        if rank is None:
            return self._sockets.call(method, *args)
        return _converted(self.ask(CALL, rank, method, *args), method)

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Call the owner of the engines; the result is plain data."""
        return self._sockets.call("call_part", OWNER, method, {"arguments": list(arguments)})

    def next_notices(self) -> Future[list[Notice]]:
        """Return the notices of the owner since the last call, once there are any."""
        return _mapped(
            self.ask(NOTICES), lambda notices: convert(notices, list[Notice], path=NOTICES)
        )

    def restart_with(self, config: EngineConfig, manifest: Manifest) -> None:
        """Do nothing: the owner of the engines starts them."""

    def watch_deaths(self, watcher: DeathWatcher) -> None:
        """Do nothing: the owner of the engines watches them."""

    def scale(self, num_engines: int, drain_s: float) -> EngineSet:
        """Start or retire engines, as `ReplicaSet.scale` does."""
        return msgspec.convert(self.ask("scale", num_engines, drain_s).result(), EngineSet)

    def retire(self, ranks: Sequence[int], drain_s: float) -> EngineSet:
        """End engines, as `ReplicaSet.retire` does."""
        return msgspec.convert(self.ask("retire", list(ranks), drain_s).result(), EngineSet)

    def close(self) -> None:
        """End the connection; the engines go on."""
        self._is_open = False
        self._sockets.close()


class OpenRelayed:
    """Opens the client of a frontend to engines of another process; an `OpenRemoteClient`.

    Attributes:
        client: the client, once it is open.
    """

    client: RelayedClient

    def __init__(self, folder: Path, view: EnginesSummary) -> None:
        self._folder, self._view = folder, view

    def __call__(
        self,
        start: EngineStart,
        sink: Sink | None,
        process: EngineProcess | None,
        plugins: PluginSet,
    ) -> RelayedClient:
        """Connect."""
        del process, plugins
        self.client = RelayedClient(start, self._folder, self._view, sink)
        return self.client


def _converted(future: Future[Any], method: str) -> Future[Any]:
    return _mapped(future, lambda value: convert(value, result_type(method), path=method))


def _mapped(future: Future[Any], change: Any) -> Future[Any]:
    mapped: Future[Any] = Future()

    def done(source: Future[Any]) -> None:
        if not mapped.set_running_or_notify_cancel():
            return
        try:
            mapped.set_result(change(source.result()))
        except BaseException as error:
            mapped.set_exception(error)

    future.add_done_callback(done)
    return mapped


class Figures:
    """Gathers the statistics of a relayed frontend until they are sent to the owner's sinks."""

    def __init__(self) -> None:
        self._stats = IterationStats()
        self._is_empty = True
        self._lock = threading.Lock()

    def add(self, stats: IterationStats) -> None:
        """Add the figures of a batch."""
        with self._lock:
            whole, self._is_empty = self._stats, False
            for name in stats.__struct_fields__:
                value = getattr(stats, name)
                if isinstance(value, list):
                    getattr(whole, name).extend(value)
                elif name.startswith("num_"):
                    setattr(whole, name, getattr(whole, name) + value)

    def pop(self) -> IterationStats | None:
        """Return the figures since the last call; None without any."""
        with self._lock:
            if self._is_empty:
                return None
            stats, self._stats, self._is_empty = self._stats, IterationStats(), True
            return stats

    def send_every(self, send: Callable[[Any], object], ended: threading.Event) -> None:
        """Send figures as plain data, until the event; in a thread of its own."""
        while not ended.wait(_FIGURES_INTERVAL_S):
            if (stats := self.pop()) is not None:
                send(msgspec.to_builtins(stats))
