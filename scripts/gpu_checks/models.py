"""The models that are checked, and engines for them."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from hardpoint import LLM
from hardpoint.testing import write_scripted_model

from .device import Device
from .recorder import Recorder

SMOLLM2 = "smollm2"
SMALLEST_VOCABULARY = 500

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


_MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@dataclass(frozen=True)
class ThroughputSizes:
    """How much the part `throughput` does.

    Attributes:
        num_requests: number of requests.
        longest: maximum tokens of a prompt and of an answer.
        num_seqs: number of sequences of a step.
        num_streams: number of streams over HTTP.
        profiled_steps: number of steps that the profiler sees.
        max_model_len: maximum length of a sequence.
        cache_bytes: size of the KV cache.
    """

    num_requests: int
    longest: tuple[int, int]
    num_seqs: int
    num_streams: int
    profiled_steps: int
    max_model_len: int
    cache_bytes: int


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        qwen, llama: fields of config.json.
        few_layers: number of layers of `llama` in float32.
        reference_prompts: number of prompts of the demo model; None is all that the reference file
            has.
        demo_tokens: maximum number of tokens of each of them.
        together: number of prompts of the running model.
        new_tokens: number of tokens that follow each other prompt.
        forced_texts: number of texts of the demo model in bf16; None is all.
        forced_length: length of each, in positions; None is all.
        forced_positions: minimum number of positions of these texts.
        quantizations: quantisations of the demo model.
        families: number of tiny random models of families; None is all.
        lengths: lengths of random prompts, in tokens.
        max_model_len: maximum length of random models.
        small_pool: configuration in which requests of the demo model have to give way.
        graph_tokens: number of tokens that follow each prompt, with CUDA graphs and without.
        running: fields of the model that runs on with them; None is the demo model.
        mixture: fields of config.json of a mixture of experts.
        running_lengths: lengths of its prompts, in tokens.
        sleep_blocks: number of blocks of the KV cache of the engine that sleeps.
        steps_before: number of steps before the one whose waits are counted.
        cache_bytes: size of other KV caches.
        loads: loads of the benchmark: names, prompts, tokens of each, and tokens that follow.
        rounds: number of rounds of the benchmark.
        num_seqs, step_tokens: limits of its steps.
        all_tests: whether all tests of kernels run, or the first of each class and file.
        tests_s: seconds that the tests of a file may take.
        throughput: sizes of the part `throughput`.
        processor_loads: loads of benchmarks/offline.py in the part `cpu`.
    """

    qwen: Mapping[str, Any]
    llama: Mapping[str, Any]
    few_layers: int
    reference_prompts: int | None
    demo_tokens: int
    together: int
    new_tokens: int
    forced_texts: int | None
    forced_length: int | None
    forced_positions: int
    quantizations: Sequence[str]
    families: int | None
    lengths: Sequence[int]
    max_model_len: int
    small_pool: Mapping[str, Any]
    graph_tokens: int
    running: Mapping[str, Any] | None
    mixture: Mapping[str, Any]
    running_lengths: Sequence[int]
    sleep_blocks: int
    steps_before: int
    cache_bytes: int
    loads: Sequence[tuple[str, int, int, int]]
    rounds: int
    num_seqs: int
    step_tokens: int
    all_tests: bool
    tests_s: float
    throughput: ThroughputSizes
    processor_loads: Sequence[str]


REAL = Sizes(
    qwen=QWEN3_06B,
    llama=LLAMA_8B,
    few_layers=4,
    reference_prompts=None,
    demo_tokens=24,
    together=32,
    new_tokens=24,
    forced_texts=None,
    forced_length=None,
    forced_positions=256,
    quantizations=("none", "auto"),
    families=None,
    lengths=(1, 5, 16, 17, 130, 700, 3000),
    max_model_len=4096,
    small_pool={
        "max_model_len": 96,
        "kv_cache": {"num_blocks": 17, "watermark": 0.0},
    },
    graph_tokens=40,
    running=None,
    mixture={**QWEN3_06B, **_MIXTURE, "num_hidden_layers": 4, "moe_intermediate_size": 768},
    running_lengths=(3, 8, 48, 9, 17, 2, 33, 64, 5, 6, 7),
    sleep_blocks=2000,
    steps_before=30,
    cache_bytes=2 << 30,
    loads=(("decode_1", 1, 128, 64), ("decode_64", 64, 128, 64), ("prefill", 8, 2048, 1)),
    rounds=3,
    num_seqs=64,
    step_tokens=8192,
    all_tests=True,
    tests_s=140.0,
    throughput=ThroughputSizes(
        num_requests=1000,
        longest=(1024, 1024),
        num_seqs=256,
        num_streams=64,
        profiled_steps=100,
        max_model_len=2048,
        cache_bytes=32 << 30,
    ),
    processor_loads=("single", "batch", "prefill"),
)

