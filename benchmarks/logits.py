"""What logits processors cost per step, in microseconds, beside vLLM's own where it is installed.

    python benchmarks/logits.py                            # the whole table, one thread
    python benchmarks/logits.py --only min_p logit_bias --rounds 50 --json result.json

Every built-in is on. In a row of the table everybody uses one of them, and nobody any other. The
batch is in steady decode, driven as the model runner does it: `update`, then the model would run,
`apply`, every output grows by a token, `advance`. The three calls are timed together.

Logits are written afresh before each step and taken from several buffers in turn, as the model
would leave them; that is not timed. "warm" repeats the step on one buffer without that: the
caches then hold what a sparse processor touches, which they do not in an engine.

Shown are medians. vLLM's processors are driven in the same way (`update_state(None)`, `apply`).
What was recorded of vLLM 0.32 elsewhere, on one thread, is shown as such and is not a measurement
of this run; its sparse figures are such as a warm loop gives.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hardpoint.core.sampling.pipeline import LogitsPipeline
from hardpoint.core.sampling.stages import Stage
from hardpoint.plugins import (
    Added,
    BatchUpdate,
    EngineConfig,
    LogitsContext,
    LogitsRequest,
    PluginSet,
    SamplingParams,
    resolve_plugins,
)

SIZES = ((32, 49_152), (256, 49_152), (32, 128_256), (256, 128_256))
CPU = torch.device("cpu")
FIRST_TOKEN = 100  # ids under it are kept for stop tokens and markers
STOP_TOKENS = [2]
PROMPT = 64
HISTORY = 136  # with the prompt: about 200 tokens
BUFFERS = 3
MICROSECONDS = 1e6

Fields = Callable[[random.Random, int], dict[str, Any]]
"""Makes a request's arguments for one processor, given a vocabulary's size."""


def some_tokens(rng: random.Random, vocab: int, count: int) -> list[int]:
    """Return different token ids."""
    return rng.sample(range(FIRST_TOKEN, vocab), count)


CASES: dict[str, Fields] = {
    "allowed_token_ids": lambda rng, v: {"allowed_token_ids": some_tokens(rng, v, 100)},
    "bad_words": lambda rng, v: {
        "sequences": [some_tokens(rng, v, length) for length in (1, 1, 2, 3)]
    },
    "min_tokens": lambda rng, v: {"min_tokens": 1_000_000},  # noqa: ARG005
    "logit_bias": lambda rng, v: {
        "logit_bias": {token: rng.uniform(-5, 5) for token in some_tokens(rng, v, 10)}
    },
    "penalties": lambda rng, v: {  # noqa: ARG005
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "temperature": lambda rng, v: {"temperature": rng.uniform(0.5, 1.5)},  # noqa: ARG005
    "top_k": lambda rng, v: {"top_k": 50},  # noqa: ARG005
    "top_p": lambda rng, v: {"top_p": 0.9},  # noqa: ARG005
    "min_p": lambda rng, v: {"min_p": 0.05},  # noqa: ARG005
    "thinking_budget": lambda rng, v: {  # noqa: ARG005
        "thinking_token_budget": 1_000_000,
        "start": [10],
        "end": [11, 12],
    },
}

VLLM = {
    "min_p": "MinPLogitsProcessor",
    "logit_bias": "LogitBiasLogitsProcessor",
    "min_tokens": "MinTokensLogitsProcessor",
}
RECORDED: dict[tuple[str, int, int], float] = {
    ("min_p", 32, 49_152): 3221,
    ("min_p", 256, 128_256): 112_113,
    ("logit_bias", 32, 49_152): 9.3,
    ("logit_bias", 256, 128_256): 22,
    ("min_tokens", 32, 49_152): 4.7,
    ("min_tokens", 256, 128_256): 11,
}


class Batch:
    """Requests in steady decode through the pipeline of all built-ins.

    Attributes:
        pipeline: as the worker builds it.
        requests: one per row.
    """

    def __init__(self, plugins: PluginSet, rows: int, vocab: int, users: str | None) -> None:
        """Build the pipeline and add `rows` requests that use the processor `users`, or none."""
        rng = random.Random(0)
        entries = plugins.entries("logits_processors")
        stages = [
            Stage(
                plugins.create(e, LogitsContext, device=CPU, vocab_size=vocab, max_num_seqs=rows),
                e.source,
                CPU,
                rows,
            )
            for e in entries
        ]
        self.pipeline = LogitsPipeline(stages, CPU)
        self._outputs = [
            [rng.randrange(FIRST_TOKEN, vocab) for _ in range(HISTORY)] for _ in range(rows)
        ]
        self._tokens = [rng.randrange(FIRST_TOKEN, vocab) for _ in range(rows)]
        self._ids = torch.tensor(self._tokens)
        self.requests = [
            LogitsRequest(
                request_id=str(row),
                prompt_token_ids=[rng.randrange(FIRST_TOKEN, vocab) for _ in range(PROMPT)],
                output_token_ids=output,
                params=SamplingParams(),
                stop_token_ids=STOP_TOKENS,
                arguments=self._arguments(stages, users, rng, vocab),
                row=row,
            )
            for row, output in enumerate(self._outputs)
        ]
        self._enter()

    @staticmethod
    def _arguments(
        stages: Sequence[Stage], users: str | None, rng: random.Random, vocab: int
    ) -> Mapping[str, Any]:
        if users is None:
            return {}
        cls = next(type(stage.processor) for stage in stages if stage.name == users)
        return {users: cls.Arguments(**CASES[users](rng, vocab))}

    def _enter(self) -> None:
        added = tuple(
            Added(r.row, r.params, r.prompt_token_ids, r.output_token_ids) for r in self.requests
        )
        self.pipeline.update(BatchUpdate(len(added), added=added))
        for request in self.requests:
            fault = self.pipeline.start(request)
            assert fault is None, fault

    def step(self, logits: torch.Tensor) -> float:
        """Run a step; return its microseconds."""
        requests, sound = list(self.requests), list(self.requests)
        pipeline, clock = self.pipeline, time.perf_counter
        began = clock()
        pipeline.update(None)
        pipeline.apply(logits, requests, {}, {})
        first = clock() - began
        for output, token in zip(self._outputs, self._tokens, strict=True):
            output.append(token)
        began = clock()
        faults = pipeline.advance(sound, self._tokens, self._ids)
        second = clock() - began
        assert not faults, faults
        return (first + second) * MICROSECONDS


class VllmBatch:
    """The same with one of vLLM's processors."""

    def __init__(self, rows: int, vocab: int, users: str) -> None:
        """Add `rows` requests that use the processor."""
        from vllm import SamplingParams as VllmParams
        from vllm.v1.sample import logits_processor as vllm

        rng = random.Random(0)
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
        self._processor = getattr(vllm, VLLM[users])(config, CPU, False)
        self._outputs = [
            [rng.randrange(FIRST_TOKEN, vocab) for _ in range(HISTORY)] for _ in range(rows)
        ]
        added = []
        for row, output in enumerate(self._outputs):
            fields = CASES[users](rng, vocab)
            limit = {"max_tokens": fields["min_tokens"]} if "min_tokens" in fields else {}
            params = VllmParams(stop_token_ids=STOP_TOKENS, **fields, **limit)
            added.append((row, params, list(range(PROMPT)), output))
        self._processor.update_state(
            vllm.BatchUpdate(batch_size=rows, removed=[], added=added, moved=[])
        )

    def step(self, logits: torch.Tensor) -> float:
        """Run a step; return its microseconds."""
        for output in self._outputs:
            output.append(FIRST_TOKEN)
        began = time.perf_counter()
        self._processor.update_state(None)
        self._processor.apply(logits)
        return (time.perf_counter() - began) * MICROSECONDS


