"""Engines and loads of benchmarks/throughput.py, by scenario."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines import Peer, choose, exported, opened
from instruments import TIMES, on_device
from loads import BYTES, Load
from options import show_table

RANK = 8
RANKS = {
    "uniproc": (1, 1),
    "tensor 2": (2, 1),
    "tensor 4": (4, 1),
    "pipeline 2": (1, 2),
    "pipeline 4": (1, 4),
}
"""Tensor and pipeline ranks."""
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": 256,
}


@dataclass(frozen=True)
class Scenario:
    """Engines and loads.

    Attributes:
        name: name in the table.
        folder: folder of the model, as `engines.export` writes it.
        peers: engines by name.
        loads: loads by name.
        is_by_load: whether ratios are those to the first load of the same engine.
        is_by_token: whether the table has microseconds per token instead of tokens per second.
        more: prints and returns further figures, from tokens per second and processor seconds.
    """

    name: str
    folder: Path
    peers: Mapping[str, Peer]
    loads: Mapping[str, Load]
    is_by_load: bool = False
    is_by_token: bool = False
    more: Callable[[Any, Any], Any] | None = None


def batches(options: argparse.Namespace, prompt: int, **fields: Any) -> dict[str, Load]:
    """Return a load per number of streams."""
    output = options.tokens, options.tokens
    return {
        f"{count} streams": Load(count, (prompt, prompt), output, **fields)
        for count in options.streams
    }


def write_llama(folder: Path, **fields: Any) -> Path:
    """Write the configuration of a small Llama and a tokenizer; return the folder."""
    from hardpoint.testing import write_scripted_model

    write_scripted_model(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return folder


def scripted(folder: Path, variants: Mapping[str, dict[str, Any]]) -> dict[str, Peer]:
    """Return engines on the scripted model, which is written, by name of their configuration."""
    from hardpoint.testing import scripted_config, write_scripted_model

    path = write_scripted_model(folder / "checkpoint", max_position_embeddings=2048)
    peers = {}
    for name, extra in variants.items():
        config = {**scripted_config(path), **extra}
        del config["model"]
        peers[name] = Peer(options={"dtype": config.pop("dtype"), "config": config})
    return peers


def processes(options: argparse.Namespace) -> Iterator[Scenario]:
    """Yield the demo model and the scripted model, in this process and in a separate one."""
    modes = {
        name: {"engine": {"in_process": name == "in-process"}}
        for name in ("in-process", "separate")
    }
    with exported(options.folder) as folder:
        demo = {name: Peer(options={"config": mode}) for name, mode in modes.items()}
        yield Scenario("smollm2", folder, demo, batches(options, 32))
        loads = batches(options, 32, vocabulary=BYTES)
        yield Scenario("scripted", folder / "scripted", scripted(folder / "scripted", modes), loads)


def adapters(options: argparse.Namespace) -> Iterator[Scenario]:
    """Yield Hardpoint and vLLM with several numbers of adapters, for each number of streams."""
    pythons = choose(options, ("hardpoint", "vllm"))
    with exported(options.folder) as folder:
        for streams in options.streams:
            paths = write_adapters(folder / "checkpoint", folder / "adapters", streams)
            limits = {"max_loras": streams, "max_lora_rank": RANK, "max_cpu_loras": streams}
            ours = {"adapters": paths, "config": {"adapters": limits}}
            theirs = {"adapters": paths, "vllm": {"enable_lora": True, **limits}}
            peers = {"hardpoint": Peer(options=ours), "vllm": Peer("vllm", theirs, module="vllm")}
            output = options.tokens, options.tokens
            loads = {
                f"{count} adapters": Load(streams, (32, 32), output, adapters=count)
                for count in sorted({0, 1, min(8, streams), streams})
            }
            known = {name: peer for name, peer in peers.items() if name in pythons}
            yield Scenario(f"{streams} streams", folder, known, loads, is_by_load=True)


def write_adapters(checkpoint: Path, folder: Path, count: int) -> list[str]:
    """Write adapters of all linear layers as PEFT does; return their folders."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((checkpoint / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    sizes = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, hidden)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)),
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
        path = folder / str(number)
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(stated))
    return [str(folder / str(number)) for number in range(count)]


