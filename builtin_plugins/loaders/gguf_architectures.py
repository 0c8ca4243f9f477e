"""The model of a GGUF file: architectures, metadata and names of tensors.

The names are those of llama.cpp (gguf-py's constants.py); what converters change and models assume
is in its convert_hf_to_gguf.py and src/llama-model.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
OUTER_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
"""Hugging Face names of the tensors that are in no block."""
BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
"""Name of a tensor of a block: its number, the tensor, the kind."""

REQUIRED = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "context_length",
)
MAY_BE_ZERO = ("leading_dense_block_count", "nextn_predict_layers")
"""Whole numbers that need not be at least 1."""
_FIELDS: dict[str, tuple[str, type]] = {
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
    "block_count": ("num_hidden_layers", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.key_length": ("head_dim", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "attention.sliding_window": ("sliding_window", int),
    "context_length": ("max_position_embeddings", int),
}
_SELF_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
_DENSE = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = {
    "attn_norm": "input_layernorm",
    **_SELF_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    **_DENSE,
}
_GEMMA = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {
    **_SELF_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_EXPERT_FIELDS: dict[str, tuple[str, type]] = {
    "expert_count": ("num_experts", int),
    "expert_used_count": ("num_experts_per_tok", int),
    "expert_feed_forward_length": ("moe_intermediate_size", int),
}

_WHOLE_NAMES = ("mlp.gate.e_score_correction_bias",)
"""Of tensors that are no `weight` or `bias` of a layer."""
MOST_EXPERTS = 1024
"""Of a block, each of which has matrices of its own; llama.cpp has room for 512."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}
"""Metadata that changes what models compute, and the values that change nothing, by key.

Files with other values are refused, unless the key is one of the architecture's fields.
"""

Fields = dict[str, Any]
"""Of a Hugging Face config."""


