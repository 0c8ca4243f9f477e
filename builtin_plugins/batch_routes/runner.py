"""Answers batches, in one process of a server: each from its lines to its files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from hardpoint.builtin_plugins.server.batches.lines import (
    BatchAnswer,
    BatchLine,
    BatchReader,
    LineError,
    answer_to,
    refusal_code,
)
from hardpoint.builtin_plugins.server.batches.text_lines import line_of, next_line, texts
from hardpoint.plugins import HardpointError, RequestError
from hardpoint.plugins.server import AsyncGenerator, Client, LoadReport, ServerContext

from .answer_files import append, appending, ids_of
from .folder import RECORD_BYTES, BatchFolder, BatchPlace
from .options import BatchRoutesOptions
from .records import BatchErrors, FileObject, RequestCounts, Status, now
from .threads import in_thread

if TYPE_CHECKING:
    from starlette.responses import Response

_log = logging.getLogger("hardpoint")

_POLL_SECONDS = 1.0
_SWEEP_SECONDS = 60.0
_RETRY_SECONDS = 30.0
_CHECK_SECONDS = 0.5
_KEPT_SECONDS = 1.0
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0
_FULL_SECONDS = 0.05
_MAX_REFUSALS = 3
_RESERVED_BYTES = 1 << 16
_MOST_ERRORS = 100
_OK = 200
_LATER = (0, 429, 503)
"""Statuses of requests that the server has no room for now; 0 is an answer that was cut."""
_REASONS = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, because its batch was cancelled.",
}


class Slots:
    """Capacity for the requests of all batches, after the requests of users."""

    def __init__(self, engine: AsyncGenerator, number: int) -> None:
        self._engine, self._slots = engine, asyncio.Semaphore(number)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a slot, once no request waits in the engine."""
        async with self._slots:
            while not await self._has_room():
                await asyncio.sleep(_FULL_SECONDS)
            yield

    async def _has_room(self) -> bool:
        load = await _load_of(self._engine)
        return load is not None and load.num_waiting == 0


def _is_overload(answer: Response) -> bool:
    return answer.status_code in _LATER and refusal_code(answer) == "overloaded"


async def _is_idle(engine: AsyncGenerator) -> bool:
    load = await _load_of(engine)
    return load is not None and load.num_running == load.num_waiting == 0


async def _load_of(engine: AsyncGenerator) -> LoadReport | None:
    """Return the load of an engine; None while it is being restarted."""
    try:
        return await engine.engines.load()
    except HardpointError:
        return None


