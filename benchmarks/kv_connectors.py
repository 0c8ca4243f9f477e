"""Measures what KV stores save: the time to the first token of a long prompt, computed and loaded.

    python benchmarks/kv_connectors.py [--tokens 4000] [--rounds 3] [--quick]

All variants in turns in one run, each in an engine of its own with the same settings: computed
(no connector), then each store, warm, that is after the same prompt was computed once and the
engine's own cache was reset; disk also cold, after the system dropped the pages of its files. Next
to each: the bytes that were loaded, and how long that took: the difference to the same prompt in
the engine's own cache.

A second table shows what saving costs others: output tokens per second of 16 streams that all store
their blocks, next to the same streams without a connector, in turns.

Stores whose server is not installed are left out, which is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import parser_of, save
from tables import show_table

from hardpoint import LLM, SamplingParams

_THREADS = 4


@dataclass(frozen=True)
class Setup:
    """A store and the configuration that uses it.

    Attributes:
        name: for the tables.
        config: tables of the configuration.
        before_load: called before the prompt is loaded, to make it cold for example.
        peer: configuration of another engine, which computes the prompt first.
    """

    name: str
    config: dict[str, Any]
    before_load: Callable[[], None] = lambda: None
    peer: dict[str, Any] | None = None


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__, rounds=3, peers=False)
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    parser.add_argument("--stores", default="memory,disk,redis,p2p", help="that are measured")
    parser.add_argument("--quick", action="store_true", help="a short prompt, one round")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 500, 1
    print(f"{os.cpu_count()} CPUs, {_THREADS} threads load")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        stores = args.stores.split(",")
        setups = [s for s in _setups(folder / "stores", stack) if s.name.split(",")[0] in stores]
        results["first token"] = _first_tokens(setups, args)
        results["saving"] = _saving(folder, args)
    save(args.json, results)


# The stores


def _setups(folder: Path, stack: contextlib.ExitStack) -> Iterator[Setup]:
    """Yield the stores that can run here."""
    folder.mkdir(parents=True, mode=0o700)
    yield Setup("memory", _stores("memory", size_bytes=4 << 30))
    path = folder / "disk"
    disk = _stores("disk", path=str(path), size_bytes=4 << 30)
    yield Setup("disk, warm", disk)
    yield Setup("disk, cold", disk, lambda: _drop_pages(path))
    if (address := _redis(folder, stack)) is not None:
        yield Setup("redis", _stores("redis", url=address))
    loading, computing = (f"ipc://{folder}/{name}.sock" for name in ("loading", "computing"))
    yield Setup(
        "p2p",
        _stores(
            "p2p",
            engine="loading",
            listen=loading,
            peers={"computing": computing},
            size_bytes=4 << 30,
        ),
        peer=_stores(
            "p2p",
            engine="computing",
            listen=computing,
            peers={"loading": loading},
            size_bytes=4 << 30,
        ),
    )


def _stores(store: str, *, engine: str | None = None, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": {"stores": [store], "engine_id": engine, "load_seconds": 60.0},
        "plugin": {store: options, "stores": {"threads": _THREADS}},
    }


def _redis(folder: Path, stack: contextlib.ExitStack) -> str | None:
    """Start a server; return its URL, None if there is no server or no client."""
    server = shutil.which("redis-server")
    try:
        import redis
    except ImportError:
        server = None
    if server is None:
        print("redis is left out: redis-server or the extra 'redis' is not installed")
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    client = redis.Redis(port=port)
    for _ in range(100):
        with contextlib.suppress(redis.ConnectionError):
            client.ping()
            break
        time.sleep(0.05)
    return f"redis://127.0.0.1:{port}/0"


def _drop_pages(path: Path) -> None:
    """Let the system drop the pages of all files of a folder."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# The first token


def _first_tokens(setups: list[Setup], args: argparse.Namespace) -> list[dict[str, Any]]:
    numbers = random.Random(0)
    prompts = [
        {"prompt_token_ids": [numbers.randrange(100, 40000) for _ in range(args.tokens)]}
        for _ in range(args.rounds)
    ]
    rows = [{"name": "computed", "seconds": _computed(prompts)}]
    for setup in setups:
        rows.append(_loaded(setup, prompts))
    computed = rows[0]["seconds"]
    cells = []
    for row in rows:
        line = [row["name"], f"{row['seconds']:.3f}", f"{computed / row['seconds']:.1f}"]
        if "bytes" in row:
            seconds = row["load_seconds"]
            line += [f"{row['bytes'] / 1e6:.0f}", f"{seconds:.3f}"]
            line.append(f"{row['bytes'] / seconds / 1e9:.2f}")
        else:
            line += [""] * 3
        cells.append(line)
    heads = ("", "seconds", "times faster", "MB", "loading, s", "GB/s")
    show_table(f"seconds to the first token of {args.tokens} tokens", heads, cells)
    return rows


