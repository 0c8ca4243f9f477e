"""Measure savings of KV stores: the time to the first token of a long prompt, computed and loaded.

    python benchmarks/kv_connectors.py [--tokens 4000] [--rounds 3]
    python benchmarks/kv_connectors.py --tokens 500 --rounds 1   # whether it runs

All variants in turns in one run, each in an engine of its own with the same settings: computed
(no connector), then each store, warm, that is after the same prompt was computed once and the
engine's own cache was reset; disk also cold, after the system dropped the pages of its files. Next
to each: the bytes that were loaded, and how long that took: the difference to the same prompt in
the engine's own cache.

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

from loads import VALID, random_ids
from options import options_of, save, show_table

from hardpoint import LLM, SamplingParams

THREADS = 4
SIZE = 4 << 30
SETTINGS: dict[str, Any] = {"kv_cache": {"memory_bytes": 2 << 30}}


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


def stored(store: str, *, engine: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the tables of a configuration with a store."""
    return {
        "kv_connector": {"stores": [store], "engine_id": engine, "load_seconds": 60.0},
        "plugin": {store: options, "stores": {"threads": THREADS}},
    }


def setups(folder: Path, stack: contextlib.ExitStack) -> Iterator[Setup]:
    """Yield the stores that can run here."""
    yield Setup("memory", stored("memory", size_bytes=SIZE))
    path = folder / "disk"
    disk = stored("disk", path=str(path), size_bytes=SIZE)
    yield Setup("disk, warm", disk)
    yield Setup("disk, cold", disk, lambda: drop_pages(path))
    if (address := start_redis(folder, stack)) is not None:
        yield Setup("redis", stored("redis", url=address))
    sockets = {name: f"ipc://{folder}/{name}.sock" for name in ("loading", "computing")}
    configs = [
        stored(
            "p2p",
            engine=engine,
            listen=sockets[engine],
            peers={other: sockets[other]},
            size_bytes=SIZE,
        )
        for engine, other in (("loading", "computing"), ("computing", "loading"))
    ]
    yield Setup("p2p", configs[0], peer=configs[1])


def start_redis(folder: Path, stack: contextlib.ExitStack) -> str | None:
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


def drop_pages(path: Path) -> None:
    """Let the system drop the pages of all files of a folder."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def first_tokens(listed: list[Setup], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Show and return the times to the first token, computed and loaded."""
    rng = random.Random(0)
    prompts = [random_ids(rng, options.tokens, VALID) for _ in range(options.rounds)]
    with open_llm({}) as llm:
        first_token(llm, [5] * 64)
        computed = statistics.median(first_token(llm, prompt) for prompt in prompts)
    results: list[dict[str, Any]] = [{"name": "computed", "seconds": computed}]
    results += [loaded(setup, prompts) for setup in listed]
    rows = []
    for result in results:
        row = [result["name"], f"{result['seconds']:.3f}", f"{computed / result['seconds']:.1f}"]
        if "bytes" in result:
            size, seconds = result["bytes"], result["load_seconds"]
            row += [f"{size / 1e6:.0f}", f"{seconds:.3f}", f"{size / seconds / 1e9:.2f}"]
        rows.append(row)
    heads = ("", "seconds", "times faster", "MB", "loading, s", "GB/s")
    show_table(f"seconds to the first token of {options.tokens} tokens", heads, rows)
    return results


def open_llm(config: dict[str, Any]) -> LLM:
    """Return an engine with the demo model."""
    return LLM("smollm2", dtype="bfloat16", config=SETTINGS | config)


def loaded(setup: Setup, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the time to the first token when the prompt's blocks are stored, and bytes."""
    with contextlib.ExitStack() as stack:
        llm = computing = stack.enter_context(open_llm(setup.config))
        if setup.peer is not None:
            computing = stack.enter_context(open_llm(setup.peer))
        for prompt in prompts:
            first_token(computing, prompt)
            wait_until_stored(computing)
        computing.reset_prefix_cache()
        first_token(llm, [5] * 64)
        before = tier_of(llm)
        seconds, cached = [], []
        for prompt in prompts:
            setup.before_load()
            seconds.append(first_token(llm, prompt))
            cached.append(first_token(llm, prompt))
        after = tier_of(llm)
        if after.loaded_blocks == before.loaded_blocks:
            raise SystemExit(f"{setup.name}: nothing was loaded; {llm.plugins.health()}")
    return {
        "name": setup.name,
        "seconds": statistics.median(seconds),
        "bytes": (after.loaded_bytes - before.loaded_bytes) / len(prompts),
        "load_seconds": statistics.median(a - b for a, b in zip(seconds, cached, strict=True)),
    }


def first_token(llm: LLM, ids: list[int]) -> float:
    """Return the seconds until the first token of a prompt."""
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - begin


def tier_of(llm: LLM) -> Any:
    """Return the totals of the only tier."""
    llm.generate([{"prompt_token_ids": [7] * 8}], SamplingParams(max_tokens=2))
    (tier,) = llm.engines.scheduler_stats().kv_tiers.values()
    return tier


def wait_until_stored(llm: LLM) -> None:
    """Wait until the store gets no more blocks."""
    before = -1
    while (now := tier_of(llm).stored_blocks) != before:
        before = now
        time.sleep(0.3)


def main() -> None:
    """Print the table."""
    options = options_of(
        __doc__,
        rounds=3,
        tokens=(4000, "of the prompt"),
        stores=(["memory", "disk", "redis", "p2p"], "that are measured"),
    )
    print(f"{os.cpu_count()} CPUs, {THREADS} threads load")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        known = setups(Path(name), stack)
        listed = [setup for setup in known if setup.name.split(",")[0] in options.stores]
        results = first_tokens(listed, options)
    save(options.json, results)


if __name__ == "__main__":
    main()
