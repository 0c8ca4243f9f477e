"""The client of one engine, which a replica of Serve keeps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec
from ray.exceptions import RayError

from hardpoint import typed
from hardpoint.core.client.base import OneEngine
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.host.boundary.activity import Activity, PluginCall, Snapshot
from hardpoint.host.boundary.errors import engine_dead, error_of
from hardpoint.host.registry.discovery import installed_version
from hardpoint.host.system.encoding import WireError
from hardpoint.plugins import EngineCoreOutputs, EngineCoreRequest, RequestError
from hardpoint.process.client.base import Attempt, UtilityCalls
from hardpoint.process.client.process_client import EngineStart, Sink
from hardpoint.process.protocol import UtilityCall, UtilityOutput
from hardpoint.process.utility_calls import result_type

from .fleet import ReplicaFleet
from .messages import EngineDeath, EngineLaunch, EngineOpened, Failed, Frames, decoded, encoded

_REPORT_PAUSE_S = 0.05  # so that reports of an engine are 20 a second at most


class LastActivity(Activity):
    """Activity of an engine when it died, as its replica has reported it."""

    def __init__(self) -> None:
        super().__init__()
        self._last = Snapshot()

    def set(self, in_step: frozenset[str] | None, call: PluginCall | None) -> None:
        """Take over the report."""
        self._last = Snapshot(call=call, in_step=in_step)

    def snapshot(self) -> Snapshot:
        """Return it."""
        return self._last


class ServeClient(OneEngine, UtilityCalls):
    """Sends requests to an engine through Serve, one call per message, and reads its outputs.

    Implements `ReplicaClient`.

    Attributes:
        replica: id of the replica that keeps the engine.
        start: the parameters that the engine was started with.
        ready: its ready response.
        pid: its process id, on its node.
        activity: what it did when it died.
        was_killed: whether something outside ended it.
    """

    in_process = False
    is_serving = True

    def __init__(self, fleet: ReplicaFleet, replica: str, start: EngineStart, sink: Sink) -> None:
        """Start an engine in a replica, and wait until it is ready.

        Raises:
            HardpointError: it cannot be started.
            EngineDeadError: the replica is gone, or the engine was not ready in time.
        """
        UtilityCalls.__init__(self, start.config.engine.call_timeout_seconds)
        self.replica, self.start, self._fleet, self._sink = replica, start, fleet, sink
        self.activity = LastActivity()
        self.was_killed = False
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._is_closed = False
        self._runs: dict[str, _ClientCall] = {}  # by request
        self._work: set[Future[Any]] = set()
        self._call_ids = itertools.count()
        opened = self._opened(_launch(start), start.config.engine.start_timeout_seconds)
        self.ready, self.pid = opened.ready, opened.pid
        self._spawn(self._read_reports())

    def _opened(self, launch: EngineLaunch, timeout_s: float) -> EngineOpened:
        opening = self._fleet.spawn(self._fleet.call(self.replica, "open", launch))
        try:
            opened = opening.result(timeout_s)
        except TimeoutError:
            opening.cancel()
            raise EngineDeadError(
                f"the engine was not ready within {timeout_s:g} s (engine.start_timeout_seconds)"
            ) from None
        except CancelledError:
            raise EngineClosedError("the engine was closed while it was started") from None
        except RayError as error:
            raise _lost(self.replica, error) from error
        if isinstance(opened, Failed):
            raise opened.error()
        assert isinstance(opened, EngineOpened)
        return opened

    @property
    def pids(self) -> Mapping[int, int]:
        """The engine's process id, by its rank."""
        return {0: self.pid}

    def _spawn(self, work: Any) -> Future[Any]:
        future = self._fleet.spawn(work)
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return future

    def _check(self) -> None:
        if self._error is not None:
            raise engine_dead(self._error)

    # Requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request, without waiting."""
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Send the requests of one call, without waiting; Serve queues them.

        Raises:
            EngineDeadError: the engine is gone.
            RequestError: one cannot be encoded.
        """
        self._check()
        try:
            frames = encoded(list(requests))
        except WireError as cause:
            raise RequestError(str(cause)) from None
        run = _ClientCall({request.request_id for request in requests})
        with self._lock:
            self._runs |= dict.fromkeys(run.waiting, run)
        run.future = self._spawn(self._read(run, frames))

    def offer_requests(self, requests: Sequence[EngineCoreRequest]) -> Attempt:
        """Return a function that sends the requests of one call.

        Raises:
            EngineDeadError: the engine is gone.
        """
        self._check()

        def attempt() -> bool:
            self.add_requests(requests)
            return True

        return attempt

    async def _read(self, run: _ClientCall, frames: Frames) -> None:
        try:
            async with contextlib.aclosing(
                self._fleet.stream(self.replica, "run", frames)
            ) as items:
                async for item in items:
                    if isinstance(item, EngineDeath):
                        self._died(item)
                        return
                    outputs = decoded(item, EngineCoreOutputs)
                    run.waiting -= {
                        output.request_id for output in outputs.outputs if output.finished
                    }
                    run.waiting -= outputs.finished_requests or set()
                    self._sink(outputs)
        except (RayError, EngineDeadError) as error:
            self._die(_lost(self.replica, error), was_killed=True)
        except Exception as error:
            self._die(error, was_killed=False)
        else:
            if run.waiting:
                lost = EngineDeadError(f"the replica {self.replica} ended a call too early")
                self._die(lost, was_killed=True)
        finally:
            self._forget(run)

    def _forget(self, run: _ClientCall) -> None:
        with self._lock:
            for request_id in run.request_ids:
                if self._runs.get(request_id) is run:
                    del self._runs[request_id]

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without waiting: a call without other requests is cancelled."""
        others: list[str] = []
        for request_id in request_ids:
            with self._lock:
                run = self._runs.get(request_id)
            if run is None:
                continue
            run.waiting.discard(request_id)
            if run.waiting:
                others.append(request_id)
            elif run.future is not None:
                run.future.cancel()
        if others and self._error is None:
            # A replica that is about to end cannot be called; there, they run on for nothing.
            self._spawn(self._abort(others))

    async def _abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(RayError, EngineDeadError):
            await self._fleet.call(self.replica, "abort", request_ids)

    # Reports

    async def _read_reports(self) -> None:
        """Hand on load and changes of the cache; find out that the replica is dead."""
        while self._error is None and self._fleet.has(self.replica):
            try:
                report = await self._fleet.call(self.replica, "reports")
            except EngineDeadError:  # it takes no more requests; what it has runs on
                return
            except RayError as error:
                self._die(_lost(self.replica, error), was_killed=True)
                return
            if isinstance(report, EngineDeath):
                self._died(report)
            elif report is not None:
                self._sink(decoded(report, EngineCoreOutputs))
                await asyncio.sleep(_REPORT_PAUSE_S)

    def _died(self, death: EngineDeath) -> None:
        self.activity.set(death.in_step, death.call)
        if self._die(death.reason.error(), was_killed=death.was_killed):
            self._fleet.give_back(self.replica)

    def _die(self, error: Exception, *, was_killed: bool) -> bool:
        with self._lock:
            if self._error is not None or self._is_closed:
                return False
            self._error = error
            self.was_killed = was_killed
            if was_killed:
                self.activity.set(frozenset(), None)
        self._sink(engine_dead(error))
        return True

    # Control calls

    def call(self, method: str, *args: Any, rank: int | None = None) -> Future[Any]:  # noqa: ARG002
        """Call one of the engine's utilities without waiting.

        Raises:
            EngineDeadError: the engine is gone.
            RequestError: the arguments cannot be encoded.
        """
        self._check()
        try:
            frames = encoded(UtilityCall(0, next(self._call_ids), method, list(args)))
        except WireError as cause:
            raise RequestError(str(cause)) from None
        return self._spawn(self._answer(method, frames))

    async def _answer(self, method: str, frames: Frames) -> Any:
        try:
            message = decoded(await self._fleet.call(self.replica, "call", frames), UtilityOutput)
        except RayError as error:
            raise _lost(self.replica, error) from error
        if message.result is None:
            raise error_of(message.kind, message.failure)
        return typed.convert(message.result.value, result_type(method), path=method)

    # What a client of one engine alone has; here, the group waits for outputs

    def get_output(self, *, wait: bool, timeout: float | None = None) -> EngineCoreOutputs | None:  # noqa: ARG002
        """Raise: outputs go to the sink.

        Raises:
            EngineClosedError: always.
        """
        raise EngineClosedError("outputs go to the sink")

    def end_waiting(self) -> None:
        """Do nothing: no caller waits here."""

    def close(self) -> None:
        """End all calls; the replica ends its requests. Closing twice does nothing."""
        with self._lock:
            self._is_closed = True
            self._error = self._error or EngineDeadError("the engine was closed")
        for work in list(self._work):
            work.cancel()


class _ClientCall:
    """One call in flight.

    Attributes:
        request_ids: ids of its requests.
        waiting: those that have not ended.
        future: the task that reads its outputs.
    """

    def __init__(self, request_ids: Collection[str]) -> None:
        self.request_ids = frozenset(request_ids)
        self.waiting = set(request_ids)
        self.future: Future[Any] | None = None


def _lost(replica: str, error: Exception) -> EngineDeadError:
    if isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(f"the replica {replica} is gone: {str(error).splitlines()[0]}")


def _launch(start: EngineStart) -> EngineLaunch:
    return EngineLaunch(
        version=installed_version(),
        config=msgspec.to_builtins(start.config.without_tables()),
        config_sources=dict(start.config_sources.by_path),
        manifest=start.manifest,
        log_level=start.log_level,
        rank=start.engine_index,
        vocabulary=start.vocabulary,
        reports_cache=start.reports_cache,
    )
