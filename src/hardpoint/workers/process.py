"""A worker process: its launch, and its services."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.async_llm import AsyncLLM
from hardpoint.calls.engines import AsyncEngineGroup, Change
from hardpoint.calls.groups import COMPANIONS
from hardpoint.calls.plugins import AsyncPluginGroup
from hardpoint.calls.running import AsyncRequests
from hardpoint.calls.weights import AsyncWeightUpdateGroup, WeightFiles, Weights
from hardpoint.configuration.loading import find_tables
from hardpoint.core.engine.utility_calls import PauseModeName
from hardpoint.core.frontend.engine_parts import Companion, Opening
from hardpoint.errors import BusyError, shown
from hardpoint.host.boundary.errors import error_of, kind_of
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.host.registry.discovery import installed_version
from hardpoint.plugins import EngineConfig, HardpointError, RequestError
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import LoadConfig
from hardpoint.plugins.requests.stats import Health
from hardpoint.plugins.scheduling.step_record import LiveRequest
from hardpoint.plugins.server.engine_set import LoadReport
from hardpoint.process.async_engine import AsyncEngine
from hardpoint.process.child_processes.child import ParentWatch
from hardpoint.process.child_processes.launch import ChildLaunch, decode_launch
from hardpoint.process.child_processes.naming import log_to_stderr, name_process
from hardpoint.process.child_processes.process import ChildProcess
from hardpoint.replicas.relay.client import Figures, OpenRelayed
from hardpoint.replicas.relay.frontends import CHANGE, REPLAY, asked_of
from hardpoint.replicas.relay.messages import EnginesSummary, Notice, own_id

_log = logging.getLogger("hardpoint")


class CommandWorkerLaunch(ChildLaunch, frozen=True, kw_only=True):
    """Everything that a worker process needs.

    Attributes:
        config: an EngineConfig with the tables of plugins, as plain data.
        config_sources: by dotted path, where configuration values came from.
        log_level: level of the logger "hardpoint".
        index: number of the worker.
        view: the engines now.
        run, files, data: as in `WorkerPlan`.
    """

    config: dict[str, Any]
    config_sources: dict[str, str]
    log_level: str
    index: int
    view: EnginesSummary
    run: str
    files: list[int]
    data: Any = None


class CommandWorkerProcess(ChildProcess):
    """A running worker process."""

    what = "worker process"
    run = "hardpoint.workers.process:run_worker"


class SharedFaults(Companion):
    """The faults of plugins that other frontends of the same engines have recorded."""

    def __init__(self, opening: Opening) -> None:
        del opening
        self._health: PluginHealth | None = None

    def report_to(self, health: PluginHealth) -> None:
        """Share the faults of a frontend."""
        self._health = health

    @property
    def health(self) -> PluginHealth:
        """The faults of this frontend."""
        assert self._health is not None, "a frontend calls report_to"
        return self._health

    def notices(self) -> list[Notice]:
        """Return the faults so far, as notices for a frontend that knows none of them."""
        health = self.health
        deadly = [[*fault, None] for fault in list(health.deadly.items())]
        ended = [
            [name, health.first[name], health.newest[name][-1], count]
            for name, count in list(health.ended.items())
        ]
        return [Notice("fault", fault) for fault in (*deadly, *ended)]


Ask = Callable[..., Awaitable[Any]]
"""Calls a method of the owner of the engines by name."""


class RelayedEngines(AsyncEngineGroup):
    """The engines of a worker, which their owner changes for all frontends."""

    def __init__(self, engine: AsyncEngine, change: Change, ask: Ask) -> None:
        super().__init__(engine, change)
        self._ask = ask

    async def live_requests(self, external_ids: Sequence[str] | None = None) -> list[LiveRequest]:
        """Return the live completions of all frontends, as `AsyncLLM` does."""
        return own_requests(await super().live_requests(external_ids))

    async def load(self) -> LoadReport:
        """Return the load of the engines."""
        return msgspec.convert(await self._ask("load"), LoadReport)


class RelayedWeights(AsyncWeightUpdateGroup):
    """The weights of a worker's engines, which their owner updates for all frontends."""

    def __init__(self, engine: AsyncEngine, files: WeightFiles, ask: Ask) -> None:
        super().__init__(engine, files)
        self._ask = ask

    async def update(
        self,
        weights: Weights,
        *,
        version: str | None = None,
        mode: PauseModeName = "keep",
        recompute: bool = True,
    ) -> str:
        """Replace weights of the model, as `AsyncLLM.weights.update` does, from a path.

        Raises:
            RequestError: the weights are not a path.
        """
        if not isinstance(weights, str | Path):
            raise RequestError(
                f"weights: expected a path in a worker process, got {shown(weights)}"
            )
        used: str = await self._ask("update_weights", str(weights), version, str(mode), recompute)
        return used


