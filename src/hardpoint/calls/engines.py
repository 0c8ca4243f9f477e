"""The group `engines` of LLM and AsyncLLM: control calls, number, load and settings."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable

import msgspec

from hardpoint.core.build import build_engine
from hardpoint.core.client.base import EngineCoreClient
from hardpoint.core.engine.utility_calls import (
    AsyncControlCalls,
    ControlCalls,
    EngineUtilities,
    SyncControlCalls,
)
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.host.live.settings import ChangeRequest, Running
from hardpoint.host.system.control_calls import AsyncCaller, SyncCaller
from hardpoint.plugins import ConfigError, EngineConfig, HardpointError
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.executor import WorkerProcess
from hardpoint.plugins.requests.stats import SchedulerStats
from hardpoint.plugins.scheduling.step_record import LiveRequest
from hardpoint.plugins.server.engine_set import EngineSet, EngineStatus, LoadReport
from hardpoint.plugins.server.settings import LiveSettings

from .sessions import RELEASE, Released, release_arguments

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine
    from hardpoint.process.build import OpenRemoteClient

__all__ = [
    "AsyncEngineGroup",
    "AsyncEngineHandle",
    "EngineGroup",
    "EngineHandle",
    "Restart",
    "builder_of",
    "engines_of",
    "with_restart",
]

Change = Callable[[ChangeRequest], Awaitable[Manifest]]
"""Changes settings and plugins in all processes."""

Restart = Literal["never", "on_failure"]
"""Whether another engine is started in the place of one that died."""


@runtime_checkable
class _HasLoad(Protocol):
    """A client of several engines that records the load of each."""

    def load(self) -> LoadReport: ...


@runtime_checkable
class _Scalable(Protocol):
    """A client of a changing number of engines."""

    def scale(self, num_engines: int, drain_s: float) -> EngineSet: ...

    def retire(self, ranks: Sequence[int], drain_s: float) -> EngineSet: ...


@runtime_checkable
class _MayBeJoined(Protocol):
    """A client of engines that remote engines may join."""

    join_address: str | None


def with_restart(config: EngineConfig, restart: Restart) -> EngineConfig:
    """Return a configuration with another value of `engine.restart`."""
    engine = msgspec.structs.replace(config.engine, restart=restart)
    return msgspec.structs.replace(config, engine=engine)


def builder_of(
    config: EngineConfig, config_sources: ConfigSources
) -> tuple[EngineConfig, Callable[..., LLMEngine]]:
    """Return the configuration of an engine, or of several, and the function that builds it.

    An engine in this process needs no module for engines elsewhere.

    Raises:
        ConfigError: as `engines_of`.
    """
    if config.engine.in_process and not _is_several(config):
        open_inputs = None
        if config.engine.journal is not None:
            from hardpoint.journal import inputs_of  # noqa: PLC0415 - most engines record nothing

            open_inputs = inputs_of(config)
        return config, functools.partial(
            build_engine, open_inputs=open_inputs, start_worker=_start_worker
        )
    from hardpoint.process.build import build_process_engine  # noqa: PLC0415 - as above

    config, open_client = engines_of(config, config_sources)
    return config, functools.partial(build_process_engine, open_client=open_client)


def _start_worker(*arguments: Any) -> WorkerProcess:
    from hardpoint.process.worker_process import LaunchedWorker  # noqa: PLC0415 - few executors do

    return LaunchedWorker(*arguments)


def engines_of(
    config: EngineConfig, config_sources: ConfigSources
) -> tuple[EngineConfig, OpenRemoteClient]:
    """Return the configuration of engines in processes of their own, and their client's opener.

    With a journal, that starts engines which record.

    Raises:
        ConfigError: the engine is to run in this process, and there are several, or it is to be
            restarted.
    """
    from hardpoint.journal import with_journal  # noqa: PLC0415 - most programs have one engine
    from hardpoint.process.build import open_process_client  # noqa: PLC0415 - as above

    if not _is_several(config):
        return config, with_journal(open_process_client, config, config_sources)
    origin = config_sources.of("engine.in_process")
    if config.engine.in_process and origin != "default":
        num_engines = config.parallel.data
        why = "engine.restart" if num_engines == 1 else f"parallel.data = {num_engines}"
        why = "parallel.join_address" if _joins(config) else why
        why = "parallel.ray" if config.parallel.ray is not None else why
        raise ConfigError(
            f"engine.in_process: expected false, for {why} needs engines in processes of their "
            f"own, got true (from {origin})"
        )
    from hardpoint.replicas import (  # noqa: PLC0415 - as above
        check_joining,
        open_engines,
    )

    check_joining(config, config_sources)

    engine = msgspec.structs.replace(config.engine, in_process=False)
    config = msgspec.structs.replace(config, engine=engine)
    return config, with_journal(open_engines, config, config_sources)


def _is_several(config: EngineConfig) -> bool:
    return config.parallel.data > 1 or config.engine.restart != "never" or _joins(config)


def _joins(config: EngineConfig) -> bool:
    parallel = config.parallel
    joins = parallel.ray is not None or parallel.join_address is not None
    return joins or parallel.local is not None


class EngineHandle(SyncControlCalls):
    """One of the engines of an LLM (`parallel.data`): its control calls go to it alone.

    Attributes:
        rank: number of the engine, from 0; requests name it as `data_parallel_rank`.
    """

    def __init__(self, engine: LLMEngine, rank: int) -> None:
        self._engine = engine
        self.rank = rank

    @property
    def pid(self) -> int | None:
        """The id of the process that it runs in; None while it is restarted, or if it is dead."""
        return self._engine.pids.get(self.rank)

    def _call_utility(self, method: str, *args: Any) -> Any:
        return self._engine.call_utility(method, *args, rank=self.rank)


class AsyncEngineHandle(AsyncControlCalls):
    """One of the engines of an AsyncLLM (`parallel.data`), as EngineHandle."""

    def __init__(self, engine: AsyncEngine, rank: int) -> None:
        self._engine = engine
        self.rank = rank

    @property
    def pid(self) -> int | None:
        """The id of its process; None while it is restarted, or if it is dead."""
        return self._engine.pids.get(self.rank)

    async def _call_utility(self, method: str, *args: Any) -> Any:
        return await self._engine.call_utility(method, *args, rank=self.rank)


class EngineGroup(Sequence[EngineHandle], SyncCaller):
    """The engines of an LLM by rank (`parallel.data`): `llm.engines`.

    `llm.engines[1]` has the control calls of one engine; the calls here reach all of them.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        return len(self._engine.ranks)

    @overload
    def __getitem__(self, index: int) -> EngineHandle: ...
    @overload
    def __getitem__(self, index: slice) -> list[EngineHandle]: ...
    def __getitem__(self, index: int | slice) -> EngineHandle | list[EngineHandle]:
        """Return engines by their places, in order of rank."""
        return [EngineHandle(self._engine, rank) for rank in self._engine.ranks][index]

    def __iter__(self) -> Iterator[EngineHandle]:
        return iter(self[:])

    @property
    def join_address(self) -> str | None:
        """The address where engines of other machines join (`parallel.join_address`).

        It has the port that is used; None if no engine joins.
        """
        return _join_address_of(self._engine.parts.client)

    pause = ControlCalls.pause
    resume = ControlCalls.resume
    is_sleeping = ControlCalls.is_sleeping
    scheduler_stats = ControlCalls.scheduler_stats
    live_requests = ControlCalls.live_requests
    reset_encoder_cache = ControlCalls.reset_encoder_cache

    def is_paused(self) -> bool:
        """Return whether the engine is paused; also of an engine that is closed."""
        return self._engine.is_paused

    def get_num_unfinished_requests(self) -> int:
        """Return the number of live requests, each completion of a prompt counted."""
        return self._engine.get_num_unfinished_requests()

    def scale(self, num_engines: int, *, drain_seconds: float = 30.0) -> EngineSet:
        """Start or retire engines until there are `num_engines`, while requests go on.

        New ones have the lowest ranks that are free; those of the highest ranks go. Engines that
        share experts (`parallel.expert`) are all replaced by others, where their requests go on;
        until then both sets are in memory.

        Args:
            num_engines: 1 or more.
            drain_seconds: how long requests of engines that go may run on there; those that are
                left go on at other engines, with the same tokens. Without effect if all go.

        Returns:
            The engines, with the number of changes so far.

        Raises:
            RequestError: an argument is wrong.
            HardpointError: the engine was started alone, as without `parallel.data` or
                `engine.restart`; or another change is under way; or an engine cannot be started,
                or those that share experts do not pause: then nothing has changed.
        """
        return _scale(self._engine.parts.client, num_engines, drain_seconds)

    def retire(self, ranks: Sequence[int], *, drain_seconds: float = 30.0) -> EngineSet:
        """End engines by rank, as `scale` does.

        Raises:
            RequestError: a rank is not that of an engine, or no engine would be left; or, of
                engines that share experts, the ranks are not the highest ones.
            HardpointError: as `scale`.
        """
        return _retire(self._engine.parts.client, ranks, drain_seconds)

    def load(self) -> LoadReport:
        """Return the load of each engine, and the time that the waiting prompts will take.

        Several engines, or one that may be restarted, are not asked, nor disturbed: these are the
        client's own counts, and the last reports. An engine that was started alone is asked.
        """
        if (report := _report_of(self._engine.parts.client)) is not None:
            return report
        return _report_of_one(self.is_paused(), self.scheduler_stats(), self.live_requests())

    def settings(self) -> LiveSettings:
        """Return the settings, with the origin of each, and the generation of the plugins.

        Options may be secrets, which the admin address hides and this does not.
        """
        return self._engine.parts.settings.shown()

    def set_config(self, values: Mapping[str, Any], running: Running = "finish") -> Manifest:
        """Change settings while requests run: in all processes, or in none.

        Args:
            values: by dotted path, `{"scheduler.max_waiting": 100}` for example; the reference of
                the configuration lists which are live, and the others are rejected.
            running: as for `plugins.change`.

        Returns:
            The plugins, in a new generation. An engine that is restarted has the new settings.

        Raises:
            ConfigError, PluginError: a value is wrong, or needs a restart; names its path.
            BusyError: another change is under way.
            HardpointError: a process failed, or took longer than `plugins.change_seconds`. Nothing
                has changed.
        """
        return self._engine.change(_set_config(values, running))

    def release_session(self, session: str, *, cache_salt: str | None = None) -> Released:
        """Let the blocks that a session retains be evicted as others; return the outcome.

        Args:
            session: as in the requests of the conversation, `RequestOptions`.
            cache_salt: salt of these requests.

        Returns:
            "accepted", or "missing" if no session with this salt retains anything.

        Raises:
            RequestError: a field is wrong.
        """
        arguments = release_arguments(session, cache_salt)
        call = self._engine.call_utility
        released: Released = EngineUtilities.call_part.call(call, *RELEASE, arguments)
        return released

    def _call_utility(self, method: str, *args: Any) -> Any:
        return self._engine.call_utility(method, *args)