def _nothing(_config: Fields) -> Fields:
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How files store an architecture.

    Attributes:
        name: the Hugging Face one.
        blocks: Hugging Face names of the tensors of a block; "*" is the number of an expert.
        fields: Hugging Face names and types of metadata that other architectures do not have.
        derive: returns the fields that no metadata has, of a config with the others.
        is_permuted: whether rows of q and k are permuted within each head.
        norm_offset: what is added to the weights of norms.
        window_theta: base frequency of layers with a sliding window, unless the file has one; 0 is
            that of the others, None is for architectures with one set of parameters for all.
        neutral: instead of those in `NEUTRAL`, which are of most architectures.
    """

    name: str
    blocks: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    fields: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    derive: Callable[[Fields], Fields] = _nothing
    is_permuted: bool = False
    norm_offset: float = 0.0
    window_theta: float | None = None
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def all_fields(self) -> dict[str, tuple[str, type]]:
        """Return Hugging Face names and types by key of the metadata."""
        fields = {**_FIELDS, **self.fields}
        if "attention.layer_norm_epsilon" in fields:  # of norms that subtract the mean, too
            del fields["attention.layer_norm_rms_epsilon"]
        return fields

    def hf_name(self, name: str) -> str | None:
        """Return the Hugging Face name of a tensor; None if it has none."""
        if match := BLOCK.fullmatch(name):
            inner = self.blocks.get(match[2])
            suffix = "" if inner in _WHOLE_NAMES else f".{match[3]}"
            return inner and f"model.layers.{match[1]}.{inner}{suffix}"
        return OUTER_NAMES.get(name)


def _gemma(config: Fields, largest: int) -> Fields:
    """Return the fields of both; of the model with `largest` layers heads are scaled otherwise."""
    size = config["head_dim"]
    if config["num_hidden_layers"] == largest:
        size = config["hidden_size"] / config["num_attention_heads"]
    derived = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": size}
    if "sliding_window" not in config:
        derived["sliding_window"] = None
    return derived


def _gemma3(config: Fields) -> Fields:
    derived = _gemma(config, 62)
    if "sliding_window" not in config:
        derived["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return derived


def _glm4_moe(config: Fields) -> Fields:
    # The last blocks predict further tokens: they are no layers.
    layers = config["num_hidden_layers"] - config.get("num_nextn_predict_layers", 0)
    return {"num_hidden_layers": layers}


def _granite(config: Fields) -> Fields:
    scale = 1.0 / math.sqrt(config["head_dim"])
    return {} if "attention_multiplier" in config else {"attention_multiplier": scale}


ARCHITECTURES = {
    "llama": Architecture(name="LlamaForCausalLM", is_permuted=True),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM"),
    "qwen2moe": Architecture(
        name="Qwen2MoeForCausalLM",
        blocks={
            **_LLAMA,
            **_EXPERTS,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        fields={
            **_EXPERT_FIELDS,
            "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", int),
        },
        derive=lambda _: {"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM",
        blocks={**_LLAMA, **_EXPERTS},
        fields=_EXPERT_FIELDS,
        derive=lambda _: {"norm_topk_prob": True},
    ),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        blocks=_GEMMA,
        fields={
            "attn_logit_softcapping": ("attn_logit_softcapping", float),
            "final_logit_softcapping": ("final_logit_softcapping", float),
        },
        derive=lambda config: _gemma(config, 46),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        blocks=_GEMMA,
        fields={
            "final_logit_softcapping": ("final_logit_softcapping", float),
            "attention.sliding_window_pattern": ("sliding_window_pattern", int),
        },
        derive=_gemma3,
        norm_offset=1.0,
        window_theta=10000.0,
    ),
    "granite": Architecture(
        name="GraniteForCausalLM",
        fields={
            "attention.scale": ("attention_multiplier", float),
            "embedding_scale": ("embedding_multiplier", float),
            "residual_scale": ("residual_multiplier", float),
            "logit_scale": ("logits_scaling", float),
        },
        derive=_granite,
        is_permuted=True,
    ),
    "olmo2": Architecture(name="Olmo2ForCausalLM", blocks=_NORMS_AFTER),
    "cohere2": Architecture(
        name="Cohere2ForCausalLM",
        fields={
            "attention.layer_norm_epsilon": ("layer_norm_eps", float),
            "logit_scale": ("logit_scale", float),
        },
    ),
    "glm4": Architecture(
        name="Glm4ForCausalLM",
        blocks={
            **_LLAMA,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        name="Glm4MoeForCausalLM",
        blocks={
            **_LLAMA,
            **_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        fields={
            **_EXPERT_FIELDS,
            "expert_count": ("n_routed_experts", int),
            "expert_group_count": ("n_group", int),
            "expert_group_used_count": ("topk_group", int),
            "expert_shared_count": ("n_shared_experts", int),
            "expert_weights_norm": ("norm_topk_prob", bool),
            "expert_weights_scale": ("routed_scaling_factor", float),
            "leading_dense_block_count": ("first_k_dense_replace", int),
            "nextn_predict_layers": ("num_nextn_predict_layers", int),
        },
        derive=_glm4_moe,
        neutral={"expert_gating_func": (2,)},
    ),
    "phi3": Architecture(
        name="Phi3ForCausalLM",
        blocks={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", is_permuted=True),
}
"""By `general.architecture`."""

_MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    blocks={
        **_LLAMA,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    },
    fields={
        "expert_count": ("num_local_experts", int),
        "expert_used_count": ("num_experts_per_tok", int),
    },
    is_permuted=True,
)


_OLMO3 = Architecture(name="Olmo3ForCausalLM", blocks=_NORMS_AFTER, window_theta=0.0)


def architecture_of(name: str, has_experts: bool, has_window: bool = False) -> Architecture:
    """Return one of `ARCHITECTURES`, or another one whose files are called the same.

    Those of Mixtral are called "llama" and have experts, those of OLMo 3 "olmo2" and have a window.
    """
    if name == "llama" and has_experts:
        return _MIXTRAL
    return _OLMO3 if name == "olmo2" and has_window else ARCHITECTURES[name]
