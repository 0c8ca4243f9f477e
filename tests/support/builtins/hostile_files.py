"""Small checkpoints, and seeded mutants of each of their files."""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hardpoint import EngineConfig
from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.kv_cache import size_cache
from hardpoint.core.worker.worker import LocalWorker
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import TokenizerContext
from hardpoint.plugins.component.base import no_progress
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import SchedulerConfig
from support.builtins.checkpoint_harness import TINY, finish

FOLDER_FILES = {
    "safetensors": ["model.safetensors.index.json", "a.safetensors", "b.safetensors"],
    "config": ["config.json", "generation_config.json"],
    "tokenizer": ["tokenizer.json", "tokenizer_config.json"],
}
"""The files of a folder that are mutated, by format."""

CONFIG = TINY | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "sliding_window": None,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's weights by Hugging Face name."""
    hidden, inner, kv = 64, 96, 32
    sizes = {"model.embed_tokens.weight": (260, hidden), "model.norm.weight": (hidden,)}
    sizes["lm_head.weight"] = (260, hidden)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            sizes[f"{prefix}.{name}.weight"] = shape
    return sizes


def write_folder(folder: Path) -> Path:
    """Write a directory with two shards, an index and a tokenizer."""
    folder.mkdir(parents=True)
    weights = {name: torch.randn(shape) * 0.1 for name, shape in shapes().items()}
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, tensor_names in parts.items():
        save_file({name: weights[name] for name in tensor_names}, folder / file)
    where = {name: file for file, names in parts.items() for name in names}
    contents = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": where},
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [2, 256], "temperature": 0.7, "top_p": 0.9},
        "tokenizer_config.json": {
            "eos_token": "<eos>",
            "bos_token": {"content": "<bos>"},
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        },
    }
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content))
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of 260 tokens."""
    vocab = {token: i for i, token in enumerate(tokens()[:-2])}
    made = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return made


def tokens() -> list[str]:
    """Return the tokens by id."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "<bos>", "<eos>"]


