"""Tiny configurations of the architectures of transformers, made of their defaults."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 97
LENGTH = 256

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(\w+_)?vocab_size\w*|\w*_vocab", VOCABULARY),
    (r"max_\w*position\w*|n_positions|n_ctx|max_seq_len|model_max_length|context_length", LENGTH),
    (r"num_experts_per_tok(en)?|moe_top_?k|n_group|num_expert_group|moe_k", 2),
    (r"topk_group", 1),
    (r"(n_routed|num|num_local|moe_num)_experts|zero_expert_num", 4),
    (r"(n|num|moe_num)_shared_experts", 1),
    (r"\w*(intermediate|ffn_hidden)_size\w*|\w*ffn_dim|dff|dim_ff|d_inner", 48),
    (r"moe_intermediate_size|\w*expert\w*_size", 32),
    (r"(\w+_)?hidden_size|d_model|n_embd|emb_dim|(\w+_)?embedding_size|embedding_dim", 64),
    (r"word_embed_proj_dim|projection_dim|lru_width|ple_embed_dim", 64),
    (r"hidden_size_per_layer_input", 8),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks|\w*coder_layers", 2),
    (r"num_attention_heads|n_heads?|num_heads|\w*attention_heads|linear_num_heads", 4),
    (r"(\w+_)?num_key_value_heads|num_kv_heads|num_query_groups|linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"(\w+_)?head_dim|d_head|dim_head|kv_channels", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"(q|kv|o|hc_low|laurel_|gated_norm_)_?(lora_)?rank|adapter_rank|hc_lowrank", 16),
    (r"sliding_window(_size)?|(local_)?attention_window(_size|_len)?|window_size", 9),
    (r"attention_chunk_size|floor_scale|rel_extent|log_scaling_n_floor", 16),
    (r"index_topk\w*|keep_window_size", 8),
    (r"index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"image_size", 16),
    (r"num_centroids", 8),
    (r"centroid_intermediate_top_k", 4),
)
"""Names of fields, regular expressions of the whole, and their sizes; the last that fits counts."""

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 2}

_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"first_k_dense_replace": 1, "linear_num_heads": 4},
    "BltForCausalLM": {"patch_in_forward": False},
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "Dots3NoteForCausalLM": {
        "num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_qk_nope_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "Ernie4_5_MoeForCausalLM": {"moe_layer_end_index": 1},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "intermediate_size": 48,
        "activation_sparsity_pattern": None,
        "layer_types": None,
    },
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 6,
            "num_hidden_layers": 6,
        },
        "backbone_hidden_size": 64,
    },
    # Of 4, the second and third of a token differ by one rounding.
    "GptOssForCausalLM": {"num_local_experts": 5},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MiniMaxM3VLForCausalLM": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "MinistralForCausalLM": {"head_dim": 16},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "Qwen3NextForCausalLM": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Fields of architectures whose defaults, or whose sizes above, are no valid configuration."""


def tiny_config(config_class: type[PreTrainedConfig], architecture: str) -> PreTrainedConfig:
    """Return a configuration of little size, which names the architecture."""
    try:
        usual = config_class()
    except Exception:
        config = config_class(**_EXCEPTIONS[architecture])
    else:
        fields = _shrunk(usual) | _scaled(usual) | _decoding(usual)
        config = config_class(**(fields | _EXCEPTIONS.get(architecture, {})))
    config.architectures = [architecture]
    return config


def _decoding(usual: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields by which a family that has encoders is a decoder alone."""
    fields: dict[str, Any] = {}
    if getattr(usual, "is_encoder_decoder", False):
        fields = {"is_encoder_decoder": False, "is_decoder": True}
    elif getattr(usual, "is_decoder", None) is False:
        fields = {"is_decoder": True}
    return fields


def _scaled(usual: PreTrainedConfig) -> dict[str, Any]:
    """Return scaled rotary embeddings with a scaling for prompts of `LENGTH`."""
    rotary = getattr(usual, "rope_parameters", None) or {}
    if rotary.get("rope_type") != "yarn":
        return {}
    parameters = {name: value for name, value in rotary.items() if name != "partial_rotary_factor"}
    parameters["original_max_position_embeddings"] = LENGTH // int(rotary["factor"])
    return {"rope_parameters": parameters}


def _shrunk(usual: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that are to be smaller."""
    fields: dict[str, Any] = {}
    for name, value in vars(usual).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = {"model_type": value.model_type} | _shrunk(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            sizes = [size for pattern, size in _SIZES if re.fullmatch(pattern, name)]
            if sizes and value > sizes[-1]:
                fields[name] = sizes[-1]
        if name in _TOKENS and value is not None and value not in range(VOCABULARY):
            fields[name] = _TOKENS[name]
    if hasattr(usual, "qk_rope_head_dim") and "head_dim" in fields:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if name in fields:
            fields[name] = max(_needed_layers(usual), fields[name])
    return fields


def _needed_layers(usual: PreTrainedConfig) -> int:
    """Return how many layers have one of each type."""
    types = getattr(usual, "layer_types", None) or getattr(usual, "layers_block_type", None) or []
    return max((list(types).index(kind) + 1 for kind in set(types)), default=0)