def _open(config: dict[str, Any]) -> LLM:
    settings = {"kv_cache": {"memory_bytes": 2 << 30}, "dtype": "bfloat16"}
    return LLM("smollm2", config=settings | config)


def _computed(prompts: list[Any]) -> float:
    llm = _open({})
    try:
        _first_token(llm, {"prompt_token_ids": [5] * 64})
        return statistics.median(_first_token(llm, prompt) for prompt in prompts)
    finally:
        llm.close()


def _loaded(setup: Setup, prompts: list[Any]) -> dict[str, Any]:
    """Return how long it takes until the first token when the prompt's blocks are stored."""
    with contextlib.ExitStack() as stack:
        llm = _open(setup.config)
        stack.callback(llm.close)
        computing = llm
        if setup.peer is not None:
            computing = _open(setup.peer)
            stack.callback(computing.close)
        for prompt in prompts:
            _first_token(computing, prompt)
            _wait_until_stored(computing)
        computing.reset_prefix_cache()
        _first_token(llm, {"prompt_token_ids": [5] * 64})
        before = _tier(llm)
        seconds, cached = [], []
        for prompt in prompts:
            setup.before_load()
            seconds.append(_first_token(llm, prompt))
            cached.append(_first_token(llm, prompt))
        after = _tier(llm)
    blocks = after.loaded_blocks - before.loaded_blocks
    size = after.loaded_bytes - before.loaded_bytes
    if not blocks:
        raise SystemExit(f"{setup.name}: nothing was loaded; health: {llm.plugins.health()}")
    rounds = len(prompts)
    spent = statistics.median(a - b for a, b in zip(seconds, cached, strict=True))
    return {
        "name": setup.name,
        "seconds": statistics.median(seconds),
        "bytes": size / rounds,
        "load_seconds": spent,
    }


def _first_token(llm: LLM, prompt: Any) -> float:
    begin = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - begin


def _tier(llm: LLM) -> Any:
    """Return the totals of the only tier."""
    llm.generate([{"prompt_token_ids": [7] * 8}], SamplingParams(max_tokens=2))
    (tier,) = llm.engines.scheduler_stats().kv_tiers.values()
    return tier


def _wait_until_stored(llm: LLM) -> None:
    """Wait until the store gets no more blocks."""
    before = -1
    while (now := _tier(llm).stored_blocks) != before:
        before = now
        time.sleep(0.3)


# What saving costs others


def _saving(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    numbers = random.Random(1)
    count, length, tokens = (4, 64, 32) if args.quick else (16, 256, 128)
    variants: dict[str, dict[str, Any]] = {
        "no connector": {},
        "memory": _stores("memory", size_bytes=4 << 30),
        "disk": _stores("disk", path=str(folder / "saving"), size_bytes=4 << 30),
    }
    variants = {k: v for k, v in variants.items() if not v or k in args.stores.split(",")}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    engines = {name: _open(config) for name, config in variants.items()}
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    try:
        for number in range(args.rounds + 1):
            for name, llm in engines.items():
                prompts = [
                    {"prompt_token_ids": [numbers.randrange(100, 40000) for _ in range(length)]}
                    for _ in range(count)
                ]
                begin = time.perf_counter()
                llm.generate(prompts, params)
                if number:  # the first round is for warming up
                    rates[name].append(count * tokens / (time.perf_counter() - begin))
                time.sleep(0.5)
    finally:
        for llm in engines.values():
            llm.close()
    medians = {name: statistics.median(listed) for name, listed in rates.items()}
    plain = medians["no connector"]
    rows = [[name, f"{rate:.0f}", f"{rate / plain:.1%}"] for name, rate in medians.items()]
    title = f"{count} streams of {length} + {tokens} tokens, all stored"
    show_table(title, ("", "tokens/s", "of no connector"), rows)
    return medians


if __name__ == "__main__":
    main()
