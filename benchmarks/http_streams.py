"""A client of OpenAI's streaming API, and a server in a process of its own; for other benchmarks.

The client keeps its connections, measures times, and can leave an answer at any byte, which the
soaks need. To measure a server, use guidellm or `vllm bench serve` (docs/bench.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_ANNOUNCED = re.compile(r"^Serving .* at (http\S+)$", re.MULTILINE)
_READY_S, _STOP_S, _POLL_S = 1800.0, 30.0, 0.05
_MESSAGE_TERMS = 12


@dataclass
class Timeline:
    """The times of a streamed answer, by `time.perf_counter`, and its end.

    Attributes:
        sent: when the request was sent.
        first, last: when the first text came, or 0.0, and the last.
        ended: when the answer ended, or the error came.
        gaps: seconds between two chunks with text.
        chunks: number of chunks with text.
        output_tokens: as the server counted them, or None.
        text: text of the answer.
        error: "" for a whole answer; otherwise such as "429 too many", "connection: ...",
            "stream: ..." or "timeout after 5 s".
    """

    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    chunks: int = 0
    output_tokens: int | None = None
    text: str = ""
    error: str = ""


class Client:
    """Sends requests to a server over connections that stay open."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        """Make one for `http://HOST:PORT` or the path of a Unix socket."""
        self._uds = "" if "://" in address else address
        parts = urlsplit(address if not self._uds else "http://localhost")
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._headers = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            **(headers or {}),
        }
        self._idle: list[Connection] = []

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the bytes of a request with a JSON body."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in self._headers.items())]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        return head.encode() + content

    async def connect(self) -> Connection:
        """Return a new connection."""
        if self._uds:
            return await asyncio.open_unix_connection(self._uds)
        return await asyncio.open_connection(self._host, self._port)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer.

        Raises:
            OSError, EOFError: the connection ended before the answer did.
        """
        async with self._connection() as connection:
            connection[1].write(request)
            status, headers = await _head(connection[0])
            return status, b"".join([data async for data in _body(connection, headers)])

    async def send(
        self, path: str, body: Any, timeout: float, *, on_text: Callable[[], None] | None = None
    ) -> Timeline:
        """Send a request and read its stream to the end; an error is in the timeline.

        Args:
            path: path of the route.
            body: JSON body of the request.
            timeout: seconds that the answer may take.
            on_text: called at each chunk with text.
        """
        timeline = Timeline(sent=time.perf_counter())
        request = self.request("POST", path, body)
        try:
            async with asyncio.timeout(timeout), self._connection() as connection:
                await read_stream(connection, request, timeline, on_text)
        except TimeoutError:
            timeline.error = f"timeout after {timeout:g} s"
        except (OSError, EOFError) as error:
            timeline.error = f"connection: {type(error).__name__}"
        timeline.ended = time.perf_counter()
        return timeline

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Lend a connection; it is kept if the answer was read to its end."""
        while self._idle and self._idle[-1][0].at_eof():
            self._idle.pop()[1].close()
        connection = self._idle.pop() if self._idle else await self.connect()
        is_whole = False
        try:
            yield connection
            is_whole = True
        finally:
            reader, writer = connection
            if is_whole and not (reader.at_eof() or writer.is_closing()):
                self._idle.append(connection)
            else:
                writer.close()

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop()[1].close()


async def read_stream(
    connection: Connection,
    request: bytes,
    timeline: Timeline,
    on_text: Callable[[], None] | None = None,
) -> None:
    """Send a request and write the course of its answer into a timeline.

    Raises:
        OSError, EOFError: the connection ended before the answer did.
    """
    reader, writer = connection
    writer.write(request)
    status, headers = await _head(reader)
    if status != 200:
        content = b"".join([data async for data in _body(connection, headers)])
        timeline.error = f"{status} {message_of(content)}"
        return
    ends: set[str] = set()
    async for line in _lines(_body(connection, headers)):
        if line.startswith(b"data:"):
            ends.update(_read_event(line[5:].strip(), timeline, on_text))
    if not timeline.error and ends != {"finish_reason", "[DONE]"}:
        timeline.error = "stream: ended without a finish_reason and [DONE]"


def _read_event(
    payload: bytes, timeline: Timeline, on_text: Callable[[], None] | None
) -> Iterator[str]:
    """Write an event into a timeline; yield the ends that it has: a finish_reason, or [DONE]."""
    if payload == b"[DONE]":
        yield "[DONE]"
        return
    chunk = json.loads(payload)
    if chunk.get("error") is not None:
        timeline.error = f"stream: {message_of(payload)}"
    elif chunk.get("usage"):
        timeline.output_tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") is not None:
            yield "finish_reason"
        if text := choice.get("text") or (choice.get("delta") or {}).get("content"):
            _add_text(timeline, text)
            if on_text is not None:
                on_text()


def _add_text(timeline: Timeline, text: str) -> None:
    now = time.perf_counter()
    if timeline.chunks:
        timeline.gaps.append(now - timeline.last)
    else:
        timeline.first = now
    timeline.last = now
    timeline.chunks += 1
    timeline.text += text


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return status and headers, whose names are lower case."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(connection: Connection, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the parts of a body; close the connection after it if the server asks for that."""
    reader, writer = connection
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(1 << 16):
            yield data
    if headers.get("connection") == "close":
        writer.close()


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def message_of(body: bytes) -> str:
    """Return the first terms of the message of an error's body."""
    try:
        value = json.loads(body)
    except ValueError:
        value = body.decode("utf-8", "replace")
    if isinstance(value, dict):
        value = value.get("error", value)
    if isinstance(value, dict):
        value = value.get("message") or value
    terms = str(value).split()
    return " ".join(terms[:_MESSAGE_TERMS]) + ("..." if len(terms) > _MESSAGE_TERMS else "")


def run_on_uvloop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop's event loop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def allow_descriptors(count: int) -> None:
    """Raise the limit of open files to a number, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class RunningServer(NamedTuple):
    """The address and the process id of a server."""

    url: str
    pid: int


@contextlib.contextmanager
def running_server(
    model: str, settings: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> Iterator[RunningServer]:
    """Run `hardpoint serve` for the body, which begins when the server is ready.

    Raises:
        SystemExit: the server ended, or is not ready in time; with its log.
    """
    command = [sys.executable, "-m", "hardpoint", "serve", "--port=0", f"--model={model}"]
    command += [f"--set={setting}" for setting in ("server.access_log=off", *settings)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=dict(environment), start_new_session=True
        )
        try:
            deadline = time.monotonic() + _READY_S
            while not (announced := _ANNOUNCED.search(_read(log))):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start: {_read(log)}")
                time.sleep(_POLL_S)
            yield RunningServer(announced[1], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read(log: Any) -> str:
    log.seek(0)
    return str(log.read())
