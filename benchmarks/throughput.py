"""Output tokens per second of a table of engines, side by side in one run.

    python benchmarks/throughput.py processes
    python benchmarks/throughput.py adapters --peers vllm --python vllm=/opt/vllm/bin/python
    python benchmarks/throughput.py transformers --families opt --streams 32
    python benchmarks/throughput.py processes --rounds 1 --tokens 4 --streams 1   # whether it runs

processes: an engine in the caller's process and one in a separate process; the demo model, and
    the scripted model, whose forward pass costs next to nothing.
adapters: decoding without LoRA adapters, and with 1, 8 and as many as streams, dealt out in turn,
    of rank 8 on all linear layers, with random weights; in Hardpoint and vLLM.
transformers: models through transformers, natively, by `generate`, and by `generate_batch`,
    transformers' own continuous batching. Random weights in bf16, with the sizes of a published
    model of 125 to 160 million parameters. Prompts have one length, so that nothing is padded.

Each engine lives in a process of its own, and they take turns, round by round. Printed are medians
and, in parentheses, ratios to the first engine; of adapters, to the same engine without any.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import Peer, choose, exported, opened, parser_of, save, take_turns
from loads import Load
from tables import show_table

RANK = 8
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "opt": ("OPTForCausalLM", {}),
}
"""Architectures and configurations: those of SmolLM2-135M, Pythia-160M and OPT-125M."""


@dataclass(frozen=True)
class Scenario:
    """Engines and loads.

    Attributes:
        name: name in the table.
        folder: folder of the model, as `engines.export` writes it.
        peers: engines by name.
        loads: loads by name.
        is_by_load: whether ratios are those to the first load of the same engine.
    """

    name: str
    folder: Path
    peers: Mapping[str, Peer]
    loads: Mapping[str, Load]
    is_by_load: bool = False


def batches(options: argparse.Namespace, prompt: int, **fields: Any) -> dict[str, Load]:
    """Return a load per number of streams."""
    output = options.tokens, options.tokens
    return {
        f"{count} streams": Load(count, (prompt, prompt), output, **fields)
        for count in options.streams
    }


def processes(options: argparse.Namespace, folder: Path) -> Iterator[Scenario]:
    """Yield the demo model and the scripted model, in this process and in a separate one."""
    from hardpoint.testing import scripted_config, write_scripted_model

    modes = {"in-process": {"in_process": True}, "separate": {"in_process": False}}
    demo = {name: Peer(options={"config": {"engine": mode}}) for name, mode in modes.items()}
    yield Scenario("smollm2", folder, demo, batches(options, 32))
    path = write_scripted_model(folder / "scripted/checkpoint", max_position_embeddings=2048)
    settings = {key: value for key, value in scripted_config(path).items() if key != "model"}
    common = {"dtype": settings.pop("dtype", "float32")}
    scripted = {
        name: Peer(options={**common, "config": {**settings, "engine": mode}})
        for name, mode in modes.items()
    }
    yield Scenario("scripted", path.parent, scripted, batches(options, 32, vocabulary=(1, 250)))


def adapters(options: argparse.Namespace, folder: Path) -> Iterator[Scenario]:
    """Yield Hardpoint and vLLM with several numbers of adapters, for each number of streams."""
    pythons = choose(options, ("hardpoint", "vllm"))
    for streams in options.streams:
        paths = write_adapters(folder / "checkpoint", folder / "adapters", streams)
        limits = {"max_loras": streams, "max_lora_rank": RANK, "max_cpu_loras": streams}
        peers = {
            "hardpoint": Peer(options={"adapters": paths, "config": {"adapters": limits}}),
            "vllm": Peer(
                "vllm",
                {"adapters": paths, "vllm": {"enable_lora": True, **limits}},
                module="vllm",
            ),
        }
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


def transformers(options: argparse.Namespace, folder: Path) -> Iterator[Scenario]:
    """Yield a model of each family, through transformers and by transformers."""
    import torch
    import transformers as library

    for family in options.families:
        architecture, sizes = FAMILIES[family]
        torch.manual_seed(0)
        kind = getattr(library, architecture)
        config = kind.config_class(**sizes, max_position_embeddings=2048)
        model = kind._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / family / "checkpoint")
        common = {"tokenizer": {"use": "none"}, "weight_cache": {"path": "off"}}
        uses = {"through transformers": "transformers"} | (
            {"native": "auto"} if family == "llama" else {}
        )
        peers = {
            name: Peer(options={"config": {**common, "models": {"use": use}}})
            for name, use in uses.items()
        }
        peers["generate"] = Peer("transformers")
        peers["generate_batch"] = Peer("transformers-continuous")
        yield Scenario(family, folder / family, peers, batches(options, 64))


SCENARIOS: dict[str, Callable[[argparse.Namespace, Path], Iterator[Scenario]]] = {
    "processes": processes,
    "adapters": adapters,
    "transformers": transformers,
}
DEFAULTS = {
    "processes": {"streams": [1, 32], "tokens": 64},
    "adapters": {"streams": [32], "tokens": 64},
    "transformers": {"streams": [1, 32], "tokens": 32},
}


def measure(scenario: Scenario, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return median tokens per second, by load and engine."""
    pythons = dict(pair.split("=", 1) for pair in options.python)
    result = {}
    with opened(scenario.peers, scenario.folder, pythons) as engines:
        for name, load in scenario.loads.items():
            answers = take_turns(engines, load.rounds(f"{scenario.name}, {name}", options.rounds))
            result[name] = {
                engine: load.tokens / statistics.median(answer["seconds"] for answer in listed)
                for engine, listed in answers.items()
            }
    return result


def show(scenario: Scenario, speeds: dict[str, dict[str, float]]) -> None:
    """Print the table of a scenario."""
    names = list(next(iter(speeds.values())))
    first = next(iter(speeds.values()))
    rows = []
    for load, by_engine in speeds.items():
        bases = first if scenario.is_by_load else dict.fromkeys(names, by_engine[names[0]])
        cells = [f"{speed:.0f} ({speed / bases[name]:.2f}x)" for name, speed in by_engine.items()]
        rows.append([load, *cells])
    show_table(f"{scenario.name}: output tokens per second", ("load", *names), rows)


def main() -> None:
    """Parse arguments and run."""
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--streams", nargs="+", type=int, help="requests at once")
    parser.add_argument("--tokens", type=int, help="output tokens per request")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options = parser.parse_args()
    for name, value in DEFAULTS[options.scenario].items():
        setattr(options, name, getattr(options, name) or value)
    result = {}
    with exported(options.folder) as folder:
        for scenario in SCENARIOS[options.scenario](options, folder):
            result[scenario.name] = measure(scenario, options)
            show(scenario, result[scenario.name])
    save(options.json, result)


if __name__ == "__main__":
    main()
