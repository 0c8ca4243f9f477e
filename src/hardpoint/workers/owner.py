"""The process that owns the engines of several worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from hardpoint.async_llm import AsyncLLM
from hardpoint.calls.engines import AsyncEngineGroup, with_restart
from hardpoint.calls.groups import COMPANIONS
from hardpoint.calls.weights import AsyncWeightUpdateGroup, WeightFiles, Weights
from hardpoint.core.engine.utility_calls import PauseModeName
from hardpoint.core.frontend.frontend import listed_ids
from hardpoint.errors import PluginFaultError, reason_of
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.journal import with_journal
from hardpoint.plugins import EngineConfig, IterationStats
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.scheduling.step_record import LiveRequest
from hardpoint.plugins.server.generator import WorkerPlan
from hardpoint.process.async_engine import AsyncEngine
from hardpoint.replicas.relay.frontends import asked_of
from hardpoint.replicas.relay.messages import SEPARATOR, Notice
from hardpoint.replicas.relay.owner import Link, SharedEngines
from hardpoint.replicas.restarts import RestartBudget

from .process import CommandWorkerLaunch, CommandWorkerProcess, SharedFaults, own_requests

_log = logging.getLogger("hardpoint")

_POLL_S = 0.05
_PAUSE_S = 5.0
"""Until a worker that could not be started is tried again: the system may have memory by then."""

_ENDED = 3
"""Exit code where workers end too often."""


class OwnedEngines(AsyncEngineGroup):
    """The engines of the process that owns them."""

    async def live_requests(self, external_ids: Sequence[str] | None = None) -> list[LiveRequest]:
        """Return the live completions of all frontends, as `AsyncLLM` does."""
        return own_requests(await super().live_requests(external_ids))


class OwnedWeights(AsyncWeightUpdateGroup):
    """The weights of the engines of the process that owns them."""

    def __init__(self, engine: AsyncEngine, files: WeightFiles, shared: SharedEngines) -> None:
        super().__init__(engine, files)
        self._shared = shared

    async def update(
        self,
        weights: Weights,
        *,
        version: str | None = None,
        mode: PauseModeName = "keep",
        recompute: bool = True,
    ) -> str:
        """Replace weights of the model, as `AsyncLLM` does, and notify all frontends."""
        used = await super().update(weights, version=version, mode=mode, recompute=recompute)
        load = self._engine.parts.config.load
        self._shared.notify(Notice("load", msgspec.to_builtins(load)))
        return used


class OwnerLLM(AsyncLLM):
    """The model of the process that owns the engines."""

    shared: SharedEngines

    @classmethod
    def open(cls, config: EngineConfig, config_sources: ConfigSources, restart: Any) -> OwnerLLM:
        """Start the engines, as `AsyncLLM` does."""
        llm = cls.__new__(cls)
        llm.shared = SharedEngines()
        open_client = with_journal(llm.shared.open_engines, config, config_sources)
        llm._open(
            with_restart(config, restart),
            config_sources,
            open_client=open_client,
            companions=(*COMPANIONS, SharedFaults),
        )
        faults = llm._engine.parts.companion(SharedFaults)
        faults.health.notify = lambda *fault: llm.shared.notify(Notice("fault", fault), keep=False)
        llm.shared.faults = faults.notices
        llm._groups = dataclasses.replace(
            llm._groups,
            engines=OwnedEngines(llm._engine, llm._engine.change),
            weights=OwnedWeights(llm._engine, llm._files, llm.shared),
        )
        return llm

    async def change(self, request: ChangeRequest) -> Manifest:
        """Change plugins and settings in all processes."""
        return await self._engine.change(request)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests of all frontends by their ids, as `AsyncLLM` does."""
        listed = listed_ids(request_ids)
        await super().abort(listed)
        self.shared.notify(Notice("abort", listed), keep=False)

    def add_fault(self, link: Link, plugin: str, message: str, request_id: str | None) -> None:
        """Record a fault that a frontend has noticed, and notify the others."""
        if request_id is not None:  # ids of two frontends may be equal
            request_id = f"{link.token}{SEPARATOR}{request_id}"
        fault = plugin, message, request_id
        self._engine.parts.companion(SharedFaults).health.add(*fault)
        self.shared.notify(Notice("fault", fault), but=link, keep=False)

    def add_figures(self, stats: IterationStats) -> None:
        """Pass figures of a frontend to the sinks."""
        try:
            self._engine.parts.step_parts.observers.record(stats)
        except PluginFaultError as fault:  # of a sink whose faults end the engine
            self.shared.fail(fault)


