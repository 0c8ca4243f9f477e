"""The deployment of engines: each replica keeps one engine process, for the ingress."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable

import msgspec

from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary.errors import kind_of, rejection_output
from hardpoint.host.registry.discovery import installed_version
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HardpointError,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.client.process_client import EngineStart, ProcessClient
from hardpoint.process.output_coalescer import OutputCoalescer
from hardpoint.process.protocol import UtilityCall, UtilityOutput, UtilityResult
from hardpoint.process.utility_calls import failed_call

from .messages import (
    EngineDeath,
    EngineLaunch,
    EngineOpened,
    Failed,
    Frames,
    decoded,
    encoded,
)
from .prompt_work import PromptWork
from .router import Address

_REPORT_WAIT_S = 0.5
_RETRY_S = 0.005
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
"""Of requests whose prompt was computed, also if they have no token, as pooling requests."""
_DEAD_FOR_S = 30.0
"""After which an engine that died and was not opened again makes its replica unhealthy."""


class _Run:
    """The requests of one call in flight, and their outputs that were not sent yet."""

    def __init__(self, requests: Iterable[EngineCoreRequest]) -> None:
        self.waiting = {request.request_id for request in requests}
        self.death: EngineDeath | None = None
        self._outputs = OutputCoalescer()
        self._changed = asyncio.Event()

    def put(self, outputs: EngineCoreOutputs) -> None:
        self._outputs.put(outputs)
        self.waiting -= {output.request_id for output in outputs.outputs if output.finished}
        self.waiting -= outputs.finished_requests or set()
        self._changed.set()

    def die(self, death: EngineDeath) -> None:
        self.death = death
        self._changed.set()

    async def next(self) -> EngineCoreOutputs | EngineDeath | None:
        while (outputs := self._outputs.pop()) is None:
            if self.death is not None:
                return self.death
            if not self.waiting:
                return None
            await self._changed.wait()
            self._changed.clear()
        return outputs


class EngineReplica:
    """Starts an engine process as the ingress asks for, and hands on the messages of both.

    All calls come in one event loop; the first argument is for the router.
    """

    def __init__(self) -> None:
        self._client: ProcessClient | None = None
        self._death: EngineDeath | None = None
        self._died_at = 0.0
        self._num_opened = 0
        self._opening = asyncio.Lock()
        self._runs: dict[str, _Run] = {}  # by request
        self._reports = OutputCoalescer()
        self._reported = asyncio.Event()
        self._work = PromptWork()
        self._max_num_seqs = 1
        self._num_running = self._num_waiting = 0

    async def hello(self, address: Address) -> None:
        """Do nothing; the router of the caller reports the replicas to it."""

    async def open(self, _: Address, launch: EngineLaunch) -> EngineOpened | Failed:
        """Start an engine; a running one ends."""
        async with self._opening:
            await self._close_engine()
            self._num_opened += 1
            number, loop = self._num_opened, asyncio.get_running_loop()

            def sink(item: EngineCoreOutputs | Exception) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._receive, number, item)

            try:
                self._client = await asyncio.to_thread(ProcessClient, _start(launch), sink)
            except HardpointError as error:
                return Failed(kind_of(error), str(error))
            self._death = None
            self._reports, self._work = OutputCoalescer(), PromptWork()
            self._max_num_seqs = self._client.start.config.scheduler.max_num_seqs
            self._num_running = self._num_waiting = 0
            return EngineOpened(self._client.ready, self._client.pid)

    async def _close_engine(self) -> None:
        client, self._client = self._client, None
        for run in set(self._runs.values()):
            run.die(EngineDeath(Failed("EngineDeadError", "it was opened again"), None, None, True))
        self._runs.clear()
        if client is not None:
            await asyncio.to_thread(client.close)

    def _receive(self, number: int, item: EngineCoreOutputs | Exception) -> None:
        if number != self._num_opened:
            return
        if isinstance(item, Exception):
            self._die(item)
            return
        for run, outputs in self._by_run(item).items():
            run.put(outputs)
        if item.load is not None:
            self._num_running, self._num_waiting = item.load.num_running, item.load.num_waiting
        if item.scheduler_stats or item.load or item.cache_changes:
            self._reports.put(msgspec.structs.replace(item, outputs=[], finished_requests=None))
            self._reported.set()

    def _by_run(self, item: EngineCoreOutputs) -> dict[_Run, EngineCoreOutputs]:
        by_run: dict[_Run, EngineCoreOutputs] = {}
        for output in item.outputs:
            if (run := self._runs.get(output.request_id)) is not None:
                by_run.setdefault(run, EngineCoreOutputs()).outputs.append(output)
                if output.new_token_ids or output.finish_reason in _COMPLETE:
                    self._work.computed(output.request_id)
                elif output.finished:
                    self._work.remove(output.request_id)
        for request_id in item.finished_requests or ():
            self._work.remove(request_id)
            if (run := self._runs.get(request_id)) is not None:
                part = by_run.setdefault(run, EngineCoreOutputs())
                part.finished_requests = {*(part.finished_requests or ()), request_id}
        return by_run

    def _die(self, error: Exception) -> None:
        assert self._client is not None
        last = self._client.activity.snapshot()
        self._death = EngineDeath(
            Failed(kind_of(error), str(error)), last.in_step, last.call, self._client.was_killed
        )
        self._died_at = time.monotonic()
        for run in set(self._runs.values()):
            run.die(self._death)
        self._runs.clear()
        self._work = PromptWork()
        self._reported.set()

    async def run(self, _: Address, frames: Frames) -> AsyncGenerator[Frames | EngineDeath, None]:
        """Run the requests of one call; yield their outputs until all have ended.

        Leaving the generator ends those that have not.
        """
        requests = decoded(frames, list[EngineCoreRequest])
        run = _Run(requests)
        try:
            await self._begin(run, requests)
            while (item := await run.next()) is not None:
                if isinstance(item, EngineDeath):
                    yield item
                    return
                yield encoded(item)
        finally:
            self._end(run, {request.request_id for request in requests})

    async def _begin(self, run: _Run, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self._runs[request.request_id] = run
            before = len(request.resumed.output_token_ids) if request.resumed else 0
            self._work.add(request.request_id, len(request.prompt_token_ids) + before)
        try:
            if self._client is None or self._death is not None:
                raise EngineDeadError("the engine was not opened")
            attempt = self._client.offer_requests(requests)
            while not attempt():
                await asyncio.sleep(_RETRY_S)
        except EngineDeadError as error:
            lost = EngineDeath(Failed(kind_of(error), str(error)), frozenset(), None, True)
            run.die(self._death or lost)
        except HardpointError as error:
            for request in requests:
                run.put(rejection_output(request.request_id, error))

    def _end(self, run: _Run, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self._work.remove(request_id)
            if self._runs.get(request_id) is run:
                del self._runs[request_id]
        if run.waiting and self._client is not None and run.death is None:
            self._client.abort_requests(run.waiting)

    async def abort(self, _: Address, request_ids: list[str]) -> None:
        """End some requests of a call; the others go on."""
        for request_id in request_ids:
            self._work.remove(request_id)
            if (run := self._runs.get(request_id)) is not None:
                run.put(EngineCoreOutputs(finished_requests={request_id}))
        if self._client is not None:
            self._client.abort_requests(request_ids)

    async def reports(self, _: Address) -> Frames | EngineDeath | None:
        """Return the reports since the last call, once there are any; None if none came in time."""
        if self._death is None and not self._reports:
            self._reported.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_WAIT_S):
                    await self._reported.wait()
        if (reports := self._reports.pop()) is not None:
            return encoded(reports)
        return self._death

    async def call(self, _: Address, frames: Frames) -> Frames:
        """Make a control call; return its answer."""
        call = decoded(frames, UtilityCall)
        try:
            if self._client is None:
                raise EngineDeadError("the engine was not opened")
            future = self._client.call(call.method, *call.args)
            result = await asyncio.wrap_future(future)
            return encoded(UtilityOutput(call.call_id, result=UtilityResult(result)))
        except HardpointError as error:
            return encoded(failed_call(call, error))

    async def check_health(self) -> None:
        """Check the engine, for Serve.

        Raises:
            EngineDeadError: it died, and was not opened again.
        """
        if self._death is not None and time.monotonic() - self._died_at > _DEAD_FOR_S:
            raise self._death.reason.error()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures for the autoscaling policy."""
        return {
            "waiting_seconds": self._work.waiting_seconds,
            "running_share": self._num_running / self._max_num_seqs,
        }

    async def __del__(self) -> None:
        """End the engine; Serve calls this when no request is left, or the time is up."""
        await self._close_engine()


def _start(launch: EngineLaunch) -> EngineStart:
    """Return the parameters of an engine of this node.

    Raises:
        HardpointError: this node has another version.
    """
    if (version := installed_version()) != launch.version:
        raise HardpointError(
            f"hardpoint: expected version {launch.version} on each node, as at the ingress, got "
            f"{version}"
        )
    return EngineStart(
        config=msgspec.convert(launch.config, EngineConfig),
        config_sources=ConfigSources(launch.config_sources),
        manifest=launch.manifest,
        log_level=launch.log_level,
        engine_index=launch.rank,
        vocabulary=launch.vocabulary,
        reports_load=True,
        reports_cache=launch.reports_cache,
    )
