"""Microseconds of logits processors per step, compared with vLLM where it is installed.

    python benchmarks/logits.py                            # the whole table, one thread
    python benchmarks/logits.py --only min_p logit_bias --rounds 50 --json result.json

All built-ins are enabled. In a row of the table, all requests use one of them and no other. The
batch is in steady decode, driven like by the model runner: `update`, the model writes logits,
`apply`, every output grows by a token, `advance`. The three calls are timed, the rest is not.

Logits are written to several buffers in turn, so caches hold as little of them as after a model.
"warm" repeats the step on one buffer without writing it. Sparse processors are often measured like
that; the few logits that they access are then in the cache, which they are not in an engine.

Printed are medians. vLLM's processors are driven in the same way (`update_state(None)`, `apply`).
The figures of vLLM 0.32 on one thread are recorded, not measured in this run; compare them with
"warm".
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

from hardpoint.core.worker.sampling.pipeline import LogitsPipeline
from hardpoint.host.boundary.logits.processor_runner import ProcessorRunner
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.plugins import (
    Added,
    BatchUpdate,
    EngineConfig,
    LogitsContext,
    LogitsRequest,
    SamplingParams,
)
from hardpoint.testing import load_ops
from hardpoint.typed import prepared_type

SIZES = ((32, 49_152), (256, 49_152), (32, 128_256), (256, 128_256))
CPU = torch.device("cpu")
FIRST_TOKEN = 100  # ids under it are stop tokens and markers
STOP_TOKENS = [2]
PROMPT = 64
HISTORY = 136  # with the prompt: about 200 tokens
THINK, END_THINKING = [10], [11, 12]
ZIPF = 1.6  # about 30 tokens have 0.9 of the probability
BUFFERS = 3
MICROSECONDS = 1e6

Fields = Callable[[random.Random, int], dict[str, Any]]
"""Returns a request's arguments for one processor, given the size of the vocabulary."""
Model = Callable[[], torch.Tensor]
"""Returns a step's logits, [rows, vocab]."""


def timed(call: Callable[[], object]) -> float:
    """Return the microseconds that a call takes."""
    time.perf_counter()  # warms the caches for the clock itself
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * MICROSECONDS


def prompt(rng: random.Random, vocab: int) -> list[int]:
    """Return a prompt that ends where thinking begins."""
    return rng.choices(range(FIRST_TOKEN, vocab), k=PROMPT - len(THINK)) + THINK


def some_tokens(rng: random.Random, vocab: int, count: int) -> list[int]:
    """Return distinct token ids."""
    return rng.sample(range(FIRST_TOKEN, vocab), count)


@dataclass(frozen=True)
class Case:
    """A processor, and the arguments that all requests have for it."""

    processor: str
    fields: Fields


