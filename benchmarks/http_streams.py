"""A client of OpenAI's streaming API, and a server in a process of its own; for other benchmarks.

To measure a server, use guidellm or `vllm bench serve` (docs/benchmarks.md).
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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx

T = TypeVar("T")
_ANNOUNCED = re.compile(r"^Serving .* at (http\S+)$", re.MULTILINE)
_READY_S, _STOP_S, _POLL_S = 1800.0, 30.0, 0.05
_MESSAGE_TERMS = 12


@dataclass
class Timeline:
    """The times of a streamed answer, by `time.perf_counter`, and its end.

    Attributes:
        sent: when the request was to be sent.
        written: when it was written, after waiting for a connection; 0.0 if it was not.
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
    written: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    chunks: int = 0
    output_tokens: int | None = None
    text: str = ""
    error: str = ""

    def add(self, text: str) -> None:
        """Add a chunk with text, which came now."""
        now = time.perf_counter()
        if self.chunks:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now
        self.chunks += 1
        self.text += text


class Client:
    """Sends requests to a server over connections that stay open."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        """Make one for `http://HOST:PORT` or the path of a Unix socket."""
        is_url = "://" in address
        self.url = address if is_url else "http://localhost"
        self.headers = dict(headers or {})
        transport = httpx.AsyncHTTPTransport(
            verify=False,
            uds=None if is_url else address,
            limits=httpx.Limits(max_connections=None),
        )
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=self.headers, transport=transport, timeout=None
        )

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Return status and body of an answer."""
        answer = await self._http.request(method, path, json=body)
        return answer.status_code, answer.text

    async def send(
        self, path: str, body: Any, timeout: float, *, on_text: Callable[[], None] = lambda: None
    ) -> Timeline:
        """Send a request and read its stream to the end; an error is in the timeline.

        Args:
            path: path of the route.
            body: JSON body of the request.
            timeout: seconds that the answer may take.
            on_text: called at each chunk with text.
        """
        timeline = Timeline(sent=time.perf_counter())

        async def trace(event: str, _: Any) -> None:
            if event.endswith("send_request_headers.started"):
                timeline.written = time.perf_counter()

        try:
            async with (
                asyncio.timeout(timeout),
                self._http.stream("POST", path, json=body, extensions={"trace": trace}) as answer,
            ):
                await _read_stream(answer, timeline, on_text)
        except TimeoutError:
            timeline.error = f"timeout after {timeout:g} s"
        except httpx.TransportError as error:
            timeline.error = f"connection: {type(error).__name__}"
        timeline.ended = time.perf_counter()
        return timeline

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def _read_stream(
    answer: httpx.Response, timeline: Timeline, on_text: Callable[[], None]
) -> None:
    """Write the course of an answer into a timeline."""
    if answer.status_code != 200:
        timeline.error = f"{answer.status_code} {message_of(await answer.aread())}"
        return
    ends: set[str] = set()
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            ends.update(_read_event(line[5:].strip(), timeline, on_text))
    if not timeline.error and ends != {"finish_reason", "[DONE]"}:
        timeline.error = "stream: ended without a finish_reason and [DONE]"


def _read_event(payload: str, timeline: Timeline, on_text: Callable[[], None]) -> Iterator[str]:
    """Write an event into a timeline; yield the ends that it has: a finish_reason, or [DONE]."""
    if payload == "[DONE]":
        yield "[DONE]"
        return
    chunk = json.loads(payload)
    if chunk.get("error") is not None:
        timeline.error = f"stream: {message_of(payload.encode())}"
    elif chunk.get("usage"):
        timeline.output_tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") is not None:
            yield "finish_reason"
        if text := choice.get("text") or (choice.get("delta") or {}).get("content"):
            timeline.add(text)
            on_text()


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
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


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
