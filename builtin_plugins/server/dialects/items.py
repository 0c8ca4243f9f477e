"""Answers with items of several kinds, as Anthropic's and OpenAI's newer routes stream them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from hardpoint.builtin_plugins.server.routes.answers import (
    UsageCount,
    check_ended,
    only,
)
from hardpoint.plugins import CompletionOutput, RequestOutput, Tokenizer
from hardpoint.plugins.server import ToolCall

from .dialect import AnswerWriter

_LARGE = 1 << 18
"""Bytes of events after which other requests get a turn."""

Kind = Literal["reasoning", "text", "call"]


class ItemAnswer(AnswerWriter[RequestOutput]):
    """Writes reasoning, text and calls as items; at most one item is open."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._usage = UsageCount(tokenizer)
        self._encode = msgspec.json.Encoder().encode
        self._begun = False
        self._open: Kind | None = None
        self._num_items = 0
        self._call: ToolCall | None = None
        self._void_calls: Sequence[int] = ()

    async def whole(self, outputs: AsyncGenerator[RequestOutput, None]) -> Any:
        """Return the body of the answer; see the base."""
        output = await only(outputs)
        (completion,) = output.outputs
        check_ended(completion)
        self._usage.add(output)
        return self._whole(completion)

    @abstractmethod
    def _whole(self, completion: CompletionOutput) -> Any:
        """Return the body of an answer that is not streamed."""

    async def events(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events, small ones of one output together; see the base."""
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                self._usage.add(output)
                for completion in output.outputs:
                    check_ended(completion)
                written: list[bytes] = []
                size = 0
                for event in self._written(output):
                    written.append(event)
                    size += len(event)
                    if size >= _LARGE:
                        yield b"".join(written)
                        written, size = [], 0
                        await asyncio.sleep(0)
                if written:
                    yield b"".join(written)

    def _written(self, output: RequestOutput) -> Iterator[bytes]:
        yield from self._begin()
        for completion in output.outputs:
            yield from self._parts(completion)
            if completion.finish_reason is not None:
                yield from self._end(completion)

    def _begin(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield from self._first()

    def _parts(self, completion: CompletionOutput) -> Iterator[bytes]:
        """Yield the events of new reasoning, text and calls."""
        self._void_calls = completion.void_calls
        going_on, begun = split_calls(completion.tool_calls, self._call)
        yield from self._called(going_on)
        if completion.reasoning:
            yield from self._opened("reasoning")
            yield self._delta(completion.reasoning)
        for part in in_order(completion.content, begun):
            if isinstance(part, ToolCall):
                yield from self._called([part])
            else:
                yield from self._opened("text")
                yield self._text_delta(part)

    @abstractmethod
    def _first(self) -> Iterator[bytes]:
        """Yield the first events of the stream."""

    @abstractmethod
    def _called(self, calls: Iterable[ToolCall]) -> Iterator[bytes]:
        """Yield the events of parts of calls."""

    @abstractmethod
    def _opened(self, kind: Kind) -> Iterator[bytes]:
        """Yield the events that begin an item, unless it is open."""

    @abstractmethod
    def _delta(self, text: str) -> bytes:
        """Return the event of new text of the open item."""

    def _text_delta(self, text: str) -> bytes:
        """Return the event of new text."""
        return self._delta(text)

    @abstractmethod
    def _end(self, completion: CompletionOutput) -> Iterator[bytes]:
        """Yield the last events of the stream."""


def split_calls(
    calls: Sequence[ToolCall] | None, opened: ToolCall | None
) -> tuple[Sequence[ToolCall], Sequence[ToolCall]]:
    """Return the parts of calls that continue an open call, and the parts that begin calls.

    What goes on with a call comes before any text of the same output.

    Args:
        calls: parts of one output.
        opened: the open call, if there is one.
    """
    parts = calls or ()
    index = None if opened is None else opened.index
    going_on = [call for call in parts if call.index == index]
    return going_on, [call for call in parts if call.index != index]


def in_order(content: str | None, calls: Iterable[ToolCall]) -> Iterator[str | ToolCall]:
    """Yield the texts and the calls of an output as the model wrote them."""
    text, at = content or "", 0
    for call in calls:
        if before := text[at : call.content_before]:
            yield before
            at = call.content_before
        yield call
    if rest := text[at:]:
        yield rest


def whole_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if it was cut off or is malformed."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
