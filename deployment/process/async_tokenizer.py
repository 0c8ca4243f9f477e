"""Tokenization for an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from hardpoint.core.frontend.requests.input_processor import InputProcessor
from hardpoint.errors import EngineClosedError
from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.step_part.part import GivenPrompt

T = TypeVar("T")

_LONG_TEXT = 2000


class AsyncTokenizer:
    """Tokenises prompts for an event loop: a long text in another thread."""

    def __init__(self, processor: InputProcessor) -> None:
        self._processor = processor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hardpoint-tokenise")
        self._is_closed = False
        self._running: set[Future[Any]] = set()

    async def read(self, prompt: Prompt | EngineCoreRequest) -> GivenPrompt | None:
        """Return a prompt with its tokens; None for a request that is made already.

        While a long text is tokenised, or a part reads more than texts, others wait for the same
        thread: a tokenizer is called with one text at a time.
        """
        if isinstance(prompt, EngineCoreRequest):
            return None
        length = self._processor.length_of(prompt)
        if not length:
            return self._processor.read(prompt)
        return await self._run(functools.partial(self._processor.read, prompt), length)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens."""
        encode = functools.partial(
            self._processor.tokenise, text, add_special_tokens=add_special_tokens
        )
        return await self._run(encode, len(text))

    async def _run(self, encode: Callable[[], T], length: int) -> T:
        if length < _LONG_TEXT and not self._running and not self._is_closed:
            return encode()
        try:
            future = self._thread.submit(encode)
        except RuntimeError:
            raise EngineClosedError("the engine is closed") from None
        self._running.add(future)
        future.add_done_callback(self._running.discard)  # not before the thread is done with it
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no more; do not wait."""
        self._is_closed = True
        self._thread.shutdown(wait=False)
