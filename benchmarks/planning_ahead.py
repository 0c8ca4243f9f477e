"""Measures how much of the engine's own time planning ahead hides behind the device, in one run.

    python benchmarks/planning_ahead.py [--running 1 32 256] [--rounds 5] [--json result.json]
    python benchmarks/planning_ahead.py --model smollm2.gguf --running 32

The model's forward pass takes a stated time, in which it sleeps, as a worker does that waits for a
GPU. What a step takes beyond that time is the engine's: it plans, builds inputs, samples, updates
and hands out tokens. Printed is this host time per step of one token per request, without
`scheduler.asynchronous` and with it, and the share that is hidden: 1 - (ahead - device) / (plain -
device). Both engines take turns. Of the rounds the shortest counts, less the shortest with few
tokens, so that adding requests is no part of it.

With `--model` a real model is measured instead, which computes on the cores that the engine needs:
tokens per second of both.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from engines import parser_of, save
from tables import show_table

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import AttentionContext, ModelContext
from hardpoint.testing import (
    HistoryAttention,
    ScriptedModel,
    scripted_config,
    write_scripted_model,
)

DEVICE_MS = {1: 2.0, 32: 4.0, 256: 16.0}
"""Of a step, by the number of requests; more than the engine takes itself."""

ENGINES: dict[str, dict[str, Any]] = {
    f"{executor}, {place}": {
        "executor": {"use": executor},
        "engine": {"in_process": place == "in-process"},
    }
    for executor in ("uniproc", "multiproc")
    for place in ("in-process", "separate")
}
_MAX_SEQS = 256
AHEAD: dict[bool, dict[str, Any]] = {
    ahead: {"max_num_seqs": _MAX_SEQS, "asynchronous": ahead} for ahead in (False, True)
}
_SECONDS = "HARDPOINT_BENCHMARK_DEVICE_SECONDS"
_FEW_TOKENS = 8


class Device(HistoryAttention):
    """The only layer of a model, which a device computes in a stated time."""

    contract = 1

    def __init__(self, context: AttentionContext) -> None:
        """Read the seconds of a step."""
        super().__init__(context)
        self._seconds = float(os.environ[_SECONDS])

    def attend(self, spec: Any, cache: Any, plan: Any, q: torch.Tensor, *_: Any) -> torch.Tensor:  # noqa: ARG002
        """Wait, without the interpreter's lock."""
        time.sleep(self._seconds)
        return q


class SameToken(ScriptedModel):
    """A model that gives the same token for ever, so that the host computes nothing for it."""

    contract = 1

    def __init__(self, context: ModelContext) -> None:
        """Make the logits of all steps."""
        super().__init__(context)
        self._logits = torch.zeros(_MAX_SEQS, context.config.vocab_size)
        self._logits[:, 65] = 1.0

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocab]."""
        return self._logits[: len(hidden)]


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=5, peers=False)
    parser.add_argument("--running", type=int, nargs="+", default=list(DEVICE_MS))
    parser.add_argument("--device-ms", type=float, help="of each step; by default by size")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--tokens", type=int, default=48, help="output tokens per request")
    parser.add_argument("--model", help="a real one, instead of a device of a stated time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_scripted_model(Path(folder))
        report = {
            name: {
                str(count): _measure(Path(folder), settings, count, arguments)
                for count in arguments.running
            }
            for name, settings in ENGINES.items()
            if name in arguments.engines
        }
    (_show_rates if arguments.model else _show)(report)
    save(arguments.json, report)


def _measure(
    folder: Path, settings: Mapping[str, Any], count: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return milliseconds per step of both engines, and of the device."""
    device_ms = arguments.device_ms or DEVICE_MS.get(count, max(DEVICE_MS.values()))
    os.environ[_SECONDS] = str(device_ms / 1000)
    lengths = _FEW_TOKENS, _FEW_TOKENS + arguments.tokens
    best = {(ahead, length): float("inf") for ahead in AHEAD for length in lengths}
    with ExitStack() as stack:
        engines = {}
        for ahead, scheduler in AHEAD.items():
            config = _config(folder, count, lengths[1], arguments)
            engines[ahead] = LLM(config={**config, **settings, "scheduler": scheduler})
            stack.callback(engines[ahead].close)
        for index in range(arguments.rounds + 1):
            rng = random.Random(index)
            prompts = [[rng.randrange(1, 250) for _ in range(2)] for _ in range(count)]
            for ahead, length in best:
                params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                began = time.perf_counter()
                engines[ahead].generate(prompts, params)
                taken = time.perf_counter() - began
                if index:  # the first round warms up
                    best[ahead, length] = min(best[ahead, length], taken)
    found = {
        name: (best[ahead, lengths[1]] - best[ahead, lengths[0]]) * 1000 / arguments.tokens
        for name, ahead in (("plain", False), ("ahead", True))
    }
    return found if arguments.model else found | {"device": _slept_ms(device_ms)}


def _config(folder: Path, count: int, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of an engine with room for all requests."""
    size = {"max_model_len": length + 16}
    if arguments.model:
        return {"model": arguments.model, "device": "cpu", **size}
    model = {"use": f"{__name__}:SameToken", "name": "ScriptedForCausalLM"}
    return {
        **scripted_config(folder),
        **size,
        "plugins": {"enable": [model]},
        "attention": {"use": f"{__name__}:Device"},
        "kv_cache": {"num_blocks": (count + 1) * (length // 16 + 2)},
    }


def _slept_ms(milliseconds: float) -> float:
    """Return the milliseconds that a sleep of so many really takes."""
    rounds = 20
    began = time.perf_counter()
    for _ in range(rounds):
        time.sleep(milliseconds / 1000)
    return (time.perf_counter() - began) * 1000 / rounds


def _show(report: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    rows = []
    for name, sizes in report.items():
        for count, found in sizes.items():
            device, plain, ahead = found["device"], found["plain"], found["ahead"]
            times = (device, plain, ahead, plain - device, ahead - device)
            hidden = 1 - (ahead - device) / (plain - device)
            rows.append([name, count, *(f"{time:.2f}" for time in times), f"{hidden:.0%}"])
    heads = ("engine", "requests", "device", "step", "step ahead", "host", "host ahead", "hidden")
    show_table("Milliseconds per step", heads, rows)


def _show_rates(report: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    rows = []
    for name, sizes in report.items():
        for count, found in sizes.items():
            plain, ahead = (int(count) * 1000 / found[mode] for mode in ("plain", "ahead"))
            rows.append([name, count, f"{plain:.0f}", f"{ahead:.0f}", f"{ahead / plain:.2f}"])
    show_table("Tokens per second", ("engine", "requests", "plain", "ahead", "ahead / plain"), rows)


if __name__ == "__main__":
    # Workers import what they run by its name, which `__main__` is not.
    import planning_ahead

    planning_ahead.main()
