"""Small random transformers models, and how llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from hardpoint.plugins import ModelError, WeightLoader

KINDS = gguf.GGMLQuantizationType
PERMUTED = ("llama", "granite", "smollm3")
"""Architectures whose converter permutes the rows of q and k."""

TINY = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def random_model(family: str, **fields):
    import transformers

    torch.manual_seed(2)
    name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**TINY | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    return model


def write_gguf(
    path: Path,
    model,
    architecture: str,
    *,
    changes: dict | None = None,
    extra: dict[str, np.ndarray] | None = None,
    kinds: Callable[[str], str] = lambda _name: "F32",
) -> None:
    """Write a transformers model as llama.cpp's converter does.

    Args:
        path: path of the file.
        model: gets the numbers that are stored, where `kinds` are rounded.
        architecture: llama.cpp's name.
        changes: values of the metadata; None is to leave one out.
        extra: further tensors.
        kinds: the type of each matrix, by the name in the file without ".weight".
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(config, architecture) | (changes or {})).items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    for name, parameter in stored_tensors(model, architecture):
        kind = KINDS.F32 if parameter.dim() == 1 else KINDS[kinds(name.removesuffix(".weight"))]
        rows = _permutation(architecture, name, len(parameter))
        array = parameter.detach().float().numpy()[rows]
        if kind != KINDS.F32:
            array, numbers = quantised(array, kind)
            parameter.data.copy_(torch.from_numpy(numbers[np.argsort(rows)]))
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(name, array, raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    finish(writer)


def stored_tensors(model, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a transformers model, by llama.cpp's names."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            experts = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, 1)
            parts = {f"{experts}gate_proj": gate, f"{experts}up_proj": up}
        elif name.endswith("shared_expert_gate.weight"):
            parts = {name: tensor[0]}
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for own, part in parts.items():
            own = own.replace("_correction_bias", "_correction.bias")
            stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
            yield stored if ".experts." not in own else f"{stored}.weight", part


def _permutation(architecture: str, name: str, count: int) -> np.ndarray:
    """Return the rows of a parameter in the order of the file."""
    rows = np.arange(count)
    if architecture not in PERMUTED or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return rows
    return permute_as_llama_cpp(rows[:, None], count // 16)[:, 0]


def _metadata(config, architecture: str) -> dict:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    values = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        "context_length": config.max_position_embeddings,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", None),
        "rope.freq_base": rope["rope_theta"],
    }
    if architecture.startswith("gemma"):
        values["attention.sliding_window"] = config.sliding_window
        values["final_logit_softcapping"] = config.final_logit_softcapping
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
    if architecture == "gemma2":
        values["rope.freq_base"] = None
    if architecture == "phi3":
        values["attention.key_length"] = None
        values["attention.sliding_window"] = config.sliding_window or 0
        values["rope.dimension_count"] = 16
    if hasattr(config, "num_experts_per_tok"):
        count = getattr(config, "num_experts", None) or config.num_local_experts
        values |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
        values["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", None)
        shared = getattr(config, "shared_expert_intermediate_size", None)
        values["expert_shared_feed_forward_length"] = shared
    if architecture in ("cohere2", "olmo2"):
        values["attention.sliding_window"] = getattr(config, "sliding_window", None)
        values["logit_scale"] = getattr(config, "logit_scale", None)
    if "partial_rotary_factor" in rope:
        size = int(getattr(config, "head_dim", 16) * rope["partial_rotary_factor"])
        values["rope.dimension_count"] = size
    if architecture == "glm4moe":
        values |= {
            "expert_gating_func": 2,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "leading_dense_block_count": config.first_k_dense_replace,
            "nextn_predict_layers": 0,
        }
    if architecture == "granite":
        values["attention.scale"] = config.attention_multiplier
        values["embedding_scale"] = config.embedding_multiplier
        values["residual_scale"] = config.residual_multiplier
        values["logit_scale"] = config.logits_scaling
    return values


def quantised(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight as a file stores it, and the numbers that this stands for.

    The library cannot write the K types: random blocks stand in for them.
    """
    data = (
        gguf.quants.quantize(weight, kind)
        if kind not in SCALES
        else random_blocks(weight.shape, kind)
    )
    return data, gguf.quants.dequantize(data, kind)


SCALES = {
    KINDS.Q2_K: ((80, 0.02), (82, 0.03)),
    KINDS.Q3_K: ((108, 0.003),),
    KINDS.Q4_K: ((0, 0.0008), (2, 0.006)),
    KINDS.Q5_K: ((0, 0.0004), (2, 0.006)),
    KINDS.Q6_K: ((208, 0.00015),),
    KINDS.IQ4_NL: ((0, 0.003),),
    KINDS.IQ4_XS: ((0, 0.0002),),
}
"""Where a block has float16 scales, and values that make weights of about 0.2 with mean 0."""


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks of finite weights, uint8 [rows, bytes]."""
    rows, columns = shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    source = np.random.default_rng([rows, columns, int(kind)])
    blocks = source.integers(0, 256, (rows, columns // block, size), np.uint8)
    for at, scale in SCALES[kind]:
        scales = scale * source.uniform(0.5, 1.0, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute_as_llama_cpp(array: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: HF rows j and j + half of a head become neighbours 2j and 2j + 1."""
    size = array.shape[0] // heads
    out = np.empty_like(array)
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = array[head * size + j]
            out[head * size + 2 * j + 1] = array[head * size + j + size // 2]
    return out


def refused(loader: WeightLoader, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loader.config()