class AsyncEngineGroup(Sequence[AsyncEngineHandle], AsyncCaller):
    """The engines of an AsyncLLM by rank (`parallel.data`): `llm.engines`.

    `llm.engines[1]` has the control calls of one engine; the calls here reach all of them.
    """

    def __init__(self, engine: AsyncEngine, change: Change) -> None:
        self._engine, self._change = engine, change

    def __len__(self) -> int:
        return len(self._engine.ranks)

    @overload
    def __getitem__(self, index: int) -> AsyncEngineHandle: ...
    @overload
    def __getitem__(self, index: slice) -> list[AsyncEngineHandle]: ...
    def __getitem__(self, index: int | slice) -> AsyncEngineHandle | list[AsyncEngineHandle]:
        """Return engines by their places, in order of rank."""
        return [AsyncEngineHandle(self._engine, rank) for rank in self._engine.ranks][index]

    def __iter__(self) -> Iterator[AsyncEngineHandle]:
        return iter(self[:])

    @property
    def join_address(self) -> str | None:
        """The address where engines of other machines join, as of `LLM.engines`."""
        return _join_address_of(self._engine.parts.client)

    @property
    def pid(self) -> int:
        """The process id of the engine; another one after a restart."""
        return self._engine.engine_pid

    pause = ControlCalls.pause
    resume = ControlCalls.resume
    is_paused = ControlCalls.is_paused
    is_sleeping = ControlCalls.is_sleeping
    scheduler_stats = ControlCalls.scheduler_stats
    live_requests = ControlCalls.live_requests
    reset_encoder_cache = ControlCalls.reset_encoder_cache

    async def scale(self, num_engines: int, *, drain_seconds: float = 30.0) -> EngineSet:
        """Start or retire engines, as `LLM.engines.scale` does."""
        client = self._engine.parts.client
        return await asyncio.to_thread(_scale, client, num_engines, drain_seconds)

    async def retire(self, ranks: Sequence[int], *, drain_seconds: float = 30.0) -> EngineSet:
        """End engines by rank, as `LLM.engines.retire` does."""
        client = self._engine.parts.client
        return await asyncio.to_thread(_retire, client, ranks, drain_seconds)

    async def load(self) -> LoadReport:
        """Return the load of each engine, as `LLM.engines.load` does."""
        if (report := _report_of(self._engine.parts.client)) is not None:
            return report
        return _report_of_one(
            await self.is_paused(), await self.scheduler_stats(), await self.live_requests()
        )

    def settings(self) -> LiveSettings:
        """Return the settings, as `LLM.engines.settings` does."""
        return self._engine.parts.settings.shown()

    async def set_config(self, values: Mapping[str, Any], running: Running = "finish") -> Manifest:
        """Change settings while requests run, as `LLM.engines.set_config` does."""
        return await self._change(_set_config(values, running))

    async def release_session(self, session: str, *, cache_salt: str | None = None) -> Released:
        """Let the blocks of a session be evicted, as `LLM.engines.release_session` does."""
        arguments = release_arguments(session, cache_salt)
        call = self._engine.call_utility
        released: Released = await EngineUtilities.call_part.call_async(call, *RELEASE, arguments)
        return released

    async def _call_utility(self, method: str, *args: Any) -> Any:
        return await self._engine.call_utility(method, *args)


