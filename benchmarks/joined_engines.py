"""Time an engine that joins over TCP next to a local one, in turns: with keys (CURVE) and without.

    python benchmarks/joined_engines.py                    # the scripted model, then smollm2
    python benchmarks/joined_engines.py --models scripted --rounds 9

Prints, per number of requests, tokens per second of both and their ratio, and the microseconds that
joining adds to each step; then what it adds to a request of a long prompt.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import SCRIPTED
from options import options_of, save, show_table

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model
from hardpoint.toolkit.curve_keys import make_client

PROMPT = [5, 6, 7]
CASES = {"scripted": ((1, 256), (32, 256), (1, 1)), "smollm2": ((1, 32), (32, 32))}
"""Numbers of requests and of output tokens, by model."""


def free_address() -> str:
    """Return an address of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def opened(folder: Path, model: str, *, has_keys: bool) -> Iterator[LLM]:
    """Open a local engine and a joined one."""
    address = free_address()
    config: dict[str, Any] = {"model": model}
    settings = {"model": model, "executor.threads": "1"}
    if model == "scripted":
        path = write_scripted_model(folder / "model", max_position_embeddings=1 << 15)
        config = scripted_config(path)
        settings |= {**SCRIPTED, "model": str(path)}
    command = [sys.executable, "-m", "hardpoint", "-q", "engine", "--join", address]
    command += [f"--set={name}={value}" for name, value in settings.items()]
    parallel: dict[str, Any] = {"data": 2, "local": 1, "join_address": address}
    if has_keys:
        parallel["keys"] = str(folder / "keys")
        command += ["--keys", str(make_client(parallel["keys"], "other"))]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as joining:
        try:
            with LLM(config=config | {"executor": {"threads": 1}, "parallel": parallel}) as llm:
                yield llm
        finally:
            joining.terminate()


def compare(
    llm: LLM, name: str, count: int, tokens: int, rounds: int, prompt: list[int]
) -> list[str]:
    """Return a row of the table: the best of some rounds in turns of both engines."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*prompt, index + 1]} for index in range(count)]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for rank in (0, 1):
            began = time.perf_counter()
            llm.generate(prompts, params, data_parallel_rank=rank)
            if turn:
                times[rank].append(time.perf_counter() - began)
    local, joined = map(min, times)  # others use the machine as well
    rates = (f"{count * tokens / best:.0f}" for best in (local, joined))
    load = f"{name}: {count} x {len(prompt) + 1}/{tokens}"
    return [load, *rates, f"{local / joined:.3f}", f"{(joined - local) / tokens * 1e6:.0f}"]


def main() -> None:
    """Measure the models of the command line."""
    options = options_of(__doc__, models=CASES, rounds=7)
    rows = []
    for model in options.models:
        for has_keys in (False, True):
            name = f"{model}, {'CURVE' if has_keys else 'plain'}"
            with (
                tempfile.TemporaryDirectory() as folder,
                opened(Path(folder), model, has_keys=has_keys) as llm,
            ):
                for count, tokens in CASES[model]:
                    rounds = options.rounds * (20 if tokens == 1 else 1)
                    rows.append(compare(llm, name, count, tokens, rounds, PROMPT))
                if model == "scripted":
                    long = list(range(1, 250)) * 120
                    rows.append(compare(llm, name, 1, 1, options.rounds, long))
    heads = ("load", "local, tok/s", "joined, tok/s", "ratio", "added, us per step")
    show_table("an engine that joined next to a local one", heads, rows)
    save(options.json, rows)


if __name__ == "__main__":
    main()
