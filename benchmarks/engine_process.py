"""An engine in a process of its own, which other benchmarks ask (`engines.Engine`).

    python engine_process.py NAME FOLDER OPTIONS

It opens an engine of `backends.ENGINES` with the options (JSON), prints its version and settings,
then answers each line of standard input: a `Batch`, or a `ClosedLoop` if the engine streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends import ENGINES, Backend, Batch
from loads import VALID, random_ids

MARK = "hardpoint-benchmark "


@dataclass(frozen=True)
class ClosedLoop:
    """Streams with one running request each."""

    streams: int
    requests: int  # of each stream
    prompt: int  # tokens of each request
    output: int
    seed: str  # of the prompts


@dataclass
class Times:
    """The durations of a closed loop."""

    seconds: float = 0.0  # of all requests
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token, per request
    gaps: list[float] = field(default_factory=list)  # seconds between two outputs of a request
    cpu: float = 0.0  # seconds of CPU of the frontend's process


def run_batch(engine: Backend, batch: Batch) -> dict[str, Any]:
    """Return the times of a batch, its drafts and, of outputs that may stop, their tokens.

    Returns:
        `seconds`, and `cpu`, seconds of CPU of the frontend's process; with `batch.stop` also
        `outputs`, `drafts` and `accepted`.
    """
    engine.prepare(batch)
    before = engine.drafts() if batch.stop else (0, 0)
    start, cpu = time.perf_counter(), engine.cpu_seconds()
    outputs = engine.generate(batch)
    result: dict[str, Any] = {"seconds": time.perf_counter() - start}
    result["cpu"] = engine.cpu_seconds() - cpu
    if batch.stop:
        drafts, accepted = (new - old for new, old in zip(engine.drafts(), before, strict=True))
        return result | {"outputs": outputs, "drafts": drafts, "accepted": accepted}
    assert outputs is None or [len(ids) for ids in outputs] == batch.outputs
    return result


async def run_loop(engine: Backend, load: ClosedLoop) -> Times:
    """Run a closed loop."""
    times = Times()

    async def stream(index: int) -> None:
        rng = random.Random(f"{load.seed}, {index}")
        for _ in range(load.requests):
            last, gaps = time.perf_counter(), times.first
            async for count in engine.stream(random_ids(rng, load.prompt, VALID), load.output):
                now = time.perf_counter()
                gaps.append(now - last)
                times.tokens += count
                last, gaps = now, times.gaps

    start, cpu = time.perf_counter(), engine.cpu_seconds()
    await asyncio.gather(*(stream(index) for index in range(load.streams)))
    times.seconds, times.cpu = time.perf_counter() - start, engine.cpu_seconds() - cpu
    return times


async def serve_streams(engine: Backend) -> None:
    """Answer questions on the event loop of an asynchronous engine."""
    await run_loop(engine, ClosedLoop(1, 1, 16, 4, "first"))
    print_ready(engine)
    while line := await asyncio.to_thread(sys.stdin.readline):
        times = await run_loop(engine, ClosedLoop(**json.loads(line)))
        print_answer(dataclasses.asdict(times))


def serve(engine: Backend) -> None:
    """Answer questions of batches."""
    run_batch(engine, Batch([[5] * 16, [6] * 16], [4, 4]))
    print_ready(engine)
    for line in sys.stdin:
        print_answer(run_batch(engine, Batch(**json.loads(line))))


def print_ready(engine: Backend) -> None:
    """Print the version and the settings of the engine."""
    version = importlib.metadata.version(engine.package)
    print_answer({"version": version, "settings": engine.settings})


def print_answer(value: Any) -> None:
    """Print an answer, which the asking process finds among other output."""
    print(f"\n{MARK}{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    name, folder, options = sys.argv[1:]
    engine = ENGINES[name](Path(folder), json.loads(options))
    with contextlib.closing(engine):
        if type(engine).generate is Backend.generate:
            asyncio.run(serve_streams(engine))
        else:
            serve(engine)
