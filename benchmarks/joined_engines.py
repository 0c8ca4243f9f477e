"""Time an engine that joins over TCP next to a local one, in turns: with keys (CURVE) and without.

    python benchmarks/joined_engines.py                    # the scripted model, then smollm2
    python benchmarks/joined_engines.py --model scripted --rounds 9

Prints, per number of requests, tokens per second of both and their ratio, and the microseconds that
joining adds to each step; then what it adds to a request of a long prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model
from hardpoint.toolkit.curve_keys import make_client


def toml(value: object) -> str:
    """Return a value in TOML, in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def free_address() -> str:
    """Return an address of this machine that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


@contextlib.contextmanager
def engines(folder: Path, own: dict[str, Any], *, keys: bool) -> Iterator[LLM]:
    """Open a local engine and one that joins."""
    address, file = free_address(), folder / "engine.toml"
    file.write_text("\n".join(f"{name} = {toml(value)}" for name, value in own.items()))
    command = [sys.executable, "-m", "hardpoint", "-q", "engine", "--config", str(file)]
    parallel: dict[str, Any] = {"data": 2, "local": 1, "join_address": address}
    command += ["--join", address]
    if keys:
        parallel["keys"] = str(folder / "keys")
        command += ["--keys", str(make_client(parallel["keys"], "other"))]
    threads = {"executor": {"threads": 1}}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as joining:
        try:
            with LLM(config=own | threads | {"parallel": parallel}) as llm:
                yield llm
        finally:
            joining.terminate()


def seconds(llm: LLM, rank: int, prompts: list[Any], params: SamplingParams) -> float:
    """Return the time that an engine takes for some prompts."""
    began = time.perf_counter()
    llm.generate(prompts, params, data_parallel_rank=rank)
    return time.perf_counter() - began


def compare(llm: LLM, name: str, count: int, tokens: int, rounds: int, prompt: list[int]) -> None:
    """Print the times of both engines, each the best of some rounds in turns."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*prompt, index + 1]} for index in range(count)]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for rank in (0, 1):
            taken = seconds(llm, rank, prompts, params)
            if turn:
                times[rank].append(taken)
    local, joined = map(min, times)  # others use the machine as well
    added = (joined - local) / tokens * 1e6
    print(
        f"{name}: {count} requests of {len(prompts[0]['prompt_token_ids'])} + {tokens} tokens: "
        f"local {count * tokens / local:.0f} tok/s, joined {count * tokens / joined:.0f} tok/s, "
        f"ratio {local / joined:.3f}, added {added:.0f} us per step",
        flush=True,
    )


def main() -> None:
    """Measure the models of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("scripted", "smollm2", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for model in ("scripted", "smollm2"):
        if options.model not in (model, "both"):
            continue
        for keys in (False, True):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                own: dict[str, Any] = {"model": "smollm2"}
                if model == "scripted":
                    path = write_scripted_model(folder / "model", max_position_embeddings=1 << 15)
                    own = scripted_config(path)
                name = f"{model}, {'CURVE' if keys else 'plain'}"
                with engines(folder, own, keys=keys) as llm:
                    tokens = 256 if model == "scripted" else 32
                    compare(llm, name, 1, tokens, options.rounds, [5, 6, 7])
                    compare(llm, name, 32, tokens, options.rounds, [5, 6, 7])
                    if model == "scripted":
                        compare(llm, name, 1, 1, options.rounds * 20, [5, 6, 7])
                        compare(llm, name, 1, 1, options.rounds, list(range(1, 250)) * 120)


if __name__ == "__main__":
    main()
