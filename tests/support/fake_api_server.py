"""A small server of OpenAI's streams with known times and faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """How a request is answered.

    Attributes:
        first: seconds before the first text.
        gap: seconds between two chunks.
        chunks: number of chunks with text.
        tokens: number of tokens in each chunk, for the usage.
        status, body, headers: head and body of an answer that is no stream.
        cut: chunks after which the connection is closed.
        close: whether the connection is closed after the answer, which announces it.
        cached: tokens of the prompt that a cache had, for the usage; None leaves them out.
        usage, marker, finish: whether these come.
        fault: message of an error event after the chunks.
        framing: "chunked", "length" (one body), or "close" (until the end of the connection).
        newline: line ending of events.
        pieces: bytes of each write; 0 is whole events.
    """

    first: float = 0.0
    gap: float = 0.0
    chunks: int = 4
    tokens: int = 1
    status: int = 200
    body: str = ""
    headers: tuple[str, ...] = ()
    cut: int | None = None
    close: bool = False
    cached: int | None = None
    usage: bool = True
    marker: bool = True
    finish: bool = True
    fault: str = ""
    framing: str = "chunked"
    newline: str = "\n"
    pieces: int = 0


@dataclass
class FakeServer:
    """A server in a thread.

    Attributes:
        choose: number and body of a request to its answer.
        counts_tokens: whether there is /tokenize: a token for each four letters, with a space.
        metrics: the text of /metrics.
        running: number of completions that are being answered.
        url: its address.
        bodies: bodies of the requests for completions.
        paths: paths of all requests.
        heads: heads of all requests.
        connections: number of connections.
    """

    choose: Callable[[int, dict], Answer] = lambda number, body: Answer()
    counts_tokens: bool = True
    metrics: Callable[[], str] | None = None
    running: int = 0
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        ends = ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        with contextlib.suppress(*ends):
            while await self._one(reader, writer):
                pass
        writer.close()
        with contextlib.suppress(*ends):
            await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split(" ", 2)[1]
        self.paths.append(path)
        length = next(
            (int(line.split(":")[1]) for line in head.splitlines() if "ontent-Length" in line), 0
        )
        body = json.loads(await reader.readexactly(length) or b"{}")
        if path.endswith("/v1/models"):
            return await self._document(writer, Answer(body='{"data": [{"id": "fake"}]}'))
        if path.endswith("/tokenize") and self.counts_tokens:
            count = self.count(body.get("prompt")) if "prompt" in body else None
            if count is None:
                count = 7 + self.count(body["messages"][0]["content"])
            return await self._document(writer, Answer(body=json.dumps({"count": count})))
        if path.endswith("/metrics") and self.metrics is not None:
            return await self._document(writer, Answer(body=self.metrics()))
        if not path.endswith("completions"):
            return await self._document(writer, Answer(status=404, body='{"detail": "Not Found"}'))
        self.bodies.append(body)
        self.running += 1
        try:
            return await self._complete(writer, self.choose(len(self.bodies) - 1, body), body)
        finally:
            self.running -= 1

    async def _complete(self, writer: asyncio.StreamWriter, answer: Answer, body: dict) -> bool:
        await asyncio.sleep(answer.first)
        if answer.status != 200 or answer.body:
            return await self._document(writer, answer)
        return await self._stream(writer, answer, body)

    @staticmethod
    def count(text: str) -> int:
        """Return the tokens of a text: one for four letters or less, with the space before."""
        return sum(-(-len(entry) // 4) for entry in text.split())

    async def _document(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        lines = [f"HTTP/1.1 {answer.status} x", *answer.headers, "Content-Type: application/json"]
        lines += [f"Content-Length: {len(answer.body.encode())}", "", answer.body]
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        return True

    async def _stream(self, writer: asyncio.StreamWriter, answer: Answer, body: dict) -> bool:
        head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8"]
        events = [self._event(answer, text, body) for text in self._texts(answer)]
        end = "".join(self._end(answer, body))
        if answer.framing == "length":
            head.append(f"Content-Length: {len(''.join([*events, end]).encode())}")
        elif answer.framing == "chunked":
            head.append("Transfer-Encoding: chunked")
        if answer.close:
            head.append("Connection: close")
        writer.write("\r\n".join([*head, "", ""]).encode())
        for index, event in enumerate(events):
            if index:
                await asyncio.sleep(answer.gap)
            if index == answer.cut:
                return False
            await self._write(writer, answer, event)
        if answer.cut is not None:
            return False
        await self._write(writer, answer, end)
        if answer.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return answer.framing != "close" and not answer.close

    async def _write(self, writer: asyncio.StreamWriter, answer: Answer, text: str) -> None:
        data = text.encode()
        size = answer.pieces or len(data) or 1
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            chunked = answer.framing == "chunked"
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
            if answer.pieces:
                await asyncio.sleep(0)

    @staticmethod
    def _texts(answer: Answer) -> Iterator[str]:
        yield from (f"né{index} " for index in range(answer.chunks))

    def _event(self, answer: Answer, text: str, body: dict, finish: str | None = None) -> str:
        chat = "messages" in body
        choice = {"delta": {"content": text}} if chat else {"text": text}
        choice |= {"index": 0, "finish_reason": finish}
        return self._data(answer, {"id": "x", "choices": [choice], "usage": None})

    def _end(self, answer: Answer, body: dict) -> Iterator[str]:
        yield f": comment{answer.newline * 2}"
        if answer.fault:
            yield self._data(answer, {"error": {"message": answer.fault, "code": 500}})
        elif answer.finish:
            yield self._event(answer, "", body, "length")
        if answer.usage:
            messages = body.get("messages") or [{"content": body.get("prompt")}]
            text = " ".join(message["content"] for message in messages)
            usage = {"prompt_tokens": 7 * ("messages" in body) + self.count(text)}
            usage["completion_tokens"] = answer.chunks * answer.tokens
            if answer.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": answer.cached}
            yield self._data(answer, {"id": "x", "choices": [], "usage": usage})
        if answer.marker:
            yield f"data: [DONE]{answer.newline * 2}"

    @staticmethod
    def _data(answer: Answer, value: dict) -> str:
        return f"data: {json.dumps(value, ensure_ascii=False)}{answer.newline * 2}"


@contextlib.contextmanager
def serving(
    server: FakeServer,
    *,
    host: str = "127.0.0.1",
    uds: Path | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[FakeServer]:
    """Run a server for the body."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        if uds is not None:
            listening = await asyncio.start_unix_server(server.serve, str(uds))
            server.url = f"http+unix://{uds}"
        else:
            listening = await asyncio.start_server(server.serve, host, 0, ssl=tls)
            port = listening.sockets[0].getsockname()[1]
            name = f"[{host}]" if ":" in host else host
            server.url = f"http{'s' if tls else ''}://{name}:{port}"
        started.set()
        await stop.wait()
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.wait([task])

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