class Workers:
    """The worker processes of a command; implements `WorkerGroup`."""

    # All of it runs in the event loop of the engine. The links of the workers call `_answer` in
    # their threads, which hands the calls over.

    def __init__(
        self, engine: OwnerLLM, config_sources: ConfigSources, max_per_minute: int
    ) -> None:
        """`max_per_minute`: how often it is tried to replace workers that ended."""
        self.engine = engine
        self._sources = config_sources
        self._config = engine.config
        self._budget = RestartBudget(enabled=True, max_per_minute=max_per_minute)
        self._running: dict[int, tuple[CommandWorkerProcess, Link]] = {}
        self._ready: set[int] = set()
        self._replaced: list[int] = []
        self._due: dict[int, float] = {}  # when those that could not be started are tried again
        self._is_ending = False
        self._code = 0
        self._handlers: dict[str, Callable[..., Awaitable[Any]]] = {
            "ready": self._answer_ready,
            "figures": self._answer_figures,
            "fault": self._answer_fault,
            "live_change": self._answer_live_change,
            "change_state": self._answer_change_state,
            "update_weights": self._answer_update_weights,
            "health": self._answer_health,
            "load": self._answer_load,
            "metrics": self._answer_metrics,
            "scale": self._answer_scale,
            "retire": self._answer_retire,
        }

    async def start(self, plan: WorkerPlan) -> None:
        """Start the workers; return once all are ready."""
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        try:
            for index in range(plan.num_workers):
                await self._start(index)
            while len(self._ready) < plan.num_workers:
                for index, (process, _) in self._running.items():
                    if index not in self._ready and (failure := process.failure()) is not None:
                        raise failure
                self._check_engine()
                await asyncio.sleep(_POLL_S)
        except BaseException:
            await self._end_all()
            raise
        self._watching = asyncio.ensure_future(self._watch())

    def _check_engine(self) -> None:
        if (dead := self.engine.dead_error) is not None:
            raise dead

    async def _start(self, index: int) -> None:
        link = self.engine.shared.connect(lambda method, args: self._answer(index, method, args))
        try:
            process = CommandWorkerProcess.spawn(pass_fds=self._plan.files)
            process.launch(
                CommandWorkerLaunch(
                    folder=str(link.folder),
                    config=msgspec.to_builtins(self._config),
                    config_sources=self._sources.by_path,
                    log_level=logging.getLevelName(_log.getEffectiveLevel()),
                    index=index,
                    view=self.engine.shared.view,
                    run=self._plan.run,
                    files=list(process.passed_fds),
                    data=self._plan.data,
                )
            )
        except BaseException:
            await asyncio.to_thread(self.engine.shared.disconnect, link)
            raise
        self._running[index] = process, link

    def replaced(self) -> Sequence[int]:
        """Return the numbers of workers that were replaced since the last call."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def send_signal(self, number: int) -> None:
        """Send all workers a signal."""
        self._is_ending |= number in (signal.SIGTERM, signal.SIGINT)
        for process, _ in self._running.values():
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)

    async def wait(self) -> int:
        """Wait until all have ended; return the highest exit code."""
        await self._watching
        return self._code

    async def _watch(self) -> None:
        view = self.engine.shared.view
        while self._running or self._due:
            await asyncio.sleep(_POLL_S)
            for index, (process, link) in list(self._running.items()):
                if process.returncode is not None:
                    await self._ended(index, process, link)
            if self._is_over:
                self._due.clear()
            for index, due in list(self._due.items()):
                if self._loop.time() >= due:
                    del self._due[index]
                    await self._replace(index)
            if (now := self.engine.shared.view) != view:
                view = now
                self.engine.shared.notify(Notice("engines", msgspec.to_builtins(view)), keep=False)

    @property
    def _is_over(self) -> bool:
        return self._is_ending or self.engine.dead_error is not None

    async def _ended(self, index: int, process: CommandWorkerProcess, link: Link) -> None:
        code = process.returncode or 0
        failure = process.failure()
        del self._running[index]
        for release in (functools.partial(self.engine.shared.disconnect, link), process.close):
            with contextlib.suppress(RuntimeError):  # no thread can be started: a later one does it
                await asyncio.to_thread(release)
        if self._is_over:
            self._code = max(self._code, code)
            return
        _log.warning("worker %d ended, and is replaced: %s", index, failure)
        self._ready.discard(index)
        self._replaced.append(index)
        await self._replace(index)

    async def _replace(self, index: int) -> None:
        """Start a worker for an ended one; later, if that fails."""
        if not self._budget.may_restart():
            _log.error("workers end too often; the others are ended, too")
            self._code = _ENDED
            self.send_signal(signal.SIGTERM)
            return
        try:
            await self._start(index)
        except Exception as cause:  # no memory, process or descriptor is left now
            _log.warning(
                "worker %d could not be started, and is tried again in %g s: %s",
                index,
                _PAUSE_S,
                reason_of(cause),
            )
            self._due[index] = self._loop.time() + _PAUSE_S

    async def _end_all(self) -> None:
        self._is_ending = True
        for process, link in self._running.values():
            process.kill()
            await asyncio.to_thread(process.close, 0)
            await asyncio.to_thread(self.engine.shared.disconnect, link)
        self._running.clear()

    async def aclose(self) -> None:
        """End the workers that are left, and the engines."""
        if hasattr(self, "_watching"):
            self._watching.cancel()
        await self._end_all()
        await self.engine.aclose()

    # Calls of workers

    def _answer(self, index: int, method: str, arguments: Sequence[Any]) -> Future[Any]:
        """Answer a call of a worker; in the thread of its link."""
        answer = self._run(self._handlers[method], index, arguments)
        return asyncio.run_coroutine_threadsafe(answer, self._loop)

    async def _run(
        self, handler: Callable[..., Awaitable[Any]], index: int, arguments: Sequence[Any]
    ) -> Any:
        return msgspec.to_builtins(await handler(index, *arguments))

    async def _answer_ready(self, index: int) -> None:
        self._ready.add(index)
        self.engine.shared.follows(self._running[index][1])

    async def _answer_figures(self, _: int, stats: Any) -> None:
        self.engine.add_figures(msgspec.convert(stats, IterationStats))

    async def _answer_fault(self, index: int, *fault: Any) -> None:
        _, link = self._running[index]
        self.engine.add_fault(link, *fault)

    async def _answer_live_change(self, _: int, request: Any) -> Manifest:
        return await self.engine.change(asked_of(request))

    async def _answer_change_state(
        self, index: int, number: int, kind: str | None, text: str
    ) -> None:
        _, link = self._running[index]
        self.engine.shared.changes.answer(link.token, number, kind, text)

    async def _answer_update_weights(
        self, _: int, weights: str, version: str | None, mode: Any, recompute: bool
    ) -> str:
        return await self.engine.weights.update(
            weights, version=version, mode=mode, recompute=recompute
        )

    async def _answer_health(self, _: int) -> Any:
        return await self.engine.plugins.health()

    async def _answer_metrics(self, _: int) -> str:
        return await self.engine.metrics()

    async def _answer_load(self, _: int) -> Any:
        return await self.engine.engines.load()

    async def _answer_scale(self, _: int, num_engines: int, drain_s: float) -> Any:
        return await self.engine.engines.scale(num_engines, drain_seconds=drain_s)

    async def _answer_retire(self, _: int, ranks: list[int], drain_s: float) -> Any:
        return await self.engine.engines.retire(ranks, drain_seconds=drain_s)


def open_workers(config: EngineConfig, config_sources: ConfigSources, restart: Any) -> Workers:
    """Start the engines of worker processes; block until they are ready.

    Raises:
        HardpointError: as `AsyncLLM`.
    """
    engine = OwnerLLM.open(config, config_sources, restart)
    return Workers(engine, config_sources, config.engine.max_restarts_per_minute)
