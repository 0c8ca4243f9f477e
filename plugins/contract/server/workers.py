"""Worker processes of a command: several event loops in front of the same engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .generator import AsyncGenerator

__all__ = ["WorkerPlan"]


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """A function that worker processes run, and its inputs.

    Attributes:
        run: function that each calls with its `CommandWorker`, as `package.module:function`; it
            returns the exit code.
        num_workers: number of processes.
        files: descriptors of which each gets duplicates.
        data: plain data for each.
    """

    run: str
    num_workers: int
    files: Sequence[int] = ()
    data: Any = None


class CommandWorker(Protocol):
    """The engine and the inputs of a worker process."""

    @property
    def index(self) -> int:
        """Its number, from 0; a process that replaces it has the same."""

    @property
    def engine(self) -> AsyncGenerator:
        """The engines, which it shares with the other processes."""

    @property
    def version(self) -> str:
        """The version of Hardpoint."""

    @property
    def files(self) -> Sequence[int]:
        """Its duplicates of the plan's."""

    @property
    def data(self) -> Any:
        """The plan's."""

    async def announce_ready(self) -> None:
        """Notify the process that started it that it serves."""


Worker = CommandWorker
"""Name of `CommandWorker` in packages of authors."""


class WorkerGroup(Protocol):
    """The engines of several worker processes, and these, in the process that started both."""

    @property
    def engine(self) -> AsyncGenerator:
        """The engines."""

    async def start(self, plan: WorkerPlan) -> None:
        """Start the workers; return once all are ready.

        One that ends before it is asked to is replaced; its requests end, those of others go on.

        Raises:
            HardpointError: one could not start; all are ended.
        """

    def replaced(self) -> Sequence[int]:
        """Return the numbers of workers that were replaced since the last call."""

    def send_signal(self, number: int) -> None:
        """Send all workers a signal. One that ends after SIGTERM or SIGINT is not replaced."""

    async def wait(self) -> int:
        """Wait until all have ended; return the highest exit code, 0 or more.

        Workers that ended too often are not replaced; then the others get SIGTERM.
        """

    async def aclose(self) -> None:
        """End the workers that are left, and the engines."""
