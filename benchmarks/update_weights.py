"""Measure the effect of online weight updates on requests.

    python benchmarks/update_weights.py [--model smollm2] [--streams 32] [--rounds 5] [--json FILE]

Streams run without a pause between requests, and the matrices of all layers are replaced, `rounds`
times with keys and values that are computed again, and as often with those that are kept. Printed
are the seconds until the new weights are in use; the longest time between two tokens of a stream in
the second before the first update, while weights are prepared, and over the exchange, with what is
computed again; and how many tokens had each version.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from options import options_of, save, show_table
from safetensors.torch import save_file

from hardpoint import AsyncLLM, SamplingParams

_QUIET_S = 3.0
_AFTER_S = 4.0  # after the exchange, in which what is recomputed comes to an end
_SIZES = {"down_proj": (576, 1536), "up_proj": (1536, 576), "gate_proj": (1536, 576)}


def main() -> None:
    """Measure, and print the table."""
    options = options_of(__doc__, model="smollm2", streams=32, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        torch.manual_seed(0)
        save_file(
            {
                f"model.layers.{layer}.mlp.{name}.weight": torch.randn(size) * 0.02
                for layer in range(30)
                for name, size in _SIZES.items()
            },
            file,
        )
        measured = asyncio.run(_measure(options.model, options.streams, options.rounds, file))
    heads = ("", "updates", "until in use", "longest gap, ms: before", "preparing", "exchange")
    rows = [
        [
            name,
            str(len(figures["seconds"])),
            f"{statistics.median(figures['seconds']):.2f} s",
            f"{1000 * measured['before']:.0f}",
            *(f"{1000 * statistics.median(figures[key]):.0f}" for key in ("preparing", "exchange")),
        ]
        for name, figures in measured["updates"].items()
    ]
    show_table("weight updates", heads, rows)
    print(f"tokens by version: {measured['tokens']}")
    save(options.json, measured)


async def _measure(model: str, streams: int, rounds: int, file: Path) -> dict[str, Any]:
    async with AsyncLLM(model) as llm:
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        gaps: list[tuple[float, float]] = []
        tokens: Counter[str] = Counter()
        numbers, is_done = itertools.count(), asyncio.Event()

        async def stream() -> None:
            while not is_done.is_set():
                last = None
                async for output in llm.generate(f"Story number {next(numbers)}:", params):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append((last, now))
                    last, completed = now, output
                assert last is not None
                ids, runs = completed.outputs[0].token_ids, completed.outputs[0].weight_runs or ()
                ends = [*(run.start for run in runs[1:]), len(ids)]
                for run, end in zip(runs, ends, strict=bool(runs)):
                    tokens[run.version] += end - run.start

        tasks = [asyncio.create_task(stream()) for _ in range(streams)]
        await asyncio.sleep(_QUIET_S)
        quiet = time.perf_counter() - _AFTER_S, time.perf_counter()
        updates: dict[str, list[tuple[float, float]]] = {"recomputed": [], "kept": []}
        for name, times in updates.items():
            for _ in range(rounds):
                began = time.perf_counter()
                await llm.weights.update(file, recompute=name == "recomputed")
                times.append((began, time.perf_counter()))
                await asyncio.sleep(_AFTER_S)
        is_done.set()
        await asyncio.gather(*tasks)
    return {
        "before": _longest(gap for gap in gaps if _is_within(gap, quiet)),
        "updates": {
            name: {
                "seconds": [used - began for began, used in times],
                "preparing": [_longest(g for g in gaps if _is_within(g, span)) for span in times],
                "exchange": [_longest(g for g in gaps if g[0] < used < g[1]) for _, used in times],
            }
            for name, times in updates.items()
        },
        "tokens": dict(tokens),
    }


def _is_within(gap: tuple[float, float], span: tuple[float, float]) -> bool:
    return span[0] <= gap[0] and gap[1] <= span[1]


def _longest(gaps: Iterable[tuple[float, float]]) -> float:
    return max((last - first for first, last in gaps), default=0.0)


if __name__ == "__main__":
    main()
