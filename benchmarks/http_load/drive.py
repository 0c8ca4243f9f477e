"""Sends a load's requests from one process, and measures how well this process kept up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field

from http_load.answers import StreamAnswer, Timeline
from http_load.connection import CutError, Pool
from http_load.target import Target
from http_load.workload import Workload

_LAG_PERIOD_S = 0.01
_PAUSE_AFTER_ERROR_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        name: name of the load; its prompts depend on it.
        concurrency: streams, each of which sends a request when its last one ended; or 0.
        rate: mean of Poisson arrivals per second, if there are no streams.
        requests: number of requests, or None.
        seconds: after which no request is sent any more, or None.
        warm_up: requests before the load, at its concurrency; they are in no figure.
        timeout: seconds that a request may last.
    """

    name: str
    concurrency: int = 0
    rate: float = 0.0
    requests: int | None = None
    seconds: float | None = None
    warm_up: int = 0
    timeout: float = 600.0


@dataclass(frozen=True)
class Part:
    """The part of a load that one of several processes sends: every `of`-th request.

    Attributes:
        index: index of the process.
        of: number of processes.
    """

    index: int = 0
    of: int = 1


@dataclass
class Outcome:
    """The measurements of a part of a load.

    Attributes:
        timelines: timelines of its requests.
        cpu_share: share of a core that the process used.
        lags: seconds that the event loop ran timers after their time.
        late: seconds that Poisson arrivals were sent after their time.
        connections: number of connections that were opened.
    """

    timelines: list[Timeline] = field(default_factory=list)
    cpu_share: float = 0.0
    lags: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    connections: int = 0


def arrivals(load: Load, seed: int) -> Iterator[float]:
    """Yield the seconds of Poisson arrivals."""
    rng = random.Random(f"{seed}, {load.name}, arrivals")
    at = 0.0
    for _ in range(load.requests) if load.requests is not None else itertools.count():
        at += rng.expovariate(load.rate)
        if load.seconds is not None and at > load.seconds:
            return
        yield at


class Client:
    """Sends a part of a load."""

    def __init__(
        self,
        target: Target,
        headers: dict[str, str],
        workload: Workload,
        load: Load,
        part: Part,
        counters: MutableSequence[int],
    ) -> None:
        """Make one.

        Args:
            target: the server.
            headers: headers of each request.
            workload: what is asked.
            load: how.
            part: which of its requests are sent.
            counters: numbers of requests that ended well, and of those that failed, for each part.
        """
        self._pool = Pool(target, headers)
        self._workload = workload
        self._load = load
        self._part = part
        self._counters = counters
        self._outcome = Outcome()

    async def run(self, ready: Callable[[], object]) -> Outcome:
        """Warm up, wait until all parts are ready, and send the load.

        Args:
            ready: blocks until they are.
        """
        await self._warm_up()
        ready()
        gc.freeze()
        outcome = self._outcome
        lag = asyncio.create_task(self._measure_lag())
        start, cpu = time.perf_counter(), time.process_time()
        if self._load.concurrency:
            await self._closed_loop(start)
        else:
            await self._poisson(start)
        outcome.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - start)
        lag.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await lag
        gc.unfreeze()
        outcome.connections = self._pool.opened
        self._pool.close()
        return outcome

    def _streams(self) -> range:
        return range(self._part.index, self._load.concurrency, self._part.of)

    async def _warm_up(self) -> None:
        numbers = iter(range(self._part.index, self._load.warm_up, self._part.of))

        async def stream() -> None:
            for number in numbers:
                body = self._workload.body(f"{self._load.name}, warm-up", number)
                await self._send(body)

        await asyncio.gather(*(stream() for _ in self._streams() or range(1)))

    async def _closed_loop(self, start: float) -> None:
        numbers = itertools.count(self._part.index, self._part.of)
        load = self._load

        async def stream() -> None:
            for number in numbers:
                if load.requests is not None and number >= load.requests:
                    return
                body = self._workload.body(load.name, number)
                if load.seconds is not None and time.perf_counter() - start > load.seconds:
                    return
                timeline = await self._send(body)
                self._count(timeline)
                if timeline.error:
                    pause = timeline.retry_after or _PAUSE_AFTER_ERROR_S
                    await asyncio.sleep(min(pause, _LONGEST_PAUSE_S))

        await asyncio.gather(*(stream() for _ in self._streams()))

    async def _poisson(self, start: float) -> None:
        running: set[asyncio.Task[None]] = set()

        async def one(body: bytes) -> None:
            self._count(await self._send(body))

        for number, at in enumerate(arrivals(self._load, self._workload.seed)):
            if number % self._part.of != self._part.index:
                continue
            body = self._workload.body(self._load.name, number)
            if (delay := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            self._outcome.late.append(max(0.0, time.perf_counter() - start - at))
            task = asyncio.create_task(one(body))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _send(self, body: bytes) -> Timeline:
        request = self._pool.request("POST", self._workload.path, body)
        return await send(self._pool, request, self._load.timeout)

    def _count(self, timeline: Timeline) -> None:
        self._outcome.timelines.append(timeline)
        self._counters[2 * self._part.index + bool(timeline.error)] += 1

    async def _measure_lag(self) -> None:
        while True:
            due = time.perf_counter() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._outcome.lags.append(max(0.0, time.perf_counter() - due))


async def send(pool: Pool, request: bytes, timeout: float, *, keep_text: bool = False) -> Timeline:
    """Send a request and read its stream to the end.

    Args:
        pool: pool of the server's connections.
        request: bytes of it.
        timeout: seconds that it may last.
        keep_text: whether the timeline has the text.

    Returns:
        Its course; an error is in it.
    """
    timeline = Timeline()
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
