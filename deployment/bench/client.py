"""Sends a load's requests from one process, and measures how well this process kept up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.simulation import Segment, SimulatedLoad, SimulatedRequest
from hardpoint.simulation.workload import TENANT

from .answers import RequestTimeline, StreamAnswer
from .connection import CutError, Pool
from .load import LoadPart, Traffic
from .prompts import PromptGenerator

NOT_SENT = "not sent: an earlier turn of its conversation failed"
_LAG_PERIOD_S = 0.01
_PAUSE_AFTER_ERROR_S = 0.1
_LONGEST_PAUSE_S = 5.0
_WARM_UP_IDS = 2**33  # texts of the warm-up are in no load


@dataclass
class LoadMeasurements:
    """The measurements of a part of a load.

    Attributes:
        timelines: timelines of its requests.
        start: when its first request could be sent, by `time.perf_counter`.
        cpu_share: share of a core that the process used.
        lags: seconds that the event loop ran timers after their time.
        late: seconds that arrivals were sent after their time.
        connections: number of connections that were opened.
        unfinished: requests that had not ended when the load was interrupted.
    """

    timelines: list[RequestTimeline] = field(default_factory=list)
    start: float = 0.0
    cpu_share: float = 0.0
    lags: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    connections: int = 0
    unfinished: int = 0


class RequestQueue:
    """Decides when turns may be sent: each follows the end of the turn before it."""

    def __init__(self) -> None:
        """Begin without conversations."""
        self._answers: dict[str, dict[int, str]] = {}
        self._waiting: dict[str, deque[SimulatedRequest]] = {}
        self._failed: set[str] = set()

    def offer(self, request: SimulatedRequest) -> bool:
        """Return whether a request may be sent now; otherwise it waits for the turn before it."""
        session = request.session
        if session is None:
            return True
        if session in self._waiting:
            self._waiting[session].append(request)
            return False
        self._waiting[session] = deque()
        return True

    def answers(self, request: SimulatedRequest) -> Mapping[int, str]:
        """Return the answers to the turns before a request, by the ids of their segments."""
        return {} if request.session is None else self._answers.get(request.session, {})

    def has_failed(self, request: SimulatedRequest) -> bool:
        """Return whether an earlier turn of a request's conversation failed."""
        return request.session in self._failed

    def end(self, request: SimulatedRequest, timeline: RequestTimeline) -> SimulatedRequest | None:
        """Note the end of a request; return the turn that waited for it, if there is one."""
        session = request.session
        if session is None:
            return None
        if timeline.error:
            self._failed.add(session)
        else:
            self._answers.setdefault(session, {})[request.output.id] = timeline.text
        if request.is_last or timeline.error:  # no later turn is sent that goes on from them
            self._answers.pop(session, None)
        if request.is_last:
            self._failed.discard(session)
        if waiting := self._waiting[session]:
            return waiting.popleft()
        del self._waiting[session]
        return None