class RelayedPlugins(AsyncPluginGroup):
    """The plugins of all frontends of a worker's engines."""

    def __init__(
        self, engine: AsyncEngine, requests: AsyncRequests, change: Change, ask: Ask
    ) -> None:
        super().__init__(engine, requests, change)
        self._ask = ask

    async def health(self) -> Health:
        """Return the faults of plugins in all processes, and the number of restarts."""
        await self._engine.health()  # raises the error that ended the engines
        return msgspec.convert(await self._ask("health"), Health)


class WorkerLLM(AsyncLLM):
    """The model of a worker: its own frontend, and the engines of the process that started it."""

    _client: OpenRelayed
    _figures: Figures
    _followed: int | None = None  # number of the live change that is under way here
    _preparing: asyncio.Task[None] | None = None

    @classmethod
    def connect(
        cls, config: EngineConfig, config_sources: ConfigSources, opened: OpenRelayed
    ) -> WorkerLLM:
        """Open the frontend, with a client that is opened so.

        Raises:
            HardpointError: as `AsyncLLM`, or the owner of the engines does not answer.
        """
        llm = cls.__new__(cls)
        llm._client, llm._figures = opened, Figures()
        llm._open(
            config,
            config_sources,
            open_client=opened,
            companions=(*COMPANIONS, SharedFaults),
            send_stats=llm._figures.add,
        )
        health = llm._engine.parts.companion(SharedFaults).health
        health.notify = lambda *fault: llm._post("fault", *fault)
        engine, ask = llm._engine, opened_caller(opened)
        change = functools.partial(change_at_owner, ask)
        llm._groups = dataclasses.replace(
            llm._groups,
            engines=RelayedEngines(engine, change, ask),
            weights=RelayedWeights(engine, llm._files, ask),
            plugins=RelayedPlugins(engine, llm._requests, change, ask),
        )
        return llm

    def _post(self, method: str, *arguments: Any) -> None:
        """Call the owner of the engines without waiting; it may be gone."""
        with contextlib.suppress(HardpointError):
            self._client.client.ask(method, *arguments)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._client.client.ask(method, *arguments))

    async def notify_ready(self) -> None:
        """Notify the owner of the engines that requests are answered here."""
        await self._ask("ready")

    async def follow(self) -> None:
        """Read the notices of the owner of the engines, for ever."""
        readers = {
            "engines": self._read_view,
            "dead": self._read_death,
            "abort": self._read_abort,
            "fault": self._read_fault,
            CHANGE: self._read_change,
            REPLAY: self._read_replay,
            "load": self._read_load,
        }
        ended = threading.Event()
        send = functools.partial(self._post, "figures")
        threading.Thread(
            target=self._figures.send_every, args=(send, ended), name="Figures", daemon=True
        ).start()
        try:
            while True:
                for notice in await asyncio.wrap_future(self._client.client.next_notices()):
                    try:
                        await readers[notice.topic](notice)
                    except HardpointError as error:  # others are to be read all the same
                        _log.error("notice %r of the engines' owner: %s", notice.topic, error)
        except HardpointError as error:  # it has ended, and so does this process
            _log.debug("no more notices: %s", error)
        finally:
            ended.set()

    async def _read_view(self, notice: Notice) -> None:
        self._client.client.view = msgspec.convert(notice.value, EnginesSummary)

    async def _read_death(self, notice: Notice) -> None:
        self._client.client.fail(error_of(*notice.value))

    async def _read_abort(self, notice: Notice) -> None:
        await self.abort(notice.value)

    async def _read_fault(self, notice: Notice) -> None:
        self._engine.parts.companion(SharedFaults).health.add(*notice.value)

    async def _read_change(self, notice: Notice) -> None:
        action, number, request = notice.value
        if action == "prepare":  # which may take a while; it may be undone before that
            self._preparing = asyncio.create_task(self._prepare(number, asked_of(request)))
        elif number == self._followed:
            if action != "commit":
                self._followed = None
            self._engine.finish_change(action)

    async def _prepare(self, number: int, request: ChangeRequest) -> None:
        try:
            if self._followed is not None:
                raise BusyError("another live change is under way; try again once it is done")
            self._followed = number
            await self._engine.follow_change(request)
        except HardpointError as error:
            self._post("change_state", number, kind_of(error), str(error))
        else:
            self._post("change_state", number, None, "")

    async def _read_replay(self, notice: Notice) -> None:
        await self._engine.change(asked_of(notice.value))

    async def _read_load(self, notice: Notice) -> None:
        self._engine.set_load(msgspec.convert(notice.value, LoadConfig))

    async def metrics(self) -> str:
        """Return the exports of the sinks, which have the figures of all frontends."""
        if (stats := self._figures.pop()) is not None:
            await self._ask("figures", msgspec.to_builtins(stats))
        exported: str = await self._ask("metrics")
        return exported


