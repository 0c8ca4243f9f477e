"""An engine in a process of its own, which other benchmarks ask (`engines.Engine`).

    python engine_process.py NAME FOLDER [OPTIONS]

It opens an engine of `backends.ENGINES` with the options (JSON), prints its version and settings,
then answers each line of standard input: a `Batch`, a `ClosedLoop` or a `LongPrompt`.
"""

from __future__ import annotations

import asyncio
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

MARK = "hardpoint-benchmark "


@dataclass(frozen=True)
class ClosedLoop:
    """Streams, each of which sends a request when the one before has ended.

    Attributes:
        streams: number of streams.
        requests: number of requests of each stream.
        prompt, output: tokens of each request.
        seed: seed of the prompts, which are random.
        seconds: time limit of a request, from its first output.
    """

    streams: int
    requests: int
    prompt: int
    output: int
    seed: str
    seconds: float = 1e9


@dataclass(frozen=True)
class LongPrompt:
    """Streams, and a long prompt that comes later.

    Attributes:
        streams: number of streams.
        output: tokens of each stream, whose prompts have 16.
        long: tokens of the long prompt, which gets 4 tokens.
        after: seconds after which it comes.
        seed: seed of the prompts.
    """

    streams: int
    output: int
    long: int
    after: float
    seed: str


@dataclass
class Times:
    """The durations of a closed loop.

    Attributes:
        seconds: duration of all requests.
        tokens: generated tokens.
        first: seconds to the first token, per request.
        gaps: seconds between two outputs of a request.
        speed: tokens per second of one stream, from its first token on.
        cpu: seconds of CPU of the frontend's process.
    """

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    speed: float = 0.0
    cpu: float = 0.0


def run_batch(engine: Backend, batch: Batch) -> dict[str, Any]:
    """Return the seconds of a batch, its drafts and, of outputs that may stop, their tokens."""
    engine.prepare(batch)
    before = engine.drafts() if batch.stop else (0, 0)
    start = time.perf_counter()
    outputs = engine.generate(batch)
    result: dict[str, Any] = {"seconds": time.perf_counter() - start}
    if batch.stop:
        drafts, accepted = (new - old for new, old in zip(engine.drafts(), before, strict=True))
        return result | {"outputs": outputs, "drafts": drafts, "accepted": accepted}
    assert outputs is None or [len(ids) for ids in outputs] == batch.outputs
    return result


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    """Return random token ids, which are valid in every engine."""
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


async def run_loop(engine: Backend, load: ClosedLoop) -> Times:
    """Run a closed loop."""
    times = Times()

    async def stream(index: int) -> None:
        rng = random.Random(f"{load.seed}, {index}")
        for _ in range(load.requests):
            await _read(engine, prompt_of(rng, load.prompt), load, times)

    start, cpu = time.perf_counter(), engine.cpu_seconds()
    await asyncio.gather(*(stream(index) for index in range(load.streams)))
    times.seconds = time.perf_counter() - start
    times.cpu = engine.cpu_seconds() - cpu
    return times


async def _read(engine: Backend, ids: list[int], load: ClosedLoop, times: Times) -> None:
    """Read one request's outputs to their end, or for the load's seconds."""
    start = last = time.perf_counter()
    first = 0.0
    tokens = later = 0
    outputs: Any = engine.stream(ids, load.output)
    async for count in outputs:
        now = time.perf_counter()
        tokens += count
        if not first:
            first = now
            times.first.append(now - start)
        else:
            later += count
            times.gaps.append(now - last)
        last = now
        if now - first > load.seconds:
            break
    await outputs.aclose()
    times.tokens += tokens
    times.speed = later / (last - first) if later else 0.0


async def run_long_prompt(engine: Backend, load: LongPrompt) -> dict[str, Any]:
    """Return the gaps between outputs of the first stream, and the times of the long prompt.

    Returns:
        `gaps`, pairs of a time and the seconds since the output before; `sent` and `first`, when
        the long prompt came and got its first token. Times are in seconds.
    """
    rng = random.Random(load.seed)
    gaps: list[tuple[float, float]] = []
    times: dict[str, Any] = {"gaps": gaps}
    start = time.perf_counter()

    async def read(ids: list[int], kept: list[tuple[float, float]]) -> None:
        last = None
        async for _ in engine.stream(ids, load.output):
            now = time.perf_counter() - start
            if last is not None:
                kept.append((now, now - last))
            last = now

    async def send(ids: list[int]) -> None:
        await asyncio.sleep(load.after)
        times["sent"] = time.perf_counter() - start
        async for _ in engine.stream(ids, 4):
            times.setdefault("first", time.perf_counter() - start)

    others = [read(prompt_of(rng, 16), []) for _ in range(load.streams - 1)]
    first = read(prompt_of(rng, 16), gaps)
    await asyncio.gather(first, send(prompt_of(rng, load.long)), *others)
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
    """Print what the engine is."""
    version = importlib.metadata.version(engine.package)
    print_answer({"version": version, "settings": engine.settings})


def print_answer(value: Any) -> None:
    """Print an answer, which the asking process finds among other output."""
    print(f"\n{MARK}{json.dumps(value)}", flush=True)


def main() -> None:
    """Open the engine and serve."""
    name, folder, *options = sys.argv[1:]
    engine = ENGINES[name](Path(folder), json.loads(options[0]) if options else {})
    try:
        if type(engine).generate is Backend.generate:
            asyncio.run(serve_streams(engine))
        else:
            serve(engine)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