DRY = Sizes(
    qwen={**QWEN3_06B, **_TINY},
    llama={**LLAMA_8B, **_TINY},
    few_layers=1,
    reference_prompts=1,
    demo_tokens=1,
    together=2,
    new_tokens=2,
    forced_texts=1,
    forced_length=3,
    forced_positions=1,
    quantizations=("none",),
    families=2,
    lengths=(1, 5, 17),
    max_model_len=64,
    small_pool={
        "max_model_len": 12,
        "kv_cache": {"num_blocks": 3, "block_size": 4, "watermark": 0.0},
    },
    graph_tokens=9,
    running={**LLAMA_8B, **_TINY},
    mixture={**QWEN3_06B, **_TINY, **_MIXTURE, "moe_intermediate_size": 32},
    running_lengths=(3, 5, 9),
    sleep_blocks=50,
    steps_before=2,
    cache_bytes=64 << 20,
    loads=(("decode_1", 1, 3, 2), ("decode_2", 2, 3, 2), ("prefill", 2, 9, 1)),
    rounds=1,
    num_seqs=2,
    step_tokens=32,
    all_tests=False,
    tests_s=120.0,
    throughput=ThroughputSizes(
        num_requests=4,
        longest=(5, 3),
        num_seqs=2,
        num_streams=2,
        profiled_steps=2,
        max_model_len=32,
        cache_bytes=64 << 20,
    ),
    processor_loads=("short",),
)


_OTHER_BYTES = 4 << 30  # activations, logits, graphs, and what torch keeps


def has_room(
    recorder: Recorder,
    device: Device,
    name: str,
    fields: Mapping[str, Any],
    *,
    cache_bytes: int,
    copies: int = 1,
) -> bool:
    """Return whether a model fits on the device in bf16; if not, skip the check `name`.

    Args:
        recorder: writes what is skipped.
        device: where it would run.
        name: name of the check.
        fields: fields of the model's config.json.
        cache_bytes: size of the KV cache.
        copies: number of copies of the weights, at once.
    """
    hidden, size = fields["hidden_size"], fields["head_dim"]
    heads = 2 * fields["num_attention_heads"] + 2 * fields["num_key_value_heads"]
    layer = hidden * (heads * size + 3 * fields["intermediate_size"])
    tables = fields["vocab_size"] * hidden * (1 if fields["tie_word_embeddings"] else 2)
    weights = 2 * (fields["num_hidden_layers"] * layer + tables)
    needed, room = copies * weights + cache_bytes + _OTHER_BYTES, device.room()
    if needed > room:
        recorder.skip(
            name,
            f"needs {needed} bytes of the GPU's memory ({needed / 2**30:.0f} GiB), {room} are free",
        )
    return bool(needed <= room)


def write_model(folder: Path, fields: Mapping[str, Any]) -> Path:
    """Write config.json of a model with random weights, and a tokenizer that nothing asks."""
    write_scripted_model(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_words(folder: Path, count: int) -> None:
    """Write a tokenizer with a word for each token id, so that random tokens have texts."""
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(count)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@contextlib.contextmanager
def running_model(sizes: Sizes) -> Iterator[str | Path]:
    """Give the demo model, or in a dry run one with fewer layers."""
    if sizes.running is None:
        yield SMOLLM2
        return
    with random_model(sizes.running) as folder:
        yield folder


@contextlib.contextmanager
def random_model(fields: Mapping[str, Any]) -> Iterator[Path]:
    """Give the folder of a model with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_model(Path(folder), fields)


def limits(max_model_len: int, num_seqs: int, step_tokens: int, cache_bytes: int) -> dict[str, Any]:
    """Return the configuration of an engine for a measurement of speed."""
    return {
        "max_model_len": max_model_len,
        "scheduler": {"max_num_batched_tokens": step_tokens, "max_num_seqs": num_seqs},
        "kv_cache": {"memory_bytes": cache_bytes, "prefix_caching": False},
    }


@contextlib.contextmanager
def engine(
    model: str | Path, device: Device, kernels: str = "triton", **config: Any
) -> Iterator[LLM]:
    """Open an engine in this process for the body, and free its memory.

    Args:
        model: an alias, or a folder of `write_model`.
        device: where it runs.
        kernels: its operations and its attention, "triton" for example.
        config: further configuration.
    """
    if isinstance(model, Path):
        config = {"load": {"use": "dummy"}, **config}
    tables = {"device": device.name, "ops": {"use": kernels}, "attention": {"use": kernels}}
    with LLM(str(model), config={**tables, **config}, progress=False) as llm:
        yield llm
    del llm
    gc.collect()
    device.trim()
