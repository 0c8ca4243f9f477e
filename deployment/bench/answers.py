"""Answers: events of a stream, and JSON documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

BODY_LIMIT = 65_536
"""Bytes of an error's body that are kept."""
MESSAGE_TERMS = 8
"""First terms of an error's message that make its kind."""

_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of bytes that are no JSON, that are no UTF-8, or that nest too deeply."""


class Delta(msgspec.Struct):
    """The new part of a chat's choice; only text is read."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """A choice of a chunk, of either route."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class ReceivedPromptDetails(msgspec.Struct):
    """Details of a prompt's tokens."""

    cached_tokens: int | None = None


class ReceivedUsage(msgspec.Struct):
    """Tokens, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: ReceivedPromptDetails | None = None


class Chunk(msgspec.Struct):
    """An event of a stream."""

    choices: list[Choice] = []
    usage: ReceivedUsage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


class EventReader:
    """Splits a stream of server-sent events into the payloads of its `data` fields."""

    def __init__(self) -> None:
        """Start a stream."""
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the events that these bytes complete.

        Lines may end with LF or CR LF; comments and other fields are left out.
        """
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n")
        self._rest = data[end + 1 :]
        events: list[bytes] = []
        if end < 0:
            return events
        for line in data[:end].split(b"\n"):
            if line.startswith(b"data:"):
                self._lines.append(line[5:].strip())
            elif self._lines and line in (b"", b"\r"):
                events.append(b"\n".join(self._lines))
                self._lines = []
        return events


@dataclass
class RequestTimeline:
    """The course of a request; times are those of `time.perf_counter`.

    Attributes:
        sent: when it was sent.
        first: when the first text arrived, or 0.0.
        last: when the newest text arrived.
        ended: when the end marker arrived, or the error.
        gaps: seconds between two chunks with text.
        chunks: number of chunks with text.
        prompt_tokens, output_tokens: as the server counted them, or None.
        error: what kind of error it was, or "".
        retry_after: seconds that the server asked to wait, or None.
        text: the answer.
        cached_tokens: tokens of the prompt that a cache had, as the server counted them, or None.
        tenant, session: names of the request's tenant and conversation, or None.
    """

    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    chunks: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""
    retry_after: float | None = None
    text: str = ""
    cached_tokens: int | None = None
    tenant: str | None = None
    session: str | None = None


class StreamAnswer:
    """Receives a streamed completion, and writes its course down.

    Attributes:
        timeline: timeline of the request.
        on_text: called at each chunk with text.
    """

    def __init__(self, timeline: RequestTimeline, *, keep_text: bool = False) -> None:
        """Start.

        Args:
            timeline: written to.
            keep_text: whether the text is kept.
        """
        self.timeline = timeline
        self.on_text: Callable[[], None] | None = None
        self._keep_text = keep_text
        self._texts: list[str] = []
        self._events = EventReader()
        self._status = 0
        self._is_stream = False
        self._kept = b""
        self._finished = False  # a finish_reason came
        self._marked = False  # the end marker came

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Read the status."""
        self._status = status
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        try:
            self.timeline.retry_after = float(headers["retry-after"])
        except (KeyError, ValueError):  # absent, or a date
            pass

    def body(self, data: bytes, now: float) -> None:
        """Read events, or keep the beginning of a body without events."""
        if self._status != 200 or not self._is_stream:
            if len(self._kept) < BODY_LIMIT:
                self._kept += data
            return
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self._marked = True
                self.timeline.ended = now
            elif not self.timeline.error:
                self._chunk(payload, now)

    def _chunk(self, payload: bytes, now: float) -> None:
        timeline = self.timeline
        try:
            chunk = _decoder.decode(payload)
        except _NO_JSON:
            timeline.error = "stream: an event is not the JSON of a chunk"
            return
        if chunk.error is not None:
            timeline.error = f"stream: {_first_terms(chunk.error)}"
            return
        if chunk.usage is not None:
            timeline.prompt_tokens = chunk.usage.prompt_tokens
            timeline.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            timeline.cached_tokens = None if details is None else details.cached_tokens
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._finished = True
                if choice.finish_reason == "error":
                    timeline.error = "stream: finish_reason error"
            if _has_output(choice):
                self._output(choice, now)

    def _output(self, choice: Choice, now: float) -> None:
        timeline = self.timeline
        if timeline.chunks:
            timeline.gaps.append(now - timeline.last)
        else:
            timeline.first = now
        timeline.last = now
        timeline.chunks += 1
        if self._keep_text:
            self._texts.append(choice.text or (choice.delta and choice.delta.content) or "")
        if self.on_text is not None:
            self.on_text()

    def finish(self, now: float) -> None:
        """Complete the timeline after the answer's end: an answer that is not whole is an error."""
        timeline = self.timeline
        timeline.text = "".join(self._texts)
        timeline.ended = timeline.ended or now
        if timeline.error:
            return
        if self._status != 200:
            timeline.error = f"{self._status} {message_of(self._kept)}"
        elif not self._is_stream:
            timeline.error = "200, but no event stream"
        elif not self._finished:
            timeline.error = "stream: ended without a finish_reason"
        elif not self._marked:
            timeline.error = "stream: ended without [DONE]"


def _has_output(choice: Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def message_of(body: bytes) -> str:
    """Return the first terms of the message of an error's body."""
    try:
        value = msgspec.json.decode(body)
    except _NO_JSON:
        return _first_terms(body.decode("utf-8", "replace"))
    return _first_terms(value.get("error", value) if isinstance(value, dict) else value)


def _first_terms(error: Any) -> str:
    """Return the first terms of an error of OpenAI's shape, or of others."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    terms = str(error).split()
    return " ".join(terms[:MESSAGE_TERMS]) + ("..." if len(terms) > MESSAGE_TERMS else "")


class Document:
    """Receives a JSON document.

    Attributes:
        status: status of the answer.
        content: the body.
    """

    def __init__(self) -> None:
        """Start."""
        self.status = 0
        self.content = b""

    def head(self, status: int, headers: dict[str, str]) -> None:  # noqa: ARG002
        """Read the status."""
        self.status = status

    def body(self, data: bytes, now: float) -> None:  # noqa: ARG002
        """Keep the body."""
        self.content += data

    def json(self) -> Any:
        """Return the body's value, or None for an error or what is no JSON."""
        try:
            return msgspec.json.decode(self.content) if self.status == 200 else None
        except _NO_JSON:
            return None
