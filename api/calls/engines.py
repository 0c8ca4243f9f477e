"""The engines of LLM and AsyncLLM, one by one."""

from __future__ import annotations

from typing import Any, Literal

from hardpoint.core.engine.utility_calls import AsyncControlCalls, SyncControlCalls
from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.core.frontend.llm_engine import LLMEngine

__all__ = ["AsyncEngineHandle", "EngineHandle", "Restart"]

Restart = Literal["never", "on_failure"]
"""Whether another engine is started in the place of one that died."""


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