@dataclass(frozen=True)
class Memory:
    """Logits as a model leaves them, and buffers to write them to."""

    source: torch.Tensor
    buffers: list[torch.Tensor]

    @classmethod
    def of(cls, rows: int, vocab: int) -> Memory:
        """Make logits spread as a language model's are: few likely tokens, many unlikely."""
        generator = torch.Generator().manual_seed(0)
        source = torch.randn(rows, vocab, generator=generator).mul_(3)
        return cls(source, [torch.empty_like(source) for _ in range(BUFFERS)])


def fresh(batch: Batch | VllmBatch, memory: Memory, rounds: int) -> list[float]:
    """Time steps on logits that were just written."""
    times = []
    for number in range(rounds + 1):
        buffer = memory.buffers[number % BUFFERS].copy_(memory.source)
        times.append(batch.step(buffer))
    return times[1:]  # the first builds what the others keep


def warm(batch: Batch | VllmBatch, memory: Memory, rounds: int) -> list[float]:
    """Time steps that follow each other on one buffer."""
    return [batch.step(memory.buffers[0]) for _ in range(rounds + 1)][1:]


def measure(arguments: argparse.Namespace, with_vllm: bool) -> list[dict[str, Any]]:
    """Measure every case at every size."""
    plugins = resolve_plugins(EngineConfig())
    names = [entry.name for entry, _ in plugins.logits_processors() if entry.name in CASES]
    wanted = [name for name in names if not arguments.only or name in arguments.only]
    results = []
    for rows, vocab in arguments.sizes:
        memory = Memory.of(rows, vocab)
        for name in (None, *wanted):
            batches: dict[str, Batch | VllmBatch] = {"hardpoint": Batch(plugins, rows, vocab, name)}
            if with_vllm and name in VLLM:
                batches["vllm"] = VllmBatch(rows, vocab, name)
            result: dict[str, Any] = {"processor": name, "rows": rows, "vocab": vocab}
            for engine, batch in batches.items():
                for how in (fresh, warm):
                    times = how(batch, memory, arguments.rounds)
                    result[f"{engine}_{how.__name__}"] = statistics.median(times)
            result["vllm_recorded"] = RECORDED.get((name or "", rows, vocab))
            results.append(result)
            print(f"{rows} x {vocab}, {name or 'nobody'}: done", file=sys.stderr)
    return results


