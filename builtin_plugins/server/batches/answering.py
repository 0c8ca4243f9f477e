"""Answers lines of a batch file by the routes of a server that does not listen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from hardpoint.builtin_plugins.server.application import Application
from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.service import ENGINE_RESTARTING
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.server import AsyncGenerator, Client
from hardpoint.toolkit.requests.item_reader import ItemReader

from .lines import BatchAnswer, BatchLine, answer_to, refusal_code

if TYPE_CHECKING:
    from starlette.responses import Response

_CLIENT = Client(name="batch file")
_LATER = (429, 503)
"""Statuses of requests that the server has no room for now."""
_RETRY_SECONDS = 0.5
"""Pause before requests are sent again to an engine that has ended."""


async def answer_lines(
    engine: AsyncGenerator,
    version: str,
    lines: Iterable[BatchLine],
    write: Callable[[BatchLine, BatchAnswer], None],
) -> None:
    """Answer all lines for a client without limits of keys.

    Args:
        lines: taken in a thread when the engine has room for one; taking it may block.
        write: gets each answer as soon as it is there.

    Raises:
        EngineDeadError: the engine ended; the rest has no answers.
        HardpointError: the configuration of the server is wrong.
    """
    app = assemble(engine, version, bound=None).users
    reader = ItemReader(lines)
    open_lines = _OpenLines(app, _window(engine.config), reader, write)
    try:
        open_lines.fill()
        while awaited := open_lines.awaited():
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if engine.dead_error is not None:
                raise engine.dead_error
            open_lines.end(done)
    finally:
        reader.close()
        awaited = open_lines.awaited()
        for future in awaited:
            future.cancel()
        await asyncio.gather(*awaited, return_exceptions=True)


class _OpenLines:
    """The lines in progress, the line that is being read, and lines that wait for room."""

    def __init__(
        self,
        app: Application,
        window: int,
        reader: ItemReader[BatchLine],
        write: Callable[[BatchLine, BatchAnswer], None],
    ) -> None:
        self._app, self._window, self._reader, self._write = app, window, reader, write
        self._waiting: deque[BatchLine] = deque()
        self._room = window
        self._running: dict[asyncio.Future[Response], BatchLine] = {}
        self._read: asyncio.Future[BatchLine | None] | None = None
        self._is_at_end = self._is_engine_down = False

    def awaited(self) -> list[asyncio.Future[Any]]:
        """Return the futures of the answers, and of the line that is being read."""
        return [*self._running, *([] if self._read is None else [self._read])]

    def fill(self) -> None:
        """Ask for the answers of more lines, or for a line, while there is room."""
        while len(self._running) < self._room and self._waiting:
            line = self._waiting.popleft()
            self._running[asyncio.create_task(self._ask(line))] = line
        has_room = len(self._running) < self._room
        if has_room and self._read is None and not self._is_at_end:
            self._read = asyncio.wrap_future(self._reader.ask())

    async def _ask(self, line: BatchLine) -> Response:
        if self._is_engine_down:
            await asyncio.sleep(_RETRY_SECONDS)
        return await self._app.ask(_CLIENT, line.url, line.body)

    def end(self, done: Collection[asyncio.Future[Any]]) -> None:
        """Write answers and take the line that was read, then go on."""
        if self._read is not None and self._read in done:
            self._process_line(self._read.result())
        self._end_answers([task for task in done if task in self._running])
        self.fill()

    def _process_line(self, line: BatchLine | None) -> None:
        self._read = None
        if line is None:
            self._is_at_end = True
        elif line.problem is not None:
            self._write(line, answer_to(line))
        else:
            self._waiting.append(line)

    def _end_answers(self, done: Iterable[asyncio.Future[Response]]) -> None:
        """Write answers, and keep refused lines for another attempt.

        If nothing else runs, a refusal is the answer: there would be no more room later. Requests
        may notice that the engine has ended before that is known; then all refused lines wait,
        until it is known.
        """
        answers = [(self._running.pop(task), task.result()) for task in done]
        refused = [(line, answer) for line, answer in answers if answer.status_code in _LATER]
        codes = {refusal_code(answer) for _, answer in refused}
        self._is_engine_down = ENGINE_RESTARTING in codes
        is_alone = not (self._running or self._is_engine_down) and len(refused) == len(answers)
        left = [] if is_alone else [line for line, _ in refused]
        for line, answer in answers:
            if is_alone or answer.status_code not in _LATER:
                self._write(line, answer_to(line, answer))
        self._waiting += left
        # A refusal shows how many requests there is room for; each end, that there is more.
        self._room = len(self._running) if left else self._room + len(answers)
        self._room = min(max(1, self._room), self._window)


def _window(config: EngineConfig) -> int:
    limit = config.table(ServerConfig).limits.requests
    if config.scheduler.max_waiting is not None:
        limit = min(limit, config.scheduler.max_num_seqs + config.scheduler.max_waiting)
    return min(2 * config.scheduler.max_num_seqs, limit)