class LoadClient:
    """Sends a part of a load."""

    def __init__(
        self,
        pool: Pool,
        prompts: PromptGenerator,
        load: SimulatedLoad,
        traffic: Traffic,
        part: LoadPart,
        counters: MutableSequence[int],
    ) -> None:
        """Make one.

        Args:
            pool: pool of the server's connections.
            prompts: makes bodies of requests.
            load: the requests.
            traffic: how they are sent.
            part: which of them are sent.
            counters: for each part, numbers of requests that ended well, and of those that failed;
                the last item is not 0 once the load is to end.
        """
        self._pool, self._prompts = pool, prompts
        self._load, self._traffic, self._part = traffic.limited(load), traffic, part
        self._counters = counters
        self._queue = RequestQueue()
        self._outcome = LoadMeasurements()
        self._sending: asyncio.Task[None] | None = None

    async def run(self, ready: Callable[[], object]) -> LoadMeasurements:
        """Warm up, wait until all parts are ready, and send the load.

        Args:
            ready: blocks until they are.
        """
        outcome = self._outcome
        watching = asyncio.create_task(self._watch())
        await self._until_stopped(self._warm_up())
        ready()
        outcome.lags.clear()
        gc.freeze()
        outcome.start, cpu = time.perf_counter(), time.process_time()
        await self._until_stopped(self._send_load())
        outcome.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - outcome.start)
        gc.unfreeze()
        watching.cancel()
        outcome.connections = self._pool.opened
        self._pool.close()
        return outcome

    async def _until_stopped(self, sending: Coroutine[Any, Any, None]) -> None:
        """Run one thing that the end of the load cancels."""
        self._sending = asyncio.create_task(sending)
        with contextlib.suppress(asyncio.CancelledError):
            await self._sending

    async def _warm_up(self) -> None:
        """Send requests as long as those of the load, with other texts, from each stream."""
        _, requests = self._load.requests()
        first = itertools.islice(requests, self._traffic.num_warm_up)
        numbered = enumerate(first)

        async def stream() -> None:
            for number, request in numbered:
                if number % self._part.of == self._part.process:
                    body = self._prompts.body(_with_other_texts(request), {})
                    await self._send(body, keep_text=False)

        streams = self._part.streams(self._traffic.concurrency or 1)
        await asyncio.gather(*(stream() for _ in range(max(1, streams))))

    async def _send_load(self) -> None:
        _, requests = self._load.requests()
        timed = self._part.chosen(self._traffic.timed(requests))
        async with asyncio.TaskGroup() as group:
            if self._traffic.concurrency is not None:
                for _ in range(self._part.streams(self._traffic.concurrency)):
                    group.create_task(self._stream(timed))
                return
            for at, request in timed:
                # A timer of uvloop may end a millisecond early.
                while (late := time.perf_counter() - self._outcome.start - at) < 0:
                    await asyncio.sleep(-late)
                self._outcome.late.append(late)
                if self._queue.offer(request):
                    group.create_task(self._send_turns(request))

    async def _stream(self, timed: Iterator[tuple[float, SimulatedRequest]]) -> None:
        for _, request in timed:
            if self._is_over():
                return
            if self._queue.offer(request):
                await self._send_turns(request)

    def _is_over(self) -> bool:
        limit = self._traffic.seconds
        return limit is not None and time.perf_counter() - self._outcome.start > limit

    async def _send_turns(self, request: SimulatedRequest) -> None:
        """Send a request, and turns that waited for its end."""
        turn: SimulatedRequest | None = request
        while turn is not None and not self._is_over():
            turn = await self._send_turn(turn)

    async def _send_turn(self, request: SimulatedRequest) -> SimulatedRequest | None:
        """Send a request; return the turn that waited for its end."""
        if self._queue.has_failed(request):
            now = time.perf_counter()
            timeline = RequestTimeline(sent=now, ended=now, error=NOT_SENT)
        else:
            body = self._prompts.body(request, self._queue.answers(request))
            try:
                timeline = await self._send(body, keep_text=request.session is not None)
            except asyncio.CancelledError:
                self._outcome.unfinished += 1
                raise
        timeline.tenant, timeline.session = request.tags.get(TENANT), request.session
        following = self._queue.end(request, timeline)
        timeline.text = ""
        self._outcome.timelines.append(timeline)
        self._counters[2 * self._part.process + bool(timeline.error)] += 1
        if timeline.error and self._traffic.concurrency is not None:
            pause = timeline.retry_after or _PAUSE_AFTER_ERROR_S
            await asyncio.sleep(min(pause, _LONGEST_PAUSE_S))
        return following

    async def _send(self, body: bytes, *, keep_text: bool) -> RequestTimeline:
        request = self._pool.request("POST", self._prompts.fields.path, body)
        return await send(self._pool, request, self._traffic.timeout, keep_text=keep_text)

    async def _watch(self) -> None:
        """Measure how late timers are; end the load when that is asked for."""
        while True:
            due = time.perf_counter() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._outcome.lags.append(max(0.0, time.perf_counter() - due))
            if self._counters[-1] and self._sending is not None:
                self._sending.cancel()


def _with_other_texts(request: SimulatedRequest) -> SimulatedRequest:
    prompt = tuple(Segment(one.id + _WARM_UP_IDS, one.length) for one in request.prompt)
    return msgspec.structs.replace(request, prompt=prompt, session=None)


async def send(
    pool: Pool, request: bytes, timeout: float, *, keep_text: bool = False
) -> RequestTimeline:
    """Send a request and read its stream to the end.

    Args:
        pool: pool of the server's connections.
        request: bytes of it.
        timeout: seconds that it may last.
        keep_text: whether the timeline has the text.

    Returns:
        Its course; an error is in it.
    """
    timeline = RequestTimeline()
    answer = StreamAnswer(timeline, keep_text=keep_text)
    timeline.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await pool.ask(request, answer)
    except TimeoutError:
        timeline.error = f"timeout after {timeout:g} s"
    except CutError as error:
        timeline.error = f"connection: {error}"
    except OSError as error:
        timeline.error = f"connection: {type(error).__name__}"
    answer.finish(time.perf_counter())
    return timeline