def executors(options: argparse.Namespace) -> Iterator[Scenario]:
    """Yield the scripted model and a random Llama, each with several numbers of ranks."""
    configs: dict[str, dict[str, Any]] = {}
    for name in options.ranks:
        tensor, pipeline = RANKS[name]
        use = "multiproc" if tensor * pipeline > 1 else "uniproc"
        parallel = {"tensor": tensor, "pipeline": pipeline}
        configs[name] = {"executor": {"use": use}, "parallel": parallel}
    loads = batches(options, 32, vocabulary=BYTES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers = scripted(folder, configs)
        yield Scenario("scripted model", folder, peers, loads, is_by_token=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden}
        write_llama(folder / "checkpoint", **sizes, num_hidden_layers=options.layers)
        common = {"load": {"use": "dummy"}, "device": "cpu"}
        peers = {
            name: Peer(options={"dtype": "float32", "config": {**common, **config}})
            for name, config in configs.items()
        }
        timed = {name: peer for name, peer in peers.items() if RANKS[name][0] > 1}
        yield Scenario(
            "random Llama",
            folder,
            peers,
            loads,
            more=lambda *_: _collectives(folder, timed, loads, options.rounds) if timed else {},
        )


def _collectives(
    folder: Path, peers: Mapping[str, Peer], loads: Mapping[str, Load], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Show and return the share of collectives in the time of rank 0, and microseconds of each."""
    result: dict[str, dict[str, dict[str, float]]] = {load: {} for load in loads}
    file = folder / "times"
    os.environ[TIMES] = str(file)
    for name, peer in peers.items():
        file.write_bytes(bytes(16))
        config = peer.options["config"]
        parallel = {**config["parallel"], "communicator": "instruments:Timed"}
        timed = Peer(options={**peer.options, "config": {**config, "parallel": parallel}})
        with opened({name: timed}, folder) as engines:
            for load_name, load in loads.items():
                before = np.fromfile(file)
                answers = [engines[name].ask(batch) for batch in load.rounds(load_name, rounds)]
                seconds, calls = np.fromfile(file) - before
                share = seconds / sum(answer["seconds"] for answer in answers)
                result[load_name][name] = {"share": share, "microseconds": seconds / calls * 1e6}
    rows = [
        [load, *(f"{f['share']:.0%}, {f['microseconds']:.0f} us" for f in by_engine.values())]
        for load, by_engine in result.items()
    ]
    show_table("collectives: share of the time of rank 0, time of each", ("load", *peers), rows)
    return result


def replicas(options: argparse.Namespace) -> Iterator[Scenario]:
    """Yield several numbers of engines on sleeping devices, with as many requests each."""
    (rows,) = options.streams
    rates: dict[int, float] = {}
    for size in options.engines:
        config = on_device(options.milliseconds)
        config |= {"engine": {"in_process": False}, "parallel": {"data": size}}
        loads = {
            f"{tokens} tokens": Load(rows * size, (8, 8), (tokens, tokens), vocabulary=BYTES)
            for tokens in (1, options.tokens)
        }

        def more(speeds: Any, seconds: Any, size: int = size) -> dict[str, float]:
            first, whole = (next(iter(by_engine.values())) for by_engine in seconds.values())
            *_, by_engine = speeds.values()
            (rates[size],) = by_engine.values()
            base = next(iter(rates))
            share = rates[size] / (rates[base] * size / base)
            request = first / (rows * size) * 1e6
            token = (whole - first) / (rows * size * (options.tokens - 1)) * 1e6
            print(f"of {size} times one: {share:.3f}; program: {request:.0f} us per request, "
                  f"{token:.1f} us per further token")  # fmt: skip
            return {"share": share, "request": request, "token": token}

        with tempfile.TemporaryDirectory() as name:
            peers = scripted(Path(name), {f"{size} engines": config})
            yield Scenario(f"{size} engines", Path(name), peers, loads, more=more)


SCENARIOS: dict[str, Callable[[argparse.Namespace], Iterator[Scenario]]] = {
    "processes": processes,
    "adapters": adapters,
    "executors": executors,
    "replicas": replicas,
}
