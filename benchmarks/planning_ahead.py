"""Measures how much of the engine's own time planning ahead hides behind the device, in one run.

    python benchmarks/planning_ahead.py [--running 1 64 256] [--rounds 5] [--json result.json]

The model runs on a stand-in for an asynchronous device (`hardpoint.testing.timing`). A step takes a
stated time there. The host launches work there, and waits for tokens. What a step takes beyond
the time of the device is the engine's: it plans, builds inputs, samples, updates and hands out
tokens. Printed is this host time per step of one token per request, without
`scheduler.asynchronous` and with it, and the share that is hidden: 1 - (ahead - device) / (plain -
device). Both engines take turns. Of the rounds the shortest counts, less the shortest with few
tokens, so that adding requests is no part of it. The median is that of the times between launches
of two steps; steps in which all requests begin a block of the KV cache take longer.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from engines import opened, take_turns
from instruments import MAX_SEQS, on_device
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
    """Return milliseconds per step of the device and of both engines, with their medians."""
    device_ms = options.device_ms or DEVICE_MS.get(count, max(DEVICE_MS.values()))
    lengths = _FEW_TOKENS, _FEW_TOKENS + options.tokens
    found = {"device": device_ms}
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        configs = {}
        for mode in ("plain", "ahead"):
            np.zeros((lengths[1] + 9) * (options.rounds + 1) * 2).tofile(folder / mode)
            configs[mode] = {
                **on_device(device_ms, folder / mode),
                **ENGINES[name],
                "scheduler": {"max_num_seqs": MAX_SEQS, "asynchronous": mode == "ahead"},
                "kv_cache": {"num_blocks": 128 + (count + 1) * (lengths[1] // 16 + 2)},
            }
        grammar = {"structured": {"regex": options.regex}, "ignore_eos": False}
        sampling = grammar if options.regex else {}
        peers = {
            mode: replace(peer, options={**peer.options, "sampling": sampling})
            for mode, peer in scripted(folder, configs).items()
        }
        with opened(peers, folder) as engines:
            seconds: dict[str, list[float]] = {mode: [] for mode in configs}
            for length in lengths:
                load = Load(count, (2, 2), (length, length), vocabulary=BYTES)
                answers = take_turns(engines, load.rounds(f"{length}", options.rounds))
                for mode, listed in answers.items():
                    seconds[mode].append(min(answer["seconds"] for answer in listed))
            for mode, (few, long) in seconds.items():
                found[mode] = (long - few) * 1000 / options.tokens
                launches = np.fromfile(folder / mode)
                periods = np.diff(launches[launches > 0])
                found[f"{mode}, median"] = float(np.median(periods)) * 1000
    return found


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__,
        rounds=5,
        running=list(DEVICE_MS),
        device_ms=(float, "of each step; by default by size"),
        engines=ENGINES,
        tokens=(100, "output tokens per request"),
        regex=("", "grammar of every request; the model repeats the letter A"),
    )
    report: dict[str, dict[str, dict[str, float]]] = {}
    rows = []
    for name in options.engines:
        report[name] = {}
        for count in options.running:
            found = report[name][str(count)] = measure(name, count, options)
            device, plain, ahead = (found[key] for key in ("device", "plain", "ahead"))
            hidden = 1 - (ahead - device) / (plain - device)
            times = device, plain, ahead, plain - device, ahead - device, found["ahead, median"]
            rows.append([name, count, *(f"{time:.2f}" for time in times), f"{hidden:.0%}"])
    steps = "device", "step", "step ahead", "host", "host ahead", "median ahead", "hidden"
    show_table("Milliseconds per step", ("engine", "requests", *steps), rows)
    save(options.json, report)


if __name__ == "__main__":
    main()
