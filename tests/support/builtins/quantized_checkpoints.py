"""Small checkpoints as AutoAWQ, GPTQModel and compressed-tensors write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from hardpoint.plugins import QuantizationContext
from hardpoint.plugins.quantization import Quantization, QuantizedWeight
from hardpoint.testing import write_scripted_model

Tensors = dict[str, torch.Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a matrix [in, out] in the order in which AutoAWQ puts them into a word."""

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Matrix:
    """A matrix (codes - zeros) * scales.

    Attributes:
        codes: [rows, columns], 0 to 2 ** bits - 1.
        zeros: [rows, groups].
        scales: float16 [rows, groups].
        group_of: the group of each column.
    """

    bits: int
    group: int
    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_of: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def weight(self) -> torch.Tensor:
        """The numbers, float32 [rows, columns]."""
        zeros, scales = (t[:, self.group_of] for t in (self.zeros, self.scales))
        return (self.codes - zeros).float() * scales.float()


def random_matrix(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int = -1,
    symmetric: bool = False,
    shuffled: bool = False,
    seed: int = 0,
) -> Matrix:
    """Return random numbers; a group of -1 is a whole row."""
    source = torch.Generator().manual_seed(seed)
    size = columns if group == -1 else group
    groups = -(-columns // size)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=source)

    middle = 1 << (bits - 1)
    group_of = torch.arange(columns) // size
    if shuffled:
        group_of = group_of[torch.randperm(columns, generator=source)]
    return Matrix(
        bits,
        group,
        draw(1 << bits, rows, columns),
        torch.full((rows, groups), middle) if symmetric else 1 + draw(middle, rows, groups),
        ((draw(900, rows, groups) + 100) / 9000 / middle).half(),
        group_of,
    )


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Put rows of numbers into words, the first one in the lowest bits; int32 [rows, words]."""
    per = 32 // bits
    rows = []
    for row in numbers.tolist():
        words = [row[start : start + per] for start in range(0, len(row), per)]
        rows.append([sum(n << (bits * i) for i, n in enumerate(word)) for word in words])
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32))


def awq(matrix: Matrix) -> Tensors:
    """Return the tensors of AutoAWQ's GEMM version."""

    def packed(numbers: torch.Tensor) -> torch.Tensor:  # [in, out]
        order = [8 * start + i for start in range(numbers.shape[1] // 8) for i in AWQ_ORDER]
        return pack(numbers[:, order], 4)

    return {
        "qweight": packed(matrix.codes.T),
        "qzeros": packed(matrix.zeros.T),
        "scales": matrix.scales.T.contiguous(),
    }


def gptq(matrix: Matrix, *, less: int = 1) -> Tensors:
    """Return the tensors of GPTQ; of the first format, zeros are stored `less` one."""
    words = pack(matrix.zeros.T, matrix.bits)
    ones = sum(less << shift for shift in range(0, 32, matrix.bits))
    return {
        "qweight": pack(matrix.codes, matrix.bits).T.contiguous(),
        "qzeros": words - ones,
        "scales": matrix.scales.T.contiguous(),
        "g_idx": matrix.group_of.int(),
    }


def packed_integers(matrix: Matrix, *, symmetric: bool = False) -> Tensors:
    """Return the tensors of compressed-tensors' pack-quantized, which adds half the range."""
    tensors = {
        "weight_packed": pack(matrix.codes, matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(matrix.zeros.T, matrix.bits).T.contiguous()
    return tensors


def plain_integers(matrix: Matrix, *, symmetric: bool = False) -> Tensors:
    """Return the tensors of compressed-tensors' int-quantized."""
    half = 1 << (matrix.bits - 1)
    tensors = {"weight": (matrix.codes - half).to(torch.int8), "weight_scale": matrix.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (matrix.zeros - half).to(torch.int8)
    return tensors


def fp8(matrix: Matrix) -> Tensors:
    """Return the tensors of FP8 with a scale per block of one row."""
    numbers = matrix.codes - matrix.zeros[:, matrix.group_of]
    return {
        "weight": numbers.float().to(torch.float8_e4m3fn),
        "weight_scale_inv": matrix.scales.float(),
    }


def four_bit_floats(matrix: Matrix) -> Tensors:
    """Return the tensors of bitsandbytes, below a weight, of zeros that are 8 and groups of 64."""
    packed = matrix.codes.view(-1, 2).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": matrix.shape}
    text = json.dumps(state).encode()
    return {
        "weight": packed[:, :1] << 4 | packed[:, 1:],
        "weight.absmax": matrix.scales.float().flatten(),
        "weight.quant_map": torch.arange(16.0) - 8,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }


def awq_config(group: int = 32, **fields: Any) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return config | {"version": "gemm", "modules_to_not_convert": None} | fields


def gptq_config(group: int = 32, bits: int = 4, **fields: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    return config | {"sym": False, "checkpoint_format": "gptq", "damp_percent": 0.1} | fields


def auto_round_config(group: int = 32, bits: int = 4, **fields: Any) -> dict[str, Any]:
    config = {"quant_method": "auto-round", "bits": bits, "group_size": group, "sym": False}
    packing = {"packing_format": "auto_round:auto_gptq", "data_type": "int", "iters": 200}
    return config | packing | {"autoround_version": "0.4.7", "seqlen": 2048} | fields


def integers_config(
    group: int = 32, bits: int = 4, *, form: str = "pack-quantized", **fields: Any
) -> dict[str, Any]:
    """Return a config of compressed-tensors; `fields` are fields of its weights."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": False,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "dynamic": False,
        "actorder": None,
    }
    scheme = {"targets": ["Linear"], "weights": weights | fields, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def build_scheme(
    kind: type[Quantization], config: dict[str, Any] | None = None, **options: Any
) -> Quantization:
    """Build a scheme for a checkpoint's config."""
    return kind(
        QuantizationContext(
            name=kind.__name__.lower(),
            options=kind.Options(**options),
            device=torch.device("cpu"),
            dtype=torch.float32,
            config=config or {},
        )
    )


def stored(matrix: Matrix, tensors: Tensors, scheme: str = "any") -> QuantizedWeight:
    return QuantizedWeight(scheme, matrix.shape, tensors)


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] | None,
    store: Callable[[Matrix], Tensors],
    *,
    group: int = 32,
    bits: int = 4,
    num_shards: int = 2,
    shuffled: bool = False,
    symmetric: bool = False,
    **fields: Any,
) -> Tensors:
    """Write a Llama with quantized decoder layers; return all weights as numbers.

    The tensors of a matrix lie in different shards.
    """
    if not folder.exists():
        write_scripted_model(folder)
    hf = TINY | fields
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))
    hidden, inner, vocab = (hf[f"{n}_size"] for n in ("hidden", "intermediate", "vocab"))
    kv = hidden // hf["num_attention_heads"] * hf["num_key_value_heads"]
    source = torch.Generator().manual_seed(1)
    dense: Tensors = {
        name: torch.randn(vocab, hidden, generator=source) / 4
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    dense["model.norm.weight"] = torch.ones(hidden)
    files = dict(dense)
    parts = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    parts |= {f"self_attn.{n}_proj": (kv, hidden) for n in "kv"}
    parts |= {f"mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
    parts["mlp.down_proj"] = (hidden, inner)
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            dense[f"{prefix}.{name}.weight"] = torch.ones(hidden)
            files[f"{prefix}.{name}.weight"] = torch.ones(hidden)
        for seed, (name, shape) in enumerate(parts.items()):
            kinds = {"bits": bits, "group": group, "shuffled": shuffled, "symmetric": symmetric}
            matrix = random_matrix(*shape, **kinds, seed=100 * layer + seed)
            dense[f"{prefix}.{name}.weight"] = matrix.weight
            files |= {f"{prefix}.{name}.{last}": t for last, t in store(matrix).items()}
    write_shards(folder, files, num_shards)
    return dense


def write_shards(folder: Path, tensors: Tensors, count: int = 2) -> None:
    """Write tensors in turn into so many files."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    shards = {f"model-{i}.safetensors": dict(list(tensors.items())[i::count]) for i in range(count)}
    for name, part in shards.items():
        save_file({key: tensor.contiguous() for key, tensor in part.items()}, folder / name)
    weight_map = {key: name for name, part in shards.items() for key in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
