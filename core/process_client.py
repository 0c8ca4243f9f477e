"""A client of an engine in a process of its own."""

from __future__ import annotations

import contextlib
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    Manifest,
    Origins,
    PluginMeter,
    SchedulerStats,
    StepFault,
    WaitReason,
)

from .engine_sockets import EngineSockets
from .process.engine_process import EngineProcess
from .process.launch import Launch, main_objects
from .wire import EngineCoreReadyResponse, RequestType

__all__ = ["EngineStart", "ProcessClient"]

_GLANCE_MS = 20
_Sink = Callable[[EngineCoreOutputs | Exception], None]


@dataclass(frozen=True)
class EngineStart:
    """What an engine process is started with.

    Attributes:
        log_level: of its logger.
    """

    config: EngineConfig
    origins: Origins
    manifest: Manifest
    log_level: str = "WARNING"


class ProcessClient:
    """Starts an engine process, sends it requests, and reads what comes of them.

    Implements `EngineCoreClient`.

    Attributes:
        ready: what the engine said when it was there.
    """

    def __init__(self, start: EngineStart, sink: _Sink | None = None) -> None:
        """Start the engine and wait until it is ready.

        Args:
            start: what it is to be.
            sink: takes outputs, and at last the error that ended them, in another thread; without
                one they wait for `get_output`.

        Raises:
            HardpointError: what the engine raised when it was built.
            EngineDeadError: it ended without a word, or was not ready in time.
        """
        self._inbox: queue.SimpleQueue[EngineCoreOutputs | Exception] = queue.SimpleQueue()
        self._sink = sink or self._inbox.put
        self._timeout_s = start.config.engine.call_timeout_seconds
        self._closing = False
        self._sockets = EngineSockets()
        try:
            self._process = EngineProcess.start(_launch(start, self._sockets))
            try:
                self.ready = self._wait_until_ready(start.config.engine.start_timeout_seconds)
            except BaseException:
                self._process.close(0)
                raise
        except BaseException:
            self._sockets.close()
            raise
        self._sockets.read(self._sink)
        self._watcher = threading.Thread(target=self._watch, name="EngineWatch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request. If the engine refuses it, its first output says so."""
        self._sockets.send(RequestType.ADD, request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""
        if ids := list(request_ids):
            with contextlib.suppress(EngineDeadError):  # it has ended them all
                self._sockets.send(RequestType.ABORT, ids)

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the next batch of outputs.

        Raises:
            EngineDeadError: the engine is gone.
        """
        item = self._inbox.get()
        if isinstance(item, Exception):
            self._inbox.put(item)  # for whoever asks again
            raise EngineDeadError(str(item)) from item
        return item

    def why_waiting(self, request_ids: list[str]) -> Sequence[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""
        reasons: Sequence[WaitReason | None] = self._call("why_waiting", request_ids)
        return reasons

    def set_policy(self, manifest: Manifest) -> None:
        """Take the scheduling policy of another generation of the manifest, or nothing of it."""
        self._call("set_policy", manifest)

    def reset_prefix_cache(self, recompute_running: bool) -> None:
        """Forget cached content; with `recompute_running`, compute anew what runs."""
        self._call("reset_prefix_cache", recompute_running)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        stats: SchedulerStats = self._call("scheduler_stats")
        return stats

    def step_faults(self) -> dict[str, StepFault]:
        """Return the decisions that plugins did not take, by plugin name."""
        faults: dict[str, StepFault] = self._call("step_faults")
        return faults

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""
        meters: dict[str, PluginMeter] = self._call("plugin_meters")
        return meters

    def close(self) -> None:
        """End the engine, and give back everything."""
        self._closing = True
        self._sockets.close()
        self._process.close()
        self._watcher.join()

    def _call(self, method: str, *args: Any) -> Any:
        future = self._sockets.call(method, *args)
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            raise EngineDeadError(
                f"the engine did not answer {method} within {self._timeout_s:g} s"
            ) from None

    def _wait_until_ready(self, seconds: float) -> EngineCoreReadyResponse:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (ready := self._sockets.poll_ready(_GLANCE_MS)) is not None:
                return ready
            if (failure := self._process.failure()) is not None:
                raise failure
        raise EngineDeadError(f"the engine was not ready within {seconds:g} s")

    def _watch(self) -> None:
        """Tell everybody when the process is gone."""
        poller = select.poll()
        for descriptor in self._process.sentinels:
            poller.register(descriptor, select.POLLIN)
        poller.poll()
        if self._closing:
            return
        error = self._process.failure() or EngineDeadError(self._process.description)
        self._sockets.fail(error)
        self._sink(error)


def _launch(start: EngineStart, sockets: EngineSockets) -> Launch:
    return Launch(
        address=msgspec.json.encode(sockets.addresses).decode(),
        manifest=start.manifest,
        config=msgspec.to_builtins(start.config),
        origins=start.origins.by_path,
        main_objects=main_objects(entry.value for entry in start.manifest.entries),
        log_level=start.log_level,
    )
