"""Long texts are tokenised in another thread, until the engine is closed."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.waiting import PATIENCE_S

from hardpoint.errors import EngineClosedError
from hardpoint.process.async_tokenizer import AsyncTokenizer

LONG = "x" * 3000


class Waits:
    """Tokenises once it may."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def tokenise(self, text, *, add_special_tokens):
        del add_special_tokens
        self.begun.set()
        if text == LONG:
            assert self.may_end.wait(PATIENCE_S)
        return [len(text)]


async def test_what_is_begun_ends_and_no_more_begins_once_it_is_closed():
    waits = Waits()
    tokenizer = AsyncTokenizer(waits)
    assert await tokenizer.encode("short") == [5]
    task = asyncio.create_task(tokenizer.encode(LONG))
    await asyncio.to_thread(waits.begun.wait, PATIENCE_S)
    await asyncio.to_thread(tokenizer.close)
    waits.may_end.set()
    assert await task == [3000]
    for text in (LONG, "short"):
        with pytest.raises(EngineClosedError, match="^the engine is closed$"):
            await tokenizer.encode(text)


async def test_one_that_never_had_a_thread_begins_none():
    tokenizer = AsyncTokenizer(Waits())
    tokenizer.close()
    with pytest.raises(EngineClosedError):
        await tokenizer.encode(LONG)
