"""Answers lines of a batch file by the routes of a server that does not listen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from hardpoint.builtin_plugins.server.application import Application
from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.server import AsyncGenerator, Client

from .lines import BatchAnswer, BatchLine, answer_to

if TYPE_CHECKING:
    from starlette.responses import Response

_CLIENT = Client(name="batch file")
_LATER = (429, 503)
"""Statuses of requests that the server has no room for now."""


async def answer_lines(
    engine: AsyncGenerator,
    version: str,
    lines: Iterable[BatchLine],
    write: Callable[[BatchLine, BatchAnswer], None],
) -> None:
    """Answer all lines for a client without limits of keys.

    Args:
        lines: taken when the engine has room for one; taking it may block.
        write: gets each answer as soon as it is there.

    Raises:
        EngineDeadError: the engine ended; the rest has no answers.
        HardpointError: the configuration of the server is wrong.
    """
    app = assemble(engine, version, bound=None).users
    open_lines = _OpenLines(app, _window(engine.config), iter(lines), write)
    running = open_lines.running
    try:
        open_lines.fill()
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if engine.dead_error is not None:
                raise engine.dead_error
            open_lines.end(done)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _OpenLines:
    """The lines in progress, and the lines that found no room."""

    def __init__(
        self,
        app: Application,
        window: int,
        lines: Iterator[BatchLine],
        write: Callable[[BatchLine, BatchAnswer], None],
    ) -> None:
        self._app, self._window, self._lines, self._write = app, window, lines, write
        self._refused: deque[BatchLine] = deque()
        self._room = window
        self.running: dict[asyncio.Task[Response], BatchLine] = {}

    def fill(self) -> None:
        """Ask for the answers of more lines while there is room."""
        while len(self.running) < self._room:
            line = self._refused.popleft() if self._refused else next(self._lines, None)
            if line is None:
                return
            if line.problem is not None:
                self._write(line, answer_to(line))
                continue
            asking = asyncio.create_task(self._app.ask(_CLIENT, line.url, line.body))
            self.running[asking] = line

    def end(self, done: Iterable[asyncio.Task[Response]]) -> None:
        """Write answers; a line that was refused waits, unless there was nothing besides."""
        answers = [(self.running.pop(task), task.result()) for task in done]
        is_alone = not self.running and all(
            line_answer.status_code in _LATER for _, line_answer in answers
        )
        left = (
            []
            if is_alone
            else [line for line, line_answer in answers if line_answer.status_code in _LATER]
        )
        for line, answer in answers:
            if is_alone or answer.status_code not in _LATER:
                self._write(line, answer_to(line, answer))
        self._refused += left
        # A refusal shows how many requests there is room for; each end, that there is more.
        self._room = len(self.running) if left else self._room + len(answers)
        self._room = min(max(1, self._room), self._window)
        self.fill()


def _window(config: EngineConfig) -> int:
    limit = config.table(ServerConfig).limits.requests
    if config.scheduler.max_waiting is not None:
        limit = min(limit, config.scheduler.max_num_seqs + config.scheduler.max_waiting)
    return min(2 * config.scheduler.max_num_seqs, limit)
