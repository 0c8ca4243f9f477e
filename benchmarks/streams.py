"""An engine whose outputs are streamed, in a process of its own; used by other benchmarks.

    python streams.py NAME FOLDER MODE

MODE is `async` (AsyncLLM) or `in-process` (LLM.stream, one stream). It answers each question, a
line of JSON on standard input, with the times of a closed loop: every stream sends a request, reads
it to its end, and sends the next one. Outputs have text and what is new.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from engines import MAX_MODEL_LEN, about, answer, vllm_settings


@dataclass(frozen=True)
class ClosedLoop:
    """A load of streams.

    Attributes:
        streams: number of streams.
        requests: each stream's number of requests.
        prompt, output: tokens of each request.
        seed: of the prompts, which are random.
        seconds: after which no output is awaited any more, from the first one.
    """

    streams: int
    requests: int
    prompt: int
    output: int
    seed: str
    seconds: float = 1e9


@dataclass
class Times:
    """What a closed loop took.

    Attributes:
        seconds: altogether.
        tokens: generated.
        first: seconds to the first token, per request.
        gaps: seconds between two outputs of a request.
        speed: tokens per second of one stream, from its first token on.
    """

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    speed: float = 0.0


class Streamer:
    """An open engine."""

    settings = ""

    def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield the number of new tokens of each output of a request."""
        raise NotImplementedError


class InProcess(Streamer):
    """Hardpoint in this process: one stream, which blocks the event loop."""

    def __init__(self, folder: str) -> None:
        """Open it."""
        from hardpoint import LLM

        self._llm = LLM(folder, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, progress=False)

    async def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield from LLM.stream."""
        from hardpoint import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for output in self._llm.stream(ids, params):
            yield len(output.outputs[0].token_ids)


class Async(Streamer):
    """Hardpoint's AsyncLLM."""

    def __init__(self, folder: str) -> None:
        """Open it."""
        from hardpoint import AsyncLLM

        self._llm = AsyncLLM(folder, dtype="bfloat16", max_model_len=MAX_MODEL_LEN)

    async def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield from AsyncLLM.generate."""
        from hardpoint import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._llm.generate(ids, params):
            yield len(output.outputs[0].token_ids)


class VllmAsync(Streamer):
    """vLLM's AsyncLLM."""

    def __init__(self, folder: str) -> None:
        """Open it."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=folder,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._llm: Any = AsyncLLM.from_engine_args(arguments)
        self._count = 0
        self.settings = vllm_settings()

    async def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield from AsyncLLM.generate."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._count += 1
        prompt = {"prompt_token_ids": ids}
        async for output in self._llm.generate(prompt, params, request_id=str(self._count)):
            yield len(output.outputs[0].token_ids)


async def run(engine: Streamer, load: ClosedLoop) -> Times:
    """Run a closed loop."""
    times = Times()

    async def stream(index: int) -> None:
        rng = random.Random(f"{load.seed}, {index}")
        for _ in range(load.requests):
            ids = [rng.randrange(100, 40_000) for _ in range(load.prompt)]
            await _read(engine, ids, load, times)

    start = time.perf_counter()
    await asyncio.gather(*(stream(index) for index in range(load.streams)))
    times.seconds = time.perf_counter() - start
    return times


async def _read(engine: Streamer, ids: list[int], load: ClosedLoop, times: Times) -> None:
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


async def serve(engine: Streamer, name: str) -> None:
    """Answer questions until there are no more."""
    await run(engine, ClosedLoop(1, 1, 16, 4, "first"))
    answer(about(name, engine.settings))
    while line := await asyncio.to_thread(sys.stdin.readline):
        times = await run(engine, ClosedLoop(**json.loads(line)))
        answer(dataclasses.asdict(times))


def main() -> None:
    """Open the engine and serve."""
    name, folder, mode = sys.argv[1:4]
    engine: Streamer
    if name == "vllm":
        engine = VllmAsync(folder)
    else:
        engine = Async(folder) if mode == "async" else InProcess(folder)
    asyncio.run(serve(engine, name))


if __name__ == "__main__":
    main()
