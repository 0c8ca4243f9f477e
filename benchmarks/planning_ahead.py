"""Measures how much of the engine's own time planning ahead hides behind the device, in one run.

    python benchmarks/planning_ahead.py [--running 1 64 256] [--rounds 5] [--json result.json]

The model runs on a stand-in for an asynchronous device (`hardpoint.testing.timing`). A step takes a
stated time there. The host launches work there, and waits for tokens. What a step takes beyond
the time of the device is the engine's: it plans, builds inputs, samples, updates and hands out
tokens. Printed is this host time per step of one token per request, without
`scheduler.asynchronous` and with it, and the share that is hidden: 1 - (ahead - device) / (plain -
device). Both engines take turns. Of the rounds the shortest counts, less the shortest with few
tokens, so that adding requests is no part of it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from engines import opened, take_turns
from instruments import DEVICE_SECONDS, MAX_SEQS, ON_DEVICE
from loads import BYTES, Load
from options import options_of, save, show_table
from scenarios import scripted

DEVICE_MS = {1: 2.0, 64: 5.5, 256: 6.0}
"""Of a step, by the number of requests."""
ENGINES: dict[str, dict[str, Any]] = {
    f"{executor}, {place}": {
        "executor": {"use": executor},
        "engine": {"in_process": place == "in-process"},
    }
    for executor in ("uniproc", "multiproc")
    for place in ("in-process", "separate")
}
_FEW_TOKENS = 8


def measure(name: str, count: int, options: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds per step of both engines, and of the device."""
    device_ms = options.device_ms or DEVICE_MS.get(count, max(DEVICE_MS.values()))
    os.environ[DEVICE_SECONDS] = str(device_ms / 1000)
    variants = {
        mode: {
            **ENGINES[name],
            "scheduler": {"max_num_seqs": MAX_SEQS, "asynchronous": mode == "ahead"},
        }
        for mode in ("plain", "ahead")
    }
    lengths = _FEW_TOKENS, _FEW_TOKENS + options.tokens
    best: dict[str, list[float]] = {mode: [] for mode in variants}
    with tempfile.TemporaryDirectory() as folder:
        cache = {"num_blocks": 128 + (count + 1) * (lengths[1] // 16 + 2)}
        configs = {m: {**ON_DEVICE, **c, "kv_cache": cache} for m, c in variants.items()}
        peers = scripted(Path(folder), configs)
        with opened(peers, Path(folder)) as engines:
            for length in lengths:
                load = Load(count, (2, 2), (length, length), vocabulary=BYTES)
                answers = take_turns(engines, load.rounds(f"{length}", options.rounds))
                for mode, listed in answers.items():
                    best[mode].append(min(answer["seconds"] for answer in listed))
    milliseconds = {
        mode: (long - few) * 1000 / options.tokens for mode, (few, long) in best.items()
    }
    return milliseconds | {"device": device_ms}


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__,
        rounds=5,
        running=list(DEVICE_MS),
        device_ms=(float, "of each step; by default by size"),
        engines=ENGINES,
        tokens=(48, "output tokens per request"),
    )
    report: dict[str, dict[str, dict[str, float]]] = {}
    times = []
    for name in options.engines:
        report[name] = {}
        for count in options.running:
            milliseconds = report[name][str(count)] = measure(name, count, options)
            plain, ahead, device = (milliseconds[key] for key in ("plain", "ahead", "device"))
            cells = (device, plain, ahead, plain - device, ahead - device)
            hidden = 1 - (ahead - device) / (plain - device)
            times.append([name, count, *(f"{time:.2f}" for time in cells), f"{hidden:.0%}"])
    steps = "device", "step", "step ahead", "host", "host ahead", "hidden"
    show_table("Milliseconds per step", ("engine", "requests", *steps), times)
    save(options.json, report)


if __name__ == "__main__":
    main()
