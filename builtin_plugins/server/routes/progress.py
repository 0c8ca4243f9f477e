"""How much of a prompt is computed: events before those of the answer, on demand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from hardpoint.plugins import HardpointError
from hardpoint.plugins.server import AsyncGenerator as Engine

_SECONDS = 0.25


class PromptProgress(msgspec.Struct):
    """How much of a request's prompts is computed.

    Attributes:
        total: tokens of the prompts.
        cached: of them, those that needed no computing; also named `cache`, as in llama.cpp.
        processed: of them, those that are done, cached ones included.
        time_ms: since the request came.
    """

    total: int
    cached: int
    cache: int
    processed: int
    time_ms: int


async def with_progress(
    engine: Engine, request_ids: Sequence[str], events: AsyncGenerator[bytes, None], head: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer; before the first one, how much of the prompts is computed.

    Args:
        request_ids: of the prompts, in the engine.
        events: of the answer.
        head: the beginning of an event, up to the list of choices.
    """
    async with contextlib.aclosing(events):
        started = time.monotonic()
        first = asyncio.ensure_future(anext(events, None))
        try:
            last: tuple[int, int] | None = None
            while not (await asyncio.wait((first,), timeout=_SECONDS))[0]:
                progress = await _progress(engine, request_ids, started)
                if progress is None or (progress.total, progress.processed) == last:
                    continue
                last = progress.total, progress.processed
                encoded = msgspec.json.encode(progress)
                yield head + b'],"prompt_progress":' + encoded + b"}\n\n"
            event = first.result()
        finally:
            if not first.done():
                first.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await first
        if event is None:
            return
        yield event
        async for event in events:
            yield event


async def _progress(
    engine: Engine, request_ids: Sequence[str], started: float
) -> PromptProgress | None:
    """Return the progress of prompts; None if the engine has none of them, or does not say."""
    try:
        live = await engine.live_requests(request_ids)
    except HardpointError:  # the answer's own events say what is wrong
        return None
    # The completions of a prompt share it: the one that is furthest stands for it.
    furthest: dict[str, Any] = {}
    for request in live:
        known = furthest.get(request.external_id)
        if known is None or request.num_computed_tokens > known.num_computed_tokens:
            furthest[request.external_id] = request
    if not furthest:
        return None
    requests = furthest.values()
    cached = sum(request.num_cached_tokens for request in requests)
    return PromptProgress(
        total=sum(request.num_prompt_tokens for request in requests),
        cached=cached,
        cache=cached,
        processed=sum(
            min(request.num_computed_tokens, request.num_prompt_tokens) for request in requests
        ),
        time_ms=round((time.monotonic() - started) * 1000),
    )