def show(results: list[dict[str, Any]], with_vllm: bool) -> None:
    """Print the table."""
    table = Table(title="microseconds per step, medians")
    columns = {"hardpoint_fresh": "Hardpoint", "hardpoint_warm": "warm"}
    if with_vllm:
        columns |= {"vllm_fresh": "vLLM", "vllm_warm": "warm"}
    columns["vllm_recorded"] = "vLLM (recorded)"
    table.add_column("everybody uses")
    table.add_column("rows x vocabulary", justify="right")
    for title in columns.values():
        table.add_column(title, justify="right")
    for result in results:
        size = f"{result['rows']} x {result['vocab']}"
        cells = (result.get(key) for key in columns)
        shown = ("" if value is None else f"{value:,.1f}" for value in cells)
        table.add_row(result["processor"] or "nothing", size, *shown)
    Console(width=100).print(table)


def size(text: str) -> tuple[int, int]:
    """Read "32x49152"."""
    rows, vocab = text.split("x")
    return int(rows), int(vocab)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", help="processors; default: all")
    parser.add_argument("--sizes", nargs="*", type=size, default=SIZES, help="32x49152, ...")
    parser.add_argument("--rounds", type=int, default=30, help="counted steps (default 30)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with_vllm = importlib.util.find_spec("vllm") is not None
    if not with_vllm:
        print("vLLM is not installed: its processors are not measured", file=sys.stderr)
    with torch.inference_mode():
        results = measure(arguments, with_vllm)
    show(results, with_vllm)
    if arguments.json:
        about = {"rounds": arguments.rounds, "threads": arguments.threads, "cpus": os.cpu_count()}
        arguments.json.write_text(json.dumps(about | {"results": results}, indent=2))


if __name__ == "__main__":
    main()