def _set_config(values: Mapping[str, Any], running: Running) -> ChangeRequest:
    return ChangeRequest.of("engines.set_config()", config=values, running=running)


def _join_address_of(client: EngineCoreClient) -> str | None:
    return client.join_address if isinstance(client, _MayBeJoined) else None


def _scale(client: EngineCoreClient, num_engines: int, drain_s: float) -> EngineSet:
    if isinstance(client, _Scalable):
        return client.scale(num_engines, drain_s)
    raise HardpointError(
        f"scale: expected 1, because the engine was started alone, got {num_engines}; with "
        'parallel.data > 1 or engine.restart = "on_failure", the number may change'
    )


def _retire(client: EngineCoreClient, ranks: Sequence[int], drain_s: float) -> EngineSet:
    if isinstance(client, _Scalable):
        return client.retire(ranks, drain_s)
    raise HardpointError("retire: there is one engine alone; close() ends it")


def _report_of(client: EngineCoreClient) -> LoadReport | None:
    """Return the load of the engines of a client; None of an engine that was started alone."""
    if not isinstance(client, _HasLoad):
        return None
    return client.load()


def _report_of_one(
    is_paused: bool, stats: SchedulerStats, live: Sequence[LiveRequest]
) -> LoadReport:
    """Return the load of an engine that was started alone, by its own answers."""
    waiting = sum(
        max(request.num_prompt_tokens - request.num_computed_tokens, 0)
        for request in live
        if not request.num_output_tokens
    )
    engine = EngineStatus(
        rank=0,
        state="paused" if is_paused else "serving",
        in_flight=len(live),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        waiting_prompt_tokens=waiting,
        kv_cache_usage=stats.kv_cache_usage,
    )
    return LoadReport.of([engine], None)
