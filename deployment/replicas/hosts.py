"""Where the engines of a client of several run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import msgspec

from hardpoint.process.child_processes.launch import Interpreter
from hardpoint.process.client.process_client import EngineStart
from hardpoint.process.engine_process import EngineHost, EngineProcess


def start_of(start: EngineStart, rank: int, num_sharing: int = 1) -> EngineStart:
    """Return the start parameters of the engine of a rank.

    Others of the same settings have the same `kv_connector.engine_id`, so each but that of rank 0
    gets `-RANK` appended to it.

    Args:
        start: those of the first engine.
        rank: number of the engine.
        num_sharing: as in EngineStart.
    """
    config = start.config
    if rank and config.kv_connector.engine_id is not None:
        own_id = f"{config.kv_connector.engine_id}-{rank}"
        connector = msgspec.structs.replace(config.kv_connector, engine_id=own_id)
        config = msgspec.structs.replace(config, kv_connector=connector)
    return dataclasses.replace(start, config=config, engine_index=rank, num_sharing=num_sharing)


class EngineHosts(Protocol):
    """Gives each engine a process."""

    @property
    def join_address(self) -> str | None:
        """The address where engines join; None if no engine does."""

    def open(self, rank: int, interpreter: Interpreter) -> EngineHost:
        """Return the host of an engine that is started now, which waits for its launch.

        Args:
            rank: number of the engine.
            interpreter: the one that processes of this machine are started with.

        Raises:
            HardpointError: there is none.
        """

    def on_leave(self, leave: Callable[[int], None]) -> None:
        """Call a function, which returns at once, with the rank of each engine that is to go."""

    def close(self) -> None:
        """Release its resources, after all engines have ended."""


class LocalHosts:
    """Runs each engine in a process of this machine."""

    join_address: str | None = None

    def __init__(self, first: EngineProcess | None = None) -> None:
        self._first = first

    def open(self, rank: int, interpreter: Interpreter) -> EngineHost:  # noqa: ARG002
        """Return the process that was spawned before, else spawn one."""
        process, self._first = self._first, None
        return process or EngineProcess.spawn(interpreter)

    def on_leave(self, leave: Callable[[int], None]) -> None:
        """Do nothing: processes of this machine are ended here."""

    def close(self) -> None:
        """End a process that no engine has got."""
        process, self._first = self._first, None
        if process is not None:
            process.close(grace_s=0)