def write_gguf(path: Path, kinds: Sequence[str] = ("F32",), **changes: Any) -> Path:
    """Write the same checkpoint as a GGUF file.

    Args:
        path: path of the file.
        kinds: types of the matrices, in turn.
        changes: values of `llama.*` fields, with `__` for a dot.
    """
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "context_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    for key, value in values.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens())
    writer.add_array("tokenizer.ggml.token_type", [1] * 258 + [3, 3])
    writer.add_array("tokenizer.ggml.merges", ["h e", "l l"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 259)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for index, (name, shape) in enumerate(shapes().items()):
        stored = names.get_name(name, try_suffixes=(".weight",))
        kind = gguf.GGMLQuantizationType[kinds[index % len(kinds)] if len(shape) == 2 else "F32"]
        data = gguf.quants.quantize((torch.randn(shape) * 0.1).numpy(), kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
    finish(writer)
    return path


_NUMBERS = [0, 1, 255, 2**16, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


def mutated_bytes(random: random.Random, data: bytes, header: int) -> bytes:
    """Return a mutant of a binary file, mostly of its first `header` bytes."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        at = random.randrange(max(1, min(header, len(changed))))
        if random.random() < 0.1:
            at = random.randrange(max(1, len(changed)))
        kind = random.randrange(6)
        if kind == 0:
            changed[at : at + 1] = bytes([random.randrange(256)])
        elif kind in (1, 2):
            size = random.choice([4, 8])
            number = random.choice(_NUMBERS) % (1 << (8 * size))
            changed[at : at + size] = number.to_bytes(size, "little")
        elif kind == 3:
            del changed[at : at + random.choice([1, 4, 8, 64])]
        elif kind == 4:
            changed[at:at] = bytes(random.choices(range(256), k=random.choice([1, 8, 64])))
        elif random.random() < 0.3:
            del changed[at:]
        else:
            changed[at:at] = changed[at : at + 64]
    return bytes(changed)


def _nasty(random: random.Random) -> Any:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    numbers = [-1, 0, 1, 3, 10**6, 2**31, 10**18, 10**30, 1e308, -0.5, float("nan")]
    texts = ["", "x", "\0", "../../etc/passwd", "/dev/zero", "y" * 1000]
    return random.choice([None, True, *numbers, *texts, [], {}, [0], ["x"], {"a": 1}, deep])


def mutated_json(random: random.Random, value: Any) -> Any:
    """Return a mutant of plain data; `value` may be changed."""
    if isinstance(value, dict | list) and value and random.random() < 0.9:
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if random.random() < 0.15:
            del value[key]
        elif random.random() < 0.1 and isinstance(value, list):
            value.insert(key, value[key])
        else:
            value[key] = mutated_json(random, value[key])
        return value
    return _nasty(random)


def mutants(format: str, base: Path, work: Path, seeds: range) -> Iterator[tuple[str, Path]]:
    """Yield a label and the path of each mutant of a format, one at a time.

    Args:
        format: "gguf", "gguf-blocks" or one of FOLDER_FILES.
        base: a checkpoint: a folder, or the file of a GGUF.
        work: where the mutants are written; each replaces the one before.
        seeds: one per mutant.
    """
    for seed in seeds:
        rng = random.Random(f"{format} {seed}")
        if format.startswith("gguf"):
            path = work / "mutant.gguf"
            path.write_bytes(mutated_bytes(rng, base.read_bytes(), 6_000))
            yield f"{format} {seed}", path
            continue
        folder = work / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        file = folder / rng.choice(FOLDER_FILES[format])
        if file.suffix == ".safetensors" or rng.random() < 0.2:
            file.write_bytes(mutated_bytes(rng, file.read_bytes(), 1_500))
        else:
            value = json.loads(file.read_text())
            for _ in range(rng.choice([1, 1, 2, 3])):
                value = mutated_json(rng, value)
            file.write_text(json.dumps(value))
        yield f"{format} {seed}: {file.name}", folder


class Opener:
    """Opens checkpoints as an engine in this process does, with plugins that are resolved once."""

    def __init__(self) -> None:
        """Resolve the built-in plugins."""
        self._config = EngineConfig(
            device="cpu",
            scheduler=SchedulerConfig(max_num_seqs=4),
        )
        self._plugins = resolve_plugins(self._config)

    def open_and_close(self, path: Path) -> None:
        """Read everything of a checkpoint: configuration, tokenizer, weights.

        Raises:
            HardpointError: it is refused.
        """
        config = msgspec.structs.replace(self._config, model=str(path))
        spec = prepare_worker(config, self._plugins, ConfigSources(), no_progress)
        files = spec.loader.context.files
        tokenizers = self._plugins.one("tokenizers")
        self._plugins.create(tokenizers, TokenizerContext, files=files).close()
        worker = LocalWorker(spec)
        size = size_cache(config, spec.max_model_len, worker.load_model())
        worker.initialize_cache(size.num_blocks)
        worker.close()


@dataclass
class Cost:
    """The resources that something took.

    Attributes:
        seconds: seconds of wall time.
        mebibytes: maximum memory, more than before.
    """

    seconds: float = 0.0
    mebibytes: float = 0.0


@contextmanager
def measured() -> Iterator[Cost]:
    """Measure the body; the system's peak of this process's memory is reset."""
    cost = Cost()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _peak_mib(), time.perf_counter()
    try:
        yield cost
    finally:
        cost.seconds = time.perf_counter() - start
        cost.mebibytes = _peak_mib() - before


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def raw_gguf(field: bytes = b"", tensors: tuple[bytes, ...] = (), data: int = 4096) -> bytes:
    """Return a GGUF file of one metadata field, tensors and so many bytes of data."""
    counts = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), bool(field))
    key = struct.pack("<Q", 1) + b"k" if field else b""
    header = counts + key + field + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32 + data)


def raw_tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    """Return the header of a tensor of a GGUF file."""
    start = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return start + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def raw_array(kind: int, count: int, content: bytes) -> bytes:
    """Return the type and value of a metadata field of a GGUF file that is an array."""
    return struct.pack("<IIQ", 9, kind, count) + content
