"""Small random transformers models, and how llama.cpp writes them."""

from __future__ import annotations

import math
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
OFFSET = ("gemma", "qwen3next", "qwen35")
"""Beginnings of those whose converter adds 1 to norms."""

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
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**TINY | fields)).eval()
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
        if architecture.startswith(OFFSET) and name.endswith("norm.weight"):
            array = array + (not name.endswith("ssm_norm.weight"))
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
        if architecture == "gpt-oss" and ".experts." in name:
            parts = dict(_experts_of_gpt_oss(name, tensor))
        elif name.endswith("experts.gate_up_proj"):
            experts = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, 1)
            parts = {f"{experts}gate_proj": gate, f"{experts}up_proj": up}
        elif name.endswith("kv_b_proj.weight") and getattr(model.config, "kv_b_by_head", True):
            heads = tensor.view(model.config.num_attention_heads, -1, tensor.shape[1])
            keys, values = heads.split([model.config.qk_nope_head_dim, model.config.v_head_dim], 1)
            k_name, v_name = (name.replace("kv_b", f"{side}_b") for side in "kv")
            parts = {k_name: keys.transpose(1, 2), v_name: values}
        elif name.endswith("shared_expert_gate.weight"):
            parts = {name: tensor[0]}
        elif ".linear_attn." in name:
            parts = _of_the_delta_rule(name, tensor, model.config, architecture)
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for part_name, part in parts.items():
            part_name = part_name.replace("_correction_bias", "_correction.bias")
            suffix = ".bias" if part_name.endswith("_bias") else ".weight"
            if ".experts." in part_name:
                part_name = part_name.removesuffix("_bias")
            stored = names.get_name(part_name, try_suffixes=(".weight", ".bias"))
            is_whole = ".experts." not in part_name and not part_name.endswith(".sinks")
            yield stored if is_whole else f"{stored}{suffix}", part


def _experts_of_gpt_oss(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the converter's tensors of a stacked tensor: rows of gate and up alternate."""
    rows = tensor if name.endswith("_bias") else tensor.transpose(1, 2)
    if "gate_up_proj" not in name:
        yield name, rows
        return
    for part, first in (("gate", 0), ("up", 1)):
        yield name.replace("gate_up_proj", f"{part}_proj"), rows[:, first::2]


def _of_the_delta_rule(
    name: str, tensor: torch.Tensor, config, architecture: str
) -> dict[str, torch.Tensor]:
    """Return the tensors that one of a layer with a state becomes, by Hugging Face names."""
    if architecture.startswith("qwen35"):
        tensor = _alternating(name, tensor, config)
    before = name.rpartition(".linear_attn.")[0] + ".linear_attn."
    if name.endswith("A_log"):
        return {name: -tensor.exp()}
    if name.endswith("dt_bias"):
        return {f"{before}dt_proj.bias": tensor}
    if name.endswith("conv1d.weight"):
        return {name: tensor.squeeze(1)}
    if not name.endswith("in_proj_qkvz.weight"):
        return {name: tensor}
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    split = tensor.view(heads, -1, tensor.shape[1]).split([key, key, values, values], 1)
    *qkv, z = (part.flatten(0, 1) for part in split)
    return {f"{before}in_proj_qkv.weight": torch.cat(qkv), f"{before}in_proj_z.weight": z}


def _alternating(name: str, tensor: torch.Tensor, config) -> torch.Tensor:
    """Return a tensor with its value heads in the order in which ggml repeats key heads."""
    if name.endswith(".norm.weight"):
        return tensor
    is_output = name.endswith("out_proj.weight")
    rows = tensor.T if is_output else tensor
    is_of_heads = name.endswith(("_a.weight", "_b.weight", "A_log", "dt_bias"))
    size = 1 if is_of_heads else config.linear_value_head_dim
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    first = len(rows) - values * size
    heads = rows[first:].unflatten(0, (keys, values // keys, size)).transpose(0, 1)
    rows_out = torch.cat([rows[:first], heads.flatten(0, 2)])
    return rows_out.T if is_output else rows_out


def _permutation(architecture: str, name: str, count: int) -> np.ndarray:
    """Return the rows of a parameter in the order of the file."""
    rows = np.arange(count)
    if architecture not in PERMUTED or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return rows
    return permute_as_llama_cpp(rows[:, None], count // 16)[:, 0]


def _metadata(config, architecture: str) -> dict:  # noqa: C901, PLR0915 - a case per format
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
    if architecture in ("cohere2", "llama", "olmo2"):
        values["attention.sliding_window"] = getattr(config, "sliding_window", None)
        values["logit_scale"] = getattr(config, "logit_scale", None)
    if "partial_rotary_factor" in rope:
        size = int(getattr(config, "head_dim", 16) * rope["partial_rotary_factor"])
        values["rope.dimension_count"] = size
    if architecture in ("glm4moe", "deepseek2"):
        values |= {
            "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "leading_dense_block_count": config.first_k_dense_replace,
            "nextn_predict_layers": 0,
        }
    if architecture == "gpt-oss":
        values["attention.sliding_window"] = config.sliding_window
        values["expert_feed_forward_length"] = config.intermediate_size
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    if architecture == "deepseek2":
        values |= _latent_lengths(config)
    if architecture.startswith(("qwen3next", "qwen35")):
        values |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
        }
    if architecture == "granite":
        values["attention.scale"] = config.attention_multiplier
        values["embedding_scale"] = config.embedding_multiplier
        values["residual_scale"] = config.residual_multiplier
        values["logit_scale"] = config.logits_scaling
    return values


def _latent_lengths(config) -> dict:
    """Return the metadata of latent attention; newer files have lengths of latents, too."""
    rope = config.rope_parameters
    lengths = {
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if rope["rope_type"] == "yarn":
        lengths |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if not getattr(config, "kv_b_by_head", True):
        return lengths | {"attention.key_length": key, "attention.value_length": value}
    return lengths | {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": key,
        "attention.value_length": config.kv_lora_rank,
        "attention.value_length_mla": value,
    }


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
    KINDS.IQ1_S: ((0, 0.03),),
    KINDS.IQ2_XXS: ((0, 0.003),),
    KINDS.IQ2_XS: ((0, 0.003),),
    KINDS.IQ2_S: ((0, 0.003),),
    KINDS.IQ3_XXS: ((0, 0.001),),
    KINDS.IQ3_S: ((0, 0.002),),
}
"""Where a block has float16 scales, and values that make weights of about 0.2 with mean 0."""


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks of finite weights, uint8 [..., rows, bytes]."""
    *outer, columns = shape
    rows = math.prod(outer)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    source = np.random.default_rng([rows, columns, int(kind)])
    blocks = source.integers(0, 256, (rows, columns // block, size), np.uint8)
    for at, scale in SCALES[kind]:
        scales = scale * source.uniform(0.5, 1.0, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*outer, -1)


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