def opened_caller(opened: OpenRelayed) -> Ask:
    """Return a function that calls the owner of a worker's engines."""

    async def ask(method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(opened.client.ask(method, *arguments))

    return ask


async def change_at_owner(ask: Ask, request: ChangeRequest) -> Manifest:
    """Change plugins and settings in all processes."""
    return msgspec.convert(await ask("live_change", msgspec.to_builtins(request)), Manifest)


def own_requests(requests: Sequence[LiveRequest]) -> list[LiveRequest]:
    """Return live requests with the ids of their own frontends."""
    return [
        msgspec.structs.replace(request, request_id=own_id(request.request_id))
        for request in requests
    ]


@dataclass
class OpenWorker:
    """The `Worker` that a worker process runs with."""

    index: int
    engine: WorkerLLM
    version: str
    files: Sequence[int]
    data: Any
    _following: asyncio.Task[None] | None = None

    async def announce_ready(self) -> None:
        """Notify the process that started it that it serves; read its notices."""
        self._following = asyncio.ensure_future(self.engine.follow())
        await self.engine.notify_ready()


def run_worker(data: bytes, watch: ParentWatch) -> None:
    """Run the function of a plan, and exit with its code.

    Args:
        data: a CommandWorkerLaunch.
        watch: watch of the parent.

    Raises:
        HardpointError: the frontend cannot be opened; the parent raises it too.
    """
    del watch  # the process ends with its parent
    launch = decode_launch(data, CommandWorkerLaunch)
    name_process(f"Worker_{launch.index}")
    log_to_stderr(f"worker {launch.index}", launch.log_level)
    sources = ConfigSources(launch.config_sources)
    plain = msgspec.convert(launch.config["plugins"], type(EngineConfig().plugins))
    config_type = EngineConfig.with_tables(find_tables(plain, sources))
    config = msgspec.convert(launch.config, config_type)
    opened = OpenRelayed(Path(launch.folder), launch.view)
    llm = WorkerLLM.connect(config, sources, opened)
    module, _, function = launch.run.partition(":")
    run = getattr(importlib.import_module(module), function)
    worker = OpenWorker(launch.index, llm, installed_version(), launch.files, launch.data)
    sys.exit(run(worker))
