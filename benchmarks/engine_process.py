"""An engine in a process of its own, which other benchmarks ask (`engines.Engine`).

    python engine_process.py NAME FOLDER OPTIONS

It opens an engine of `backends.ENGINES` with the options (JSON), prints its version and settings,
then answers each line of standard input: a `Batch`, a `ClosedLoop` or a `LongPrompt`.
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
    seconds: float = 1e9  # limit of a request, from its first output


@dataclass(frozen=True)
class LongPrompt:
    """Streams, and a long prompt that comes later."""

    streams: int
    output: int  # tokens of each stream, whose prompts have 16
    long: int  # tokens of the long prompt, which gets 4 tokens
    after: float  # seconds after which the long prompt comes
    seed: str  # of the prompts


@dataclass
class Times:
    """The durations of a closed loop."""

    seconds: float = 0.0  # of all requests
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token, per request
    gaps: list[float] = field(default_factory=list)  # seconds between two outputs of a request
    speed: float = 0.0  # tokens per second of one stream, from its first token on
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
            await _read(engine, random_ids(rng, load.prompt, VALID), load, times)

    start, cpu = time.perf_counter(), engine.cpu_seconds()
    await asyncio.gather(*(stream(index) for index in range(load.streams)))
    times.seconds, times.cpu = time.perf_counter() - start, engine.cpu_seconds() - cpu
    return times


async def _read(engine: Backend, ids: list[int], load: ClosedLoop, times: Times) -> None:
    """Read one request's outputs to their end, or for the load's seconds."""
    last, first, later = time.perf_counter(), 0.0, 0
    outputs: Any = engine.stream(ids, load.output)
    async for count in outputs:
        now = time.perf_counter()
        times.tokens += count
        (times.gaps if first else times.first).append(now - last)
        later += count if first else 0
        first, last = first or now, now
        if now - first > load.seconds:
            break
    await outputs.aclose()
    times.speed = later / (last - first) if later else 0.0


async def run_long_prompt(engine: Backend, load: LongPrompt) -> dict[str, Any]:
    """Return times in seconds: `sent` and `first` of the long prompt, `gaps` of the first stream.

    Each of `gaps` is the time of an output, and the seconds since the one before.
    """
    rng, gaps = random.Random(load.seed), list[tuple[float, float]]()
    times: dict[str, Any] = {"gaps": gaps}
    start = time.perf_counter()

    async def read(ids: list[int], gaps: list[tuple[float, float]]) -> None:
        last = None
        async for _ in engine.stream(ids, load.output):
            now = time.perf_counter() - start
            if last is not None:
                gaps.append((now, now - last))
            last = now

    async def send(ids: list[int]) -> None:
        await asyncio.sleep(load.after)
        times["sent"] = time.perf_counter() - start
        async for _ in engine.stream(ids, 4):
            times.setdefault("first", time.perf_counter() - start)

    readers = [
        read(random_ids(rng, 16, VALID), gaps if index == 0 else [])
        for index in range(load.streams)
    ]
    await asyncio.gather(*readers, send(random_ids(rng, load.long, VALID)))
    return times


async def run_streams(engine: Backend, question: dict[str, Any]) -> dict[str, Any]:
    """Run the streams of a question."""
    if "after" in question:
        return await run_long_prompt(engine, LongPrompt(**question))
    return dataclasses.asdict(await run_loop(engine, ClosedLoop(**question)))


async def serve_streams(engine: Backend) -> None:
    """Answer questions on the event loop of an asynchronous engine."""
    await run_loop(engine, ClosedLoop(1, 1, 16, 4, "first"))
    print_ready(engine)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print_answer(await run_streams(engine, json.loads(line)))


def serve(engine: Backend) -> None:
    """Answer questions of batches and, with an event loop for each, of streams."""
    run_batch(engine, Batch([[5] * 16, [6] * 16], [4, 4]))
    print_ready(engine)
    for line in sys.stdin:
        question = json.loads(line)
        if "prompts" in question:
            print_answer(run_batch(engine, Batch(**question)))
        else:
            print_answer(asyncio.run(run_streams(engine, question)))


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
