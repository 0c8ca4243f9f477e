"""Decoding with LoRA adapters against decoding without, in Hardpoint and in vLLM, in one run.

    python benchmarks/adapters.py [--streams 32] [--tokens 64] [--rounds 3] [--peers vllm]
        [--python vllm=/opt/vllm/bin/python] [--folder DIR] [--json FILE]

Adapters of rank 8 on all linear layers, with random weights, are written first. Each engine lives
in a process of its own, with room for all adapters, and generates the same prompts round by round:
without adapters, and with 1, 8 and as many adapters as streams, dealt out in turn. Printed are
medians of tokens per second, and the part of the rate without adapters that is left.

This file is also the program of such a process: `python adapters.py --engine NAME FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines import add_arguments, choose, environment, exported

RANK = 8
PROMPT_TOKENS = 32
KNOWN = ("hardpoint", "vllm")
MARK = "adapters "

Run = Callable[[Sequence[list[int]], int, Sequence[int | None]], None]
"""Generates so many tokens for each prompt, each with the adapter of a number, or none."""


def write_adapters(checkpoint: Path, folder: Path, count: int) -> None:
    """Write adapters of all linear layers as PEFT does."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((checkpoint / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    targets = [name.partition(".")[2] for name in sizes]
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": targets}
    torch.manual_seed(0)
    for number in range(count):
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (rows, columns) in sizes.items():
                start = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{start}.lora_A.weight"] = torch.randn(RANK, columns) * 0.02
                tensors[f"{start}.lora_B.weight"] = torch.randn(rows, RANK) * 0.02
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(stated))


def open_hardpoint(checkpoint: Path, adapters: Path, count: int) -> Run:
    """Open Hardpoint; return what runs a batch."""
    from hardpoint import LLM, LoRARequest, SamplingParams

    config = {"adapters": {"max_loras": count, "max_lora_rank": RANK, "max_cpu_loras": count}}
    llm = LLM(str(checkpoint), dtype="bfloat16", max_model_len=2048, config=config, progress=False)
    loras = [
        llm.adapters.add(LoRARequest(f"a{number}", number + 1, str(adapters / str(number))))
        for number in range(count)
    ]

    def run(prompts: Sequence[list[int]], tokens: int, chosen: Sequence[int | None]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        given = [None if number is None else loras[number] for number in chosen]
        llm.generate(list(prompts), params, lora_request=given)

    return run


def open_vllm(checkpoint: Path, adapters: Path, count: int) -> Run:
    """Open vLLM; return what runs a batch."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(checkpoint),
        dtype="bfloat16",
        max_model_len=2048,
        enable_lora=True,
        max_loras=count,
        max_cpu_loras=count,
        max_lora_rank=RANK,
    )
    loras = [
        LoRARequest(f"a{number}", number + 1, str(adapters / str(number)))
        for number in range(count)
    ]

    def run(prompts: Sequence[list[int]], tokens: int, chosen: Sequence[int | None]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        given = [None if number is None else loras[number] for number in chosen]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        llm.generate(asked, params, lora_request=given, use_tqdm=False)

    return run


OPENED = {"hardpoint": open_hardpoint, "vllm": open_vllm}


def serve(name: str, options: dict[str, Any]) -> None:
    """Open an engine, and measure what it is asked for."""
    folder, streams = Path(options["folder"]), options["streams"]
    run = OPENED[name](folder / "checkpoint", folder / "adapters", streams)
    numbers = random.Random(1)
    found: dict[str, list[float]] = {}
    counts = [0, 1, min(8, streams), streams]
    for turn in range(options["rounds"] + 1):  # the first is not counted
        for count in counts:
            prompts = [
                [numbers.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
                for _ in range(streams)
            ]
            chosen = [index % count if count else None for index in range(streams)]
            begun = time.perf_counter()
            run(prompts, options["tokens"], chosen)
            rate = streams * options["tokens"] / (time.perf_counter() - begun)
            if turn:
                found.setdefault(str(count), []).append(rate)
    print(f"{MARK}{json.dumps(found)}", flush=True)


def main() -> None:
    """Measure, and print the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=KNOWN, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="?", help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.engine:
        serve(arguments.engine, json.loads(arguments.options))
        return
    _compare(arguments)


def _compare(arguments: argparse.Namespace) -> None:
    import subprocess

    from rich.console import Console
    from rich.table import Table

    found: dict[str, dict[str, list[float]]] = {}
    with exported(arguments.folder) as folder:
        write_adapters(folder / "checkpoint", folder / "adapters", arguments.streams)
        options = {
            "folder": str(folder),
            **{name: getattr(arguments, name) for name in ("streams", "tokens", "rounds")},
        }
        for name, python in choose(arguments, KNOWN).items():
            command = [python, __file__, "--engine", name, json.dumps(options)]
            ended = subprocess.run(
                command,
                env=environment(name, python),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            (line,) = (x for x in ended.stdout.splitlines() if x.startswith(MARK))
            found[name] = json.loads(line.removeprefix(MARK))
    table = Table("engine", "adapters", "tokens/s", "of none")
    for name, rates in found.items():
        medians = {count: statistics.median(values) for count, values in rates.items()}
        for count, rate in medians.items():
            table.add_row(name, count, f"{rate:.0f}", f"{rate / medians['0']:.2f}")
    Console(width=100).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.exit(main())
