"""Streams of chunks with a list of choices, of OpenAI's older routes and vLLM's."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import msgspec

from hardpoint.builtin_plugins.server.routes.answers import DONE, UsageCount
from hardpoint.builtin_plugins.server.routes.fields import StreamOptions
from hardpoint.builtin_plugins.server.routes.progress import with_progress
from hardpoint.builtin_plugins.server.service import Service

from .dialect import AnswerWriter, ParsedRequest

OutputT = TypeVar("OutputT")


def identity_of(parsed: ParsedRequest[Any], kind: str) -> dict[str, Any]:
    """Return the first fields of an answer in OpenAI's shape, or of its chunks.

    Args:
        kind: the field `object`.
    """
    return {
        "id": parsed.answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": parsed.model,
    }


class ChunkAnswer(AnswerWriter[OutputT]):
    """Writes choices; the common part of all chunks of a stream is encoded once."""

    def __init__(
        self,
        service: Service,
        head: dict[str, Any],
        options: StreamOptions | None,
        request_ids: Sequence[str] = (),
    ) -> None:
        """Prepare the answer of a request.

        Args:
            head: the first fields of each chunk.
            request_ids: in the engine, of the prompts whose progress is shown.
        """
        self._service, self._request_ids = service, request_ids
        self._options = options or StreamOptions()
        self._encode = msgspec.json.Encoder().encode
        self._head = b"data: " + self._encode(head)[:-1] + b',"choices":['
        self._usage = UsageCount(service.engine.tokenizer)
        self._transfer: dict[str, Any] | None = None

    def events(self, outputs: AsyncGenerator[OutputT, None]) -> AsyncGenerator[bytes, None]:
        """Yield the events; see the base."""
        events = self._events(outputs)
        if not self._request_ids:
            return events
        return with_progress(self._service.engine, self._request_ids, events, self._head)

    async def _events(self, outputs: AsyncGenerator[OutputT, None]) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if chunks := self._chunks(output):
                    yield chunks
        if self._transfer is not None:
            yield self._last("kv_transfer_params", self._transfer)
        if self._options.include_usage:
            await self._measure()
            yield self._last("usage", self._usage.usage())
        yield DONE

    @abstractmethod
    def _chunks(self, output: OutputT) -> bytes:
        """Count an output, and return its chunks.

        Raises:
            AnswerError: a completion ended with an error.
        """

    async def _measure(self) -> None:
        """Count the tokens of the reasoning, before the usage of the whole answer."""
        await self._usage.measure(self._service.engine.model.tokenize)

    def _usage_so_far(self, completion_tokens: int | None = None) -> bytes:
        """Return the usage in a chunk, after a comma; empty where it was not asked for.

        Args:
            completion_tokens: number of tokens up to the chunk; None is all that have come.
        """
        if not (self._options.include_usage and self._options.continuous_usage_stats):
            return b""
        usage = self._usage.usage(whole=False)
        if completion_tokens is not None:
            usage.completion_tokens = completion_tokens
            usage.total_tokens = usage.prompt_tokens + completion_tokens
        return b',"usage":' + self._encode(usage)

    def _last(self, name: str, value: Any) -> bytes:
        return self._head + b'],"' + name.encode() + b'":' + self._encode(value) + b"}\n\n"
