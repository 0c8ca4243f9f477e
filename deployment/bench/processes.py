"""Runs a load in a thread of this process, or in several processes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from hardpoint.simulation import SimulatedLoad

from .client import LoadClient, LoadMeasurements
from .connection import Pool
from .load import LoadPart, Traffic
from .prompts import Costs, PromptGenerator, RequestFields
from .target import Target

_PROGRESS_PERIOD_S = 0.25
_READY_TIMEOUT_S = 600.0
_OTHER_DESCRIPTORS = 256
_DESCRIPTORS_OF_ARRIVALS = 4096

T = TypeVar("T")


class LoadRun(NamedTuple):
    """A load and the server that it is sent to, as plain data.

    Attributes:
        target: the server.
        headers: headers of each request.
        fields: fields of the requests.
        costs: costs of text.
        load: the requests.
        traffic: how they are sent.
    """

    target: Target
    headers: Mapping[str, str]
    fields: RequestFields
    costs: Costs
    load: SimulatedLoad
    traffic: Traffic

    def client(self, part: LoadPart, counters: Any) -> LoadClient:
        """Return the client of a part."""
        pool = Pool(self.target, dict(self.headers))
        seed = f"{self.traffic.seed}, {self.traffic.name}"  # no cache has a load's texts before
        prompts = PromptGenerator(self.fields, self.costs, seed)
        return LoadClient(pool, prompts, self.load, self.traffic, part, counters)


class Sent(NamedTuple):
    """Progress of a load, or its end.

    Attributes:
        good, failed: numbers of requests that ended well, and of the others.
        seconds: since the beginning.
        outcomes: what each process measured; None until the end.
        is_interrupted: whether a signal ended the load.
    """

    good: int
    failed: int
    seconds: float
    outcomes: list[LoadMeasurements] | None = None
    is_interrupted: bool = False


def run_on_uvloop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop's event loop."""
    import uvloop  # noqa: PLC0415 - not on Windows

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def send_load(run: LoadRun) -> Iterator[Sent]:
    """Send a load; yield what has been sent, several times a second, and at last the outcomes.

    An interrupt (SIGINT) ends the load, and what was measured until then is the outcome; a second
    one ends the program.
    """
    traffic = run.traffic
    processes = min(traffic.processes, traffic.concurrency or traffic.processes)
    allow_descriptors((traffic.concurrency or _DESCRIPTORS_OF_ARRIVALS) + _OTHER_DESCRIPTORS)
    start = time.perf_counter()
    counters: Any = [0] * 3
    with contextlib.ExitStack() as stack:
        if processes == 1:
            outcomes: Callable[[float], list[LoadMeasurements] | None] = _in_thread(run, counters)
        else:
            counters = multiprocessing.get_context("spawn").Array(
                "q", 2 * processes + 1, lock=False
            )
            outcomes = stack.enter_context(_in_processes(run, processes, counters))
        interrupted = stack.enter_context(_interrupts(counters))
        while True:
            done = outcomes(_PROGRESS_PERIOD_S)
            good, failed = sum(counters[0:-1:2]), sum(counters[1:-1:2])
            seconds = time.perf_counter() - start
            yield Sent(good, failed, seconds, done, interrupted.is_set())
            if done is not None:
                return


@contextlib.contextmanager
def _interrupts(counters: Any) -> Iterator[threading.Event]:
    """Let the first SIGINT end the load; its value is set once one came."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        counters[-1] = 1
        came.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _in_thread(run: LoadRun, counters: Any) -> Callable[[float], list[LoadMeasurements] | None]:
    future: Future[LoadMeasurements] = Future()

    def send() -> None:
        try:
            future.set_result(run_on_uvloop(run.client(LoadPart(), counters).run(lambda: None)))
        except BaseException as error:  # raised where it is awaited
            future.set_exception(error)

    threading.Thread(target=send, daemon=True).start()

    def outcomes(seconds: float) -> list[LoadMeasurements] | None:
        with contextlib.suppress(TimeoutError):
            return [future.result(seconds)]
        return None

    return outcomes


@contextlib.contextmanager
def _in_processes(
    run: LoadRun, processes: int, counters: Any
) -> Iterator[Callable[[float], list[LoadMeasurements] | None]]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    parts = [(run, LoadPart(index, processes)) for index in range(processes)]
    with context.Pool(processes, _share, (counters, barrier)) as pool:
        result = pool.starmap_async(_run_part, parts, chunksize=1)

        def outcomes(seconds: float) -> list[LoadMeasurements] | None:
            result.wait(seconds)
            return result.get() if result.ready() else None

        yield outcomes


_shared: list[Any] = []
"""Of a child process: counters of all, and the barrier before the load."""


def _share(counters: Any, barrier: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the load
    _shared[:] = [counters, barrier]


def _run_part(run: LoadRun, part: LoadPart) -> LoadMeasurements:
    counters, barrier = _shared
    allow_descriptors((run.traffic.concurrency or _DESCRIPTORS_OF_ARRIVALS) + _OTHER_DESCRIPTORS)
    ready: Callable[[], object] = lambda: barrier.wait(_READY_TIMEOUT_S)  # noqa: E731
    return run_on_uvloop(run.client(part, counters).run(ready))


def allow_descriptors(count: int) -> None:
    """Raise the limit of open files to a number, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