CASES = {
    "allowed_token_ids, 100": Case(
        "allowed_token_ids", lambda rng, vocab: {"allowed_token_ids": some_tokens(rng, vocab, 100)}
    ),
    "bad_words, 4": Case(
        "bad_words",
        lambda rng, vocab: {"sequences": [some_tokens(rng, vocab, n) for n in (1, 1, 2, 3)]},
    ),
    "min_tokens": Case("min_tokens", lambda *_: {"min_tokens": 1_000_000}),
    "logit_bias, 10 ids": Case(
        "logit_bias",
        lambda rng, vocab: {
            "logit_bias": {token: rng.uniform(-5, 5) for token in some_tokens(rng, vocab, 10)}
        },
    ),
    "penalties, 200 tokens": Case(
        "penalties",
        lambda *_: {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    ),
    "temperature": Case("temperature", lambda rng, _: {"temperature": rng.uniform(0.5, 1.5)}),
    "top_k 50": Case("top_k", lambda *_: {"top_k": 50}),
    "top_p 0.9": Case("top_p", lambda *_: {"top_p": 0.9}),
    "top_p 0.999": Case("top_p", lambda *_: {"top_p": 0.999}),
    "min_p 0.05": Case("min_p", lambda *_: {"min_p": 0.05}),
    "thinking_budget": Case(
        "thinking_budget",
        lambda *_: {"thinking_token_budget": 1_000_000, "opening": THINK, "closing": END_THINKING},
    ),
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
        pipeline: the pipeline, as the worker builds it.
        requests: the requests, one per row.
    """

    def __init__(self, plugins: PluginSet, rows: int, vocab: int, case: Case | None) -> None:
        """Build the pipeline and add `rows` requests, each with the case's arguments."""
        rng = random.Random(0)
        entries = plugins.entries("logits_processors")
        sizes = {
            "vocab_size": vocab,
            "max_num_seqs": rows,
            "ops": load_ops(torch.float32, CPU, "auto"),
        }
        runners = [
            ProcessorRunner(
                plugins.create(e, LogitsContext, device=CPU, **sizes),
                e.source,
                CPU,
                rows,
            )
            for e in entries
        ]
        self.pipeline = LogitsPipeline(runners, CPU)
        self._outputs = [rng.choices(range(FIRST_TOKEN, vocab), k=HISTORY) for _ in range(rows)]
        self._tokens = rng.choices(range(FIRST_TOKEN, vocab), k=rows)
        self._ids = torch.tensor(self._tokens)
        self.requests = [
            LogitsRequest(
                request_id=str(row),
                prompt_token_ids=prompt(rng, vocab),
                output_token_ids=output,
                params=SamplingParams(),
                stop_token_ids=STOP_TOKENS,
                arguments=self._arguments(runners, case, rng, vocab),
                row=row,
            )
            for row, output in enumerate(self._outputs)
        ]
        self._enter()

    @staticmethod
    def _arguments(
        runners: Sequence[ProcessorRunner], case: Case | None, rng: random.Random, vocab: int
    ) -> Mapping[str, Any]:
        if case is None:
            return {}
        (cls,) = (type(runner.processor) for runner in runners if runner.name == case.processor)
        return {case.processor: prepared_type(cls)(**case.fields(rng, vocab))}

    def _enter(self) -> None:
        added = tuple(
            Added(r.row, r.params, r.prompt_token_ids, r.output_token_ids) for r in self.requests
        )
        self.pipeline.update(BatchUpdate(len(added), added=added))
        for request in self.requests:
            fault = self.pipeline.start(request)
            assert fault is None, fault

    def step(self, model: Model) -> float:
        """Run a step; return its microseconds."""
        pipeline = self.pipeline
        spent = timed(lambda: pipeline.update(None))
        logits = model()
        requests = [request for request in self.requests if request.request_id]  # a new list
        spent += timed(lambda: pipeline.apply(logits, requests))
        for output, token in zip(self._outputs, self._tokens, strict=True):
            output.append(token)
        valid = [request for request in self.requests if request.request_id]
        return spent + timed(lambda: pipeline.advance(valid, self._tokens, self._ids))


class VllmBatch:
    """The same load with one of vLLM's processors."""

    def __init__(self, rows: int, vocab: int, case: Case) -> None:
        """Add `rows` requests with the case's arguments."""
        from vllm import SamplingParams as VllmParams
        from vllm.v1.sample import logits_processor as vllm

        rng = random.Random(0)
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
        self._processor = getattr(vllm, VLLM[case.processor])(config, CPU, False)
        self._outputs = [rng.choices(range(FIRST_TOKEN, vocab), k=HISTORY) for _ in range(rows)]
        added = []
        for row, output in enumerate(self._outputs):
            fields = case.fields(rng, vocab)
            limit = {"max_tokens": fields["min_tokens"]} if "min_tokens" in fields else {}
            params = VllmParams(stop_token_ids=STOP_TOKENS, **fields, **limit)
            added.append((row, params, prompt(rng, vocab), output))
        self._processor.update_state(
            vllm.BatchUpdate(batch_size=rows, removed=[], added=added, moved=[])
        )

    def step(self, model: Model) -> float:
        """Run a step; return its microseconds."""
        for output in self._outputs:
            output.append(FIRST_TOKEN)
        spent = timed(lambda: self._processor.update_state(None))
        logits = model()
        return spent + timed(lambda: self._processor.apply(logits))


class Memory:
    """Logits like those of a language model, and buffers to write them to."""

    def __init__(self, rows: int, vocab: int) -> None:
        """Create logits whose probabilities follow Zipf's law, in a different order in each row."""
        generator = torch.Generator().manual_seed(0)
        by_rank = torch.arange(1, vocab + 1).log().mul(-ZIPF)
        self._source = torch.stack(
            [by_rank[torch.randperm(vocab, generator=generator)] for _ in range(rows)]
        )
        self._buffers = [self._source.clone() for _ in range(BUFFERS)]

    def fresh(self) -> torch.Tensor:
        """Write logits to the least recently used buffer and return it."""
        self._buffers.append(self._buffers.pop(0))
        return self._buffers[-1].copy_(self._source)

    def warm(self) -> torch.Tensor:
        """Return the last used buffer unchanged."""
        return self._buffers[-1]


def median(batch: Batch | VllmBatch, model: Model, rounds: int) -> float:
    """Return the median microseconds of a step."""
    batch.step(model)  # warms up: later steps use its caches
    return statistics.median(batch.step(model) for _ in range(rounds))


def measure(arguments: argparse.Namespace, with_vllm: bool) -> list[dict[str, Any]]:
    """Measure every case at every size."""
    plugins = resolve_plugins(EngineConfig())
    installed = {entry.name for entry, _ in plugins.logits_processors()}
    only = installed if arguments.only is None else set(arguments.only)
    if unknown := only - installed:
        raise SystemExit(f"no such built-in: {', '.join(sorted(unknown))}")
    titles = [title for title, case in CASES.items() if case.processor in only]
    results = []
    for rows, vocab in arguments.sizes:
        memory = Memory(rows, vocab)
        for title in ("nothing", *titles):
            case = CASES.get(title)
            batches: dict[str, Batch | VllmBatch] = {"hardpoint": Batch(plugins, rows, vocab, case)}
            if case and with_vllm and case.processor in VLLM:
                batches["vllm"] = VllmBatch(rows, vocab, case)
            result: dict[str, Any] = {"all use": title, "rows": rows, "vocab": vocab}
            for engine, batch in batches.items():
                result[f"{engine}_fresh"] = median(batch, memory.fresh, arguments.rounds)
                result[f"{engine}_warm"] = median(batch, memory.warm, arguments.rounds)
            if case:
                result["vllm_recorded"] = RECORDED.get((case.processor, rows, vocab))
            results.append(result)
            print(f"{rows} x {vocab}, {title}: done", file=sys.stderr)
    return results


def show(results: list[dict[str, Any]], with_vllm: bool) -> None:
    """Print the table."""
    table = Table(title="microseconds per step, medians")
    columns = {"hardpoint_fresh": "Hardpoint", "hardpoint_warm": "warm"}
    if with_vllm:
        columns |= {"vllm_fresh": "vLLM", "vllm_warm": "warm"}
    columns["vllm_recorded"] = "(recorded)" if with_vllm else "vLLM (recorded)"
    table.add_column("all use")
    table.add_column("rows x vocab", justify="right")
    for title in columns.values():
        table.add_column(title, justify="right")
    for result in results:
        size = f"{result['rows']} x {result['vocab']}"
        cells = (result.get(key) for key in columns)
        shown = ("" if value is None else f"{value:,.1f}" for value in cells)
        table.add_row(result["all use"], size, *shown)
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
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
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
