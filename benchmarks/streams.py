"""An engine whose outputs are streamed, in a process of its own; used by other benchmarks.

    python streams.py NAME FOLDER MODE [STEP_MILLISECONDS]

MODE is `async` (AsyncLLM), `http` (hardpoint serve, /v1/completions) or `in-process` (LLM.stream,
one stream). It answers each question, a
line of JSON on standard input, with the times of a closed loop: every stream sends a request, reads
it to its end, and sends the next one. Outputs have text and what is new. A question with `after` is
answered with the times of streams while a long prompt is computed. STEP_MILLISECONDS sets
`scheduler.step_milliseconds` of `async`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from engines import MAX_MODEL_LEN, about, answer, vllm_settings
from http_streams import Client, running_server

_REQUEST_S = 3600.0


@dataclass(frozen=True)
class ClosedLoop:
    """A load of streams.

    Attributes:
        streams: number of streams.
        requests: each stream's number of requests.
        prompt, output: tokens of each request.
        seed: seed of the prompts, which are random.
        seconds: after which no output is awaited any more, from the first one.
    """

    streams: int
    requests: int
    prompt: int
    output: int
    seed: str
    seconds: float = 1e9


@dataclass(frozen=True)
class LongPrompt:
    """A load of streams, and a long prompt that comes later.

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
        seconds: altogether.
        tokens: generated.
        first: seconds to the first token, per request.
        gaps: seconds between two outputs of a request.
        speed: tokens per second of one stream, from its first token on.
        cpu: seconds of CPU that the frontend's process used: this one, or the server's.
    """

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    speed: float = 0.0
    cpu: float = 0.0


class Streamer:
    """An open engine."""

    settings = ""

    def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield the number of new tokens of each output of a request."""
        raise NotImplementedError

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process of the frontend."""
        return time.process_time()

    def close(self) -> None:
        """End what another process has of it."""


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

    def __init__(self, folder: str, step_milliseconds: str | None = None) -> None:
        """Open it."""
        from hardpoint import AsyncLLM

        config: dict[str, Any] = {}
        if step_milliseconds is not None:
            config = {"scheduler": {"step_milliseconds": float(step_milliseconds)}}
            self.settings = f"scheduler.step_milliseconds {step_milliseconds}"
        self._llm = AsyncLLM(folder, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, config=config)

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


class Http(Streamer):
    """Hardpoint's server, in a process of its own."""

    def __init__(self, folder: str) -> None:
        """Start it."""
        settings = ["dtype=bfloat16", f"max_model_len={MAX_MODEL_LEN}"]
        self._stack = contextlib.ExitStack()
        self._server = self._stack.enter_context(running_server(folder, settings))
        self._client = Client(self._server.url)
        self._model = folder

    async def stream(self, ids: list[int], tokens: int) -> AsyncIterator[int]:
        """Yield one for each chunk with text, and the other tokens at the end."""
        body = {"model": self._model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        chunks: asyncio.Queue[int] = asyncio.Queue()
        sending = self._client.send(
            "/v1/completions", body, _REQUEST_S, on_text=lambda: chunks.put_nowait(1)
        )
        asking = asyncio.create_task(sending)
        asking.add_done_callback(lambda _: chunks.put_nowait(0))
        try:
            while count := await chunks.get():
                yield count
            timeline = await asking
        finally:
            asking.cancel()
        if timeline.error or timeline.output_tokens is None:
            raise RuntimeError(f"the server's answer: {timeline.error or 'without usage'}")
        if rest := timeline.output_tokens - timeline.chunks:
            yield rest

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server's process, without the engine's."""
        from soak_parts.holdings import cpu_seconds

        return cpu_seconds(self._server.pid)

    def close(self) -> None:
        """End the server."""
        self._stack.close()


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

    start, cpu = time.perf_counter(), engine.cpu_seconds()
    await asyncio.gather(*(stream(index) for index in range(load.streams)))
    times.seconds = time.perf_counter() - start
    times.cpu = engine.cpu_seconds() - cpu
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


async def run_long_prompt(engine: Streamer, load: LongPrompt) -> dict[str, Any]:
    """Return the gaps between outputs of the first stream, and the times of the long prompt.

    Returns:
        `gaps`, pairs of a time and the seconds since the output before; `sent` and `first`, when
        the long prompt came and got its first token. Times are in seconds.
    """
    rng = random.Random(load.seed)
    gaps: list[tuple[float, float]] = []
    times: dict[str, Any] = {"gaps": gaps}
    start = time.perf_counter()

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(tokens)]

    async def read(ids: list[int], kept: list[tuple[float, float]]) -> None:
        last = None
        async for _ in engine.stream(ids, load.output):
            now = time.perf_counter() - start
            if last is not None:
                kept.append((now, now - last))
            last = now

    async def ask(ids: list[int]) -> None:
        await asyncio.sleep(load.after)
        times["sent"] = time.perf_counter() - start
        async for _ in engine.stream(ids, 4):
            times.setdefault("first", time.perf_counter() - start)

    others = [read(prompt(16), []) for _ in range(load.streams - 1)]
    await asyncio.gather(read(prompt(16), gaps), ask(prompt(load.long)), *others)
    return times


async def serve(engine: Streamer, name: str) -> None:
    """Answer questions until there are no more."""
    try:
        await run(engine, ClosedLoop(1, 1, 16, 4, "first"))
        answer(about(name, engine.settings))
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            if "after" in question:
                answer(await run_long_prompt(engine, LongPrompt(**question)))
            else:
                answer(dataclasses.asdict(await run(engine, ClosedLoop(**question))))
    finally:
        engine.close()


def main() -> None:
    """Open the engine and serve."""
    name, folder, mode, *more = sys.argv[1:]
    engine: Streamer
    if name == "vllm":
        engine = VllmAsync(folder)
    else:
        engine = {"async": Async, "http": Http, "in-process": InProcess}[mode](folder, *more)
    asyncio.run(serve(engine, name))


if __name__ == "__main__":
    main()