class BatchRun:
    """Takes a batch on from where it is."""

    def __init__(
        self,
        server: ServerContext,
        place: BatchPlace,
        options: BatchRoutesOptions,
        slots: Slots,
    ) -> None:
        self._server, self._place, self._options, self._slots = server, place, options, slots
        self._record = place.read()
        self._kept_at = 0.0
        self._room = 0  # reserved bytes that no answer has yet
        self._is_full = False
        self._number = 1  # of the line that was read last
        self._keeping, self._writing = asyncio.Lock(), asyncio.Lock()

    async def run(self) -> None:
        """Run it to its end.

        Raises:
            OSError: the folder cannot be read or written.
        """
        batch = self._record.batch
        if batch.status in ("validating", "cancelling") and batch.in_progress_at is None:
            await self._validate()
        if batch.status in ("in_progress", "cancelling"):
            await self._answer_all()
        if batch.status == "finalizing":
            await in_thread(self._finish)
        await in_thread(self._place.close)

    async def _validate(self) -> None:
        """Check all lines before the first one is answered."""
        batch = self._record.batch
        total, problems = await asyncio.to_thread(self._checked)
        if problems:
            batch.errors, batch.failed_at = BatchErrors(problems), now()
            await self._move("failed")
        else:
            batch.request_counts = RequestCounts(total=total)
            batch.in_progress_at = now()
            await self._move("in_progress")

    def _checked(self) -> tuple[int, list[LineError]]:
        problems: list[LineError] = []
        total = 0
        try:
            for line in self._lines():
                total += 1
                if (problem := self._problem(line, total)) is not None:
                    problems.append(problem)
                if len(problems) == _MOST_ERRORS or total > self._options.requests:
                    break
        except RequestError as wrong:  # of the file as a whole
            problems.append(LineError("invalid_file", str(wrong), None, self._number))
        except Exception as error:  # which would come again after each restart
            _log.exception("batch %s fails, because its lines cannot be read", self._place.id)
            message = f"{self._name}: the lines after {total} requests cannot be read: "
            message += f"{type(error).__name__}: {error}"
            problems.append(LineError("server_error", message, None, self._number))
        if not total and not problems:
            message = f"{self._name}: expected a request per line, got none"
            problems.append(LineError("empty_file", message, None, 1))
        return total, problems

    def _problem(self, line: BatchLine, number: int) -> LineError | None:
        if line.problem is not None:
            return line.problem
        endpoint, where = self._record.batch.endpoint, f"{self._name}:{line.line}"
        if line.url != endpoint:
            message = f"{where}: url: expected {endpoint!r}, the endpoint of the batch, got "
            return LineError("mismatched_url", f"{message}{line.url!r}", "url", line.line)
        if number > (limit := self._options.requests):
            message = f"{where}: expected at most {limit} requests in a batch"
            return LineError("too_many_requests", message, None, line.line)
        return None

    @property
    def _name(self) -> str:
        return self._record.batch.input_file_id

    def _lines(self) -> Iterator[BatchLine]:
        reader = BatchReader(self._name, self._server.engine.config.model)
        with self._place.path("in").open("rb") as file:

            def next_of(number: int) -> bytes:
                self._number = number
                return next_line(file, self._name, number)

            for number, text in texts(next_of, self._name):
                yield reader.read(number, text)

    async def _answer_all(self) -> None:
        out, err = self._place.path("out"), self._place.path("err")
        done = await asyncio.to_thread(ids_of, out, err)
        counts = self._record.batch.request_counts
        counts.completed, counts.failed = (len(ids) for ids in done)
        with appending(out) as answers, appending(err) as errors:
            outcome = await self._answered(done[0] | done[1], answers, errors)
        batch = self._record.batch
        if outcome == "cancelled":
            batch.cancelling_at = self._place.read().batch.cancelling_at or now()
        self._record.outcome, batch.finalizing_at = outcome, now()
        await self._move("finalizing")

    async def _answered(self, done: set[str], answers: BinaryIO, errors: BinaryIO) -> Status:
        """Answer lines; return how the batch ends.

        Args:
            done: ids of those that have an answer, to which others are added.
            answers, errors: get the lines of both files.
        """
        client = _client_of_batch(self._record.client, self._options.priority)
        lines = (line for line in self._lines() if line.id not in done)
        turn = asyncio.Lock()

        async def taken() -> BatchLine | None:
            """Take a line in a thread; skip answered lines."""
            async with turn:
                return await asyncio.to_thread(next, lines, None)

        async def answer_some() -> None:
            while not self._is_full and (line := await taken()) is not None:
                async with self._slots.one():
                    answer = await self._answer(client, line)
                if not self._is_full and await self._keep(answer, answers, errors):
                    done.add(line.id or "")
                    await self._keep_counts()

        workers = [asyncio.create_task(answer_some()) for _ in range(self._options.concurrency)]
        try:
            outcome = await self._until_end(workers)
        finally:
            await _end(workers)
        for error in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(error, Exception):
                raise error
        if self._is_full:
            return "failed"
        if outcome != "completed":
            await in_thread(self._give_up, outcome, done, answers, errors)
        return outcome

    def _give_up(
        self, outcome: Status, done: set[str], answers: BinaryIO, errors: BinaryIO
    ) -> None:
        for line in self._lines():
            if line.id not in done:
                problem = LineError(f"batch_{outcome}", _REASONS[outcome], None, line.line)
                answer = answer_to(line, problem=problem)
                text = line_of(answer)
                self._reserve(len(text))
                if not self._append(answer, text, answers, errors):
                    return

    async def _until_end(self, workers: list[asyncio.Task[None]]) -> Status:
        while True:
            if self._place.is_cancelled:
                return "cancelled"
            if now() >= self._record.batch.expires_at:
                return "expired"
            _, pending = await asyncio.wait(
                workers, timeout=_CHECK_SECONDS, return_when=asyncio.ALL_COMPLETED
            )
            if not pending:
                return "completed"

    async def _answer(self, client: Client, line: BatchLine) -> BatchAnswer:
        """Return the answer to a line; wait while the server has no room for it.

        What an engine without other requests refuses again and again is larger than its queue.
        """
        wait, refusals = _FIRST_WAIT, 0
        while True:
            answer = await self._server.ask(client, line.url, line.body)
            is_alone = _is_overload(answer) and await _is_idle(self._server.engine)
            refusals = refusals + 1 if is_alone else 0
            if answer.status_code not in _LATER or refusals == _MAX_REFUSALS:
                return answer_to(line, answer)
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _keep(self, answer: BatchAnswer, answers: BinaryIO, errors: BinaryIO) -> bool:
        async with self._keeping:
            line = line_of(answer)
            if len(line) > self._room:  # else no thread is needed
                await in_thread(self._reserve, len(line))
            return self._append(answer, line, answers, errors)

    def _append(
        self, answer: BatchAnswer, line: bytes, answers: BinaryIO, errors: BinaryIO
    ) -> bool:
        is_ok = answer.response is not None and answer.response.status_code == _OK
        counts = self._record.batch.request_counts
        if len(line) > self._room:
            self._is_full = True
            return False
        self._room -= len(line)
        append(answers if is_ok else errors, line)
        counts.completed += is_ok
        counts.failed += not is_ok
        return True

    def _reserve(self, size: int) -> None:
        """Reserve room for an answer, and for some after it unless little is left.

        Files and other batches of the key have the rest. No answer of this batch may be written
        during this call.
        """
        if size <= self._room:
            return
        with self._place.owner.reserving() as used:
            others = used - self._place.reserved_bytes
            free = max(0, self._options.owner_bytes - RECORD_BYTES - others)
            self._room = min(free, max(size, min(_RESERVED_BYTES, free // 4)))
            self._place.reserve(self._room + RECORD_BYTES)

    async def _keep_counts(self) -> None:
        """Show how far it is, now and then; no worker waits for the write of another one."""
        at = time.monotonic()
        if at >= self._kept_at + _KEPT_SECONDS and not self._writing.locked():
            self._kept_at = at
            await self._write()

    async def _move(self, status: Status) -> None:
        self._record.batch.status = status
        await self._write()

    async def _write(self) -> None:
        async with self._writing:
            await in_thread(self._place.write, self._record)

    def _finish(self) -> None:
        batch, outcome = self._record.batch, self._record.outcome
        batch.output_file_id = self._made_file("out", "output")
        batch.error_file_id = self._made_file("err", "error")
        if outcome == "failed":
            message = (
                f"input_file_id: expected at most {self._options.owner_bytes} bytes in all files "
                "and batches of a key, and the answers need more; delete some"
            )
            done = batch.request_counts.completed + batch.request_counts.failed
            batch.errors = BatchErrors([LineError("no_room", message, None, done + 1)])
        batch.status = outcome
        setattr(batch, f"{outcome}_at", now())
        self._place.write(self._record)

    def _made_file(self, suffix: str, kind: str) -> str | None:
        batch, owner, path = self._record.batch, self._place.owner, self._place.path(suffix)
        hashed = hashlib.sha256(f"{batch.id}/{kind}".encode()).hexdigest()[:32]
        name = f"file-{hashed}"
        if path.exists() and (size := path.stat().st_size):
            created = now()
            made = FileObject(
                id=name,
                bytes=size,
                created_at=created,
                expires_at=created + int(self._record.output_seconds),
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
            )
            with owner.reserving():
                owner.take_file(made, time.time_ns(), path)
        return name if owner.file(name) is not None else None


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended, because an extension may lose a cancellation."""
    pending = {*tasks}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CHECK_SECONDS)


class BatchRunner:
    """Answers the batches of a folder, all at once, in turn.

    What is answered is in the folder before it counts, so that a batch goes on after a restart of
    the server, in this process or in another one of its workers.
    """

    def __init__(
        self, server: ServerContext, folder: BatchFolder, options: BatchRoutesOptions
    ) -> None:
        self._server, self._folder, self._options = server, folder, options
        self._woken = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._swept_at = 0.0
        self._has_failed = False

    def wake(self) -> None:
        """Look for a change in the folder now."""
        self._woken.set()

    async def run(self) -> None:
        """Answer batches whenever no other process does."""
        while True:
            with self._tried(), self._folder.locked() as is_mine:
                if is_mine:
                    await self._answer()
            await asyncio.sleep(_POLL_SECONDS)

    async def _answer(self) -> None:
        slots = Slots(self._server.engine, self._options.concurrency)
        try:
            while True:
                self._woken.clear()
                with self._tried():
                    await self._sweep()
                    known = tuple(self._running)
                    for place in await asyncio.to_thread(self._folder.open_batches, known):
                        self._running[place.id] = asyncio.create_task(self._run(place, slots))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._woken.wait()
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """Log an error of the body, which is tried again; once, until it has none."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                _log.exception("batches: the folder cannot be used now, and is tried again")
            self._has_failed = True
        else:
            self._has_failed = False

    async def _run(self, place: BatchPlace, slots: Slots) -> None:
        """Run a batch to its end; retry a failed batch later, because causes may pass."""
        try:
            options = self._options
            run = await asyncio.to_thread(BatchRun, self._server, place, options, slots)
            await run.run()
        except Exception:
            _log.exception("batch %s stops, and goes on in %g s", place.id, _RETRY_SECONDS)
            await asyncio.sleep(_RETRY_SECONDS)
        del self._running[place.id]

    async def _sweep(self) -> None:
        at = time.monotonic()
        if at >= self._swept_at + _SWEEP_SECONDS or not self._swept_at:
            self._swept_at = at
            await asyncio.to_thread(self._folder.forget_old, self._options.seconds)


def _client_of_batch(client: Client, priority: int) -> Client:
    """Return the client with a priority that is at most the priority of batches."""
    lowest = max(min(priority, client.max_priority), client.min_priority)
    return msgspec.structs.replace(client, min_priority=lowest)
