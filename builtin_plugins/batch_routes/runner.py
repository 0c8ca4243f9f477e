"""Answers batches, in one process of a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from hardpoint.plugins.server import ServerContext

from .batch_run import BatchRun, Slots
from .folder import BatchPlace, Folder
from .options import BatchOptions

_log = logging.getLogger("hardpoint")

_POLL_SECONDS = 1.0
_SWEEP_SECONDS = 60.0


class Runner:
    """Answers the batches of a folder, all at once, in turn.

    What is answered is in the folder before it counts, so that a batch goes on after a restart of
    the server, in this process or in another one of its workers.
    """

    def __init__(self, server: ServerContext, folder: Folder, options: BatchOptions) -> None:
        """Answer nothing yet."""
        self._server, self._folder, self._options = server, folder, options
        self._woken = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._swept_at = 0.0

    def wake(self) -> None:
        """Look for a change in the folder now."""
        self._woken.set()

    async def run(self) -> None:
        """Answer batches whenever no other process does."""
        while True:
            with self._folder.locked() as is_mine:
                if is_mine:
                    await self._answer()
            await asyncio.sleep(_POLL_SECONDS)

    async def _answer(self) -> None:
        slots = Slots(self._server.engine, self._options.concurrency)
        try:
            while True:
                await self._sweep()
                self._woken.clear()
                for place in await asyncio.to_thread(self._folder.open_batches):
                    if place.id not in self._running:
                        run = BatchRun(self._server, place, self._options, slots)
                        self._running[place.id] = asyncio.create_task(self._run(run, place))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._woken.wait()
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, run: BatchRun, place: BatchPlace) -> None:
        """Run a batch to its end; one that cannot be is left as it is, until the next start."""
        try:
            await run.run()
        except Exception:
            _log.exception("batch %s stops until the server is restarted", place.id)
            return
        del self._running[place.id]

    async def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._swept_at + _SWEEP_SECONDS or not self._swept_at:
            self._swept_at = now
            await asyncio.to_thread(self._folder.forget_old, self._options.seconds)
