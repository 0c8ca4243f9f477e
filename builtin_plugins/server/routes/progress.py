"""Prompt progress: events before the events of the answer, on demand."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins import HardpointError
from hardpoint.plugins.server import AsyncGenerator as Engine

if TYPE_CHECKING:
    from hardpoint.plugins.scheduling.step_record import LiveRequest


_SECONDS = 0.25


class PromptProgress(msgspec.Struct):
    """How much of a request's prompts is computed.

    Attributes:
        total: tokens of the prompts.
        cached: how many of them needed no computing; also named `cache`, as in llama.cpp.
        processed: how many of them are done, cached ones included.
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
        request_ids: ids of the prompts, in the engine.
        events: events of the answer.
        head: the beginning of an event, up to the list of choices.
    """
    watch = _WATCHES.setdefault(id(engine), _Watch(engine))
    async with contextlib.aclosing(events):
        started = time.monotonic()
        first = asyncio.ensure_future(anext(events, None))
        try:
            last: tuple[int, int] | None = None
            while (live := await watch.until(first, request_ids)) is not None:
                progress = _progress(live, started)
                if progress is None or (progress.total, progress.processed) == last:
                    continue
                last = progress.total, progress.processed
                encoded = msgspec.json.encode(progress)
                yield head + b'],"prompt_progress":' + encoded + b"}\n\n"
            event = first.result()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        if event is None:
            return
        yield event
        async for event in events:
            yield event


class _Watch:
    """Asks an engine for the progress of all streams together, once per interval."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids: set[str] = set()
        self._asking: asyncio.Task[dict[str, list[LiveRequest]]] | None = None
        self._waiting = 0

    async def until(
        self, first: asyncio.Future[bytes | None], request_ids: Sequence[str]
    ) -> list[LiveRequest] | None:
        """Return the live requests of a stream at the next time; None once it has its first event.

        Args:
            first: its first event.
        """
        self._ids.update(request_ids)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        asking = self._asking
        self._waiting += 1
        try:
            await asyncio.wait((first, asking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting -= 1
            if not self._waiting and not asking.done():
                asking.cancel()
                self._asking = None
        if first.done():
            return None
        live = asking.result()
        return [request for name in request_ids for request in live.get(name, ())]

    async def _ask(self) -> dict[str, list[LiveRequest]]:
        await asyncio.sleep(_SECONDS)
        ids, self._ids = self._ids, set()
        requests: dict[str, list[LiveRequest]] = {}
        with contextlib.suppress(HardpointError):  # the answers' own events report the error
            for request in await self._engine.engines.live_requests(list(ids)):
                requests.setdefault(request.external_id, []).append(request)
        return requests


_WATCHES: weakref.WeakValueDictionary[int, _Watch] = weakref.WeakValueDictionary()
"""The watch of each engine, by the engine's id, while a stream needs it."""


def _progress(live: Sequence[LiveRequest], started: float) -> PromptProgress | None:
    # The completions of a prompt share it: the one that is furthest stands for it.
    furthest: dict[str, LiveRequest] = {}
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
