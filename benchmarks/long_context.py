"""Memory and time of one long prompt: its prefill in chunks, and tokens generated after it.

    python benchmarks/long_context.py [--tokens 131072] [--layers 4] [--chunk 2048] [--generate 64]
        [--kv-dtype auto] [--dtype bfloat16]

The model has the demo model's shape with fewer layers, random weights, and positions that llama3's
scaling stretches to the length. Its prompt runs in three parts, each after what is cached of it.
Printed are the memory that the process has and had at most, the seconds of the prefill, tokens per
second of its first and last eighth, and milliseconds per further token.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from options import options_of, save, show_table
from scenarios import FAMILIES

MIB = 1 << 20
BLOCK = 16


def write_config(folder: Path, tokens: int, layers: int) -> None:
    """Write config.json of a Llama that has that many positions and layers."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 100000.0,
        "factor": max(1.0, tokens / 8192),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    architecture, sizes = FAMILIES["llama"]
    config = {
        **sizes,
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "max_position_embeddings": tokens,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": scaling,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run the prompt part by part, each after its cached prefix; return the figures."""
    from hardpoint import LLM, SamplingParams

    config = {
        "load": {"use": "dummy"},
        "kv_cache": {
            "dtype": options.kv_dtype,
            "block_size": BLOCK,
            "num_blocks": options.tokens // BLOCK + 2,
        },
        "scheduler": {"max_num_batched_tokens": options.chunk, "max_num_seqs": 1},
    }
    rng = random.Random(0)
    prompt = [rng.randrange(1000) for _ in range(options.tokens - options.generate)]

    def seconds(length: int, tokens: int = 1) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt[:length]}, params)
        return time.perf_counter() - start

    process = psutil.Process()
    eighth = len(prompt) // 8
    sizes = {"dtype": options.dtype, "max_model_len": options.tokens}
    with LLM(folder, tokenizer="smollm2", config=config, **sizes) as llm:
        seconds(3)
        before = process.memory_info().rss
        first, middle, last = seconds(eighth), seconds(7 * eighth), seconds(len(prompt))
        single = seconds(len(prompt))
        more = seconds(len(prompt), options.generate) - single
        after = process.memory_info().rss
    return {
        "prompt tokens": len(prompt),
        "memory before, MiB": before // MIB,
        "memory after, MiB": after // MIB,
        "memory at most, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "prefill, s": round(first + middle + last, 1),
        "first eighth, tokens/s": round(eighth / first),
        "last eighth, tokens/s": round((len(prompt) - 7 * eighth) / last),
        "a further token, ms": round(1000 * more / (options.generate - 1), 2),
    }


def main() -> None:
    """Measure, and print."""
    sizes = {"tokens": 131072, "layers": 4, "chunk": 2048, "generate": 64}
    options = options_of(__doc__, **sizes, kv_dtype="auto", dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), options.tokens, options.layers)
        figures = measure(options, folder)
    show_table("one long prompt", ("figure", "value"), figures.items())
    save(options.json, figures)


if __name__ == "__main__":
    main()
