"""The engines of LLM and AsyncLLM, one by one."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hardpoint.core.build import OpenClient, open_process_client
from hardpoint.core.engine.utility_calls import AsyncControlCalls, SyncControlCalls
from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.plugins import ConfigError, EngineConfig
from hardpoint.plugins.config import ConfigSources

__all__ = ["AsyncEngineHandle", "EngineHandle", "Restart", "engines_of", "with_restart"]

Restart = Literal["never", "on_failure"]
"""Whether another engine is started in the place of one that died."""


def with_restart(config: EngineConfig, restart: Restart) -> EngineConfig:
    """Return a configuration with another value of `engine.restart`."""
    engine = msgspec.structs.replace(config.engine, restart=restart)
    return msgspec.structs.replace(config, engine=engine)


def engines_of(
    config: EngineConfig, config_sources: ConfigSources
) -> tuple[EngineConfig, OpenClient]:
    """Return the configuration of an engine, or of several, and what opens their client.

    Raises:
        ConfigError: the engine is to run in this process, and there are several, or it is to be
            restarted.
    """
    num_engines = config.parallel.data
    if num_engines == 1 and config.engine.restart == "never":
        return config, open_process_client
    origin = config_sources.of("engine.in_process")
    if config.engine.in_process and origin != "default":
        why = "engine.restart" if num_engines == 1 else f"parallel.data = {num_engines}"
        raise ConfigError(
            f"engine.in_process: expected false, for {why} needs engines in processes of their "
            f"own, got true (from {origin})"
        )
    from hardpoint.replicas import open_engines  # noqa: PLC0415 - most programs have one engine

    engine = msgspec.structs.replace(config.engine, in_process=False)
    return msgspec.structs.replace(config, engine=engine), open_engines


class EngineHandle(SyncControlCalls):
    """One of the engines of an LLM (`parallel.data`): its control calls go to it alone.

    Attributes:
        rank: number of the engine, from 0; requests name it as `data_parallel_rank`.
    """

    def __init__(self, engine: LLMEngine, rank: int) -> None:
        """Stand for the engine of a rank."""
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
        """Stand for the engine of a rank."""
        self._engine = engine
        self.rank = rank

    @property
    def pid(self) -> int | None:
        """The id of its process; None while it is restarted, or if it is dead."""
        return self._engine.pids.get(self.rank)

    async def _call_utility(self, method: str, *args: Any) -> Any:
        return await self._engine.call_utility(method, *args, rank=self.rank)
