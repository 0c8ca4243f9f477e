"""The model of a GGUF file: architectures, metadata and names of tensors.

The names come from llama.cpp (gguf-py's constants.py); conversions and assumptions of models
are in its convert_hf_to_gguf.py and src/llama-model.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
OUTER_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
"""Hugging Face names of the tensors that are in no block."""
BLOCK = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(weight|bias))?")
"""Name of a tensor of a block: its number, the tensor, the kind if it has one."""

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
_SHARED_EXPERT_FIELDS: dict[str, tuple[str, type]] = {
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", int),
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_RULE = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_FIELDS: dict[str, tuple[str, type]] = {
    "ssm.conv_kernel": ("linear_conv_kernel_dim", int),
    "ssm.state_size": ("linear_key_head_dim", int),
    "ssm.group_count": ("linear_num_key_heads", int),
    "ssm.time_step_rank": ("linear_num_value_heads", int),
    "ssm.inner_size": ("linear_value_size", int),  # of all heads
    "full_attention_interval": ("full_attention_interval", int),
    "nextn_predict_layers": ("num_nextn_predict_layers", int),
}
_DELTA_RESTORED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear_attn.norm.weight": lambda norm: norm,
    "linear_attn.A_log": lambda decay: decay.neg().log(),
}

_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GROUPED_EXPERT_FIELDS: dict[str, tuple[str, type]] = {
    **_EXPERT_FIELDS,
    "expert_count": ("n_routed_experts", int),
    "expert_group_count": ("n_group", int),
    "expert_group_used_count": ("topk_group", int),
    "expert_shared_count": ("n_shared_experts", int),
    "expert_weights_norm": ("norm_topk_prob", bool),
    "expert_weights_scale": ("routed_scaling_factor", float),
    "leading_dense_block_count": ("first_k_dense_replace", int),
    "nextn_predict_layers": ("num_nextn_predict_layers", int),
}

_WHOLE_NAMES = (
    "mlp.gate.e_score_correction_bias",
    "self_attn.sinks",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
)
"""Of tensors that are no `weight` or `bias` of a layer."""
MOST_EXPERTS = 1024
"""Of a block, each with matrices of its own; llama.cpp has room for 512."""
SIGMOID_GATING = 2
"""Value of `expert_gating_func`."""
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
"""Metadata that changes the results of models, and the neutral values, by key.

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
        rotates_part: whether a part of each head may be rotated.
        norm_offset: number added to the weights of norms.
        restored: functions that restore other changed tensors, by the end of their names.
        window_theta: base frequency of layers with a sliding window, unless the file has one; 0 is
            the value of the others, None is for architectures with one set of parameters for all.
        yarn: parameters of YaRN that no metadata has.
        neutral: instead of `NEUTRAL`, which fits most architectures.
    """

    name: str
    blocks: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    fields: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    derive: Callable[[Fields], Fields] = _nothing
    is_permuted: bool = False
    rotates_part: bool = False
    norm_offset: float = 0.0
    restored: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    window_theta: float | None = None
    yarn: Mapping[str, Any] = field(default_factory=dict)
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
            suffix = "" if inner in _WHOLE_NAMES or not match[3] else f".{match[3]}"
            return inner and f"model.layers.{match[1]}.{inner}{suffix}"
        return OUTER_NAMES.get(name)

    def restore(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, by its Hugging Face name, as it was before it was converted."""
        for end, change in self.restored.items():
            if name.endswith(end):
                return change(tensor)
        has_offset = self.norm_offset and name.endswith("norm.weight")
        return tensor - self.norm_offset if has_offset else tensor


def _gemma(config: Fields, largest: int) -> Fields:
    """Return the fields of both; of the model with `largest` layers heads are scaled otherwise."""
    size = config["head_dim"]
    if config["num_hidden_layers"] == largest:
        size = config["hidden_size"] / config["num_attention_heads"]
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": size}


def _gemma3(config: Fields) -> Fields:
    derived = _gemma(config, 62)
    if "sliding_window" not in config:
        derived["sliding_window"] = None
        derived["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return derived


def _without_predicting_blocks(config: Fields) -> Fields:
    # The last blocks predict further tokens: they are no layers.
    layers = config["num_hidden_layers"] - config.get("num_nextn_predict_layers", 0)
    return {"num_hidden_layers": layers}


def _qwen3_next(config: Fields) -> Fields:
    # The parts of `in_proj_qkvz`, stacked by key head, are separate tensors.
    derived = {"norm_topk_prob": True, "splits_in_proj_qkvz": True, "partial_rotary_factor": 1.0}
    derived |= _without_predicting_blocks(config)
    heads, values = config.get("linear_num_value_heads"), config.get("linear_value_size")
    return derived | ({"linear_value_head_dim": values // heads} if heads and values else {})


def _qwen35(config: Fields) -> Fields:
    # Value heads are in an order in which ggml repeats key heads.
    return _qwen3_next(config) | {"alternates_key_heads": True}


def _granite(config: Fields) -> Fields:
    scale = 1.0 / math.sqrt(config["head_dim"])
    return {} if "attention_multiplier" in config else {"attention_multiplier": scale}


def _latent_attention(config: Fields) -> Fields:
    """Return the sizes of latent attention.

    Lengths of keys and values are lengths of heads in files that have none under another name,
    of latents in newer ones.
    """
    rope = config.get("qk_rope_head_dim", config["head_dim"])
    suffix = "_mla" if "key_length_mla" in config else ""
    key, value = (config.get(f"{side}_length{suffix}", 0) for side in ("key", "value"))
    return {
        **_without_predicting_blocks(config),
        "head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        # As llama.cpp computes files that leave them out.
        "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1),
        "first_k_dense_replace": config.get("first_k_dense_replace", 0),
        "norm_topk_prob": config.get("norm_topk_prob", False),
        "routed_scaling_factor": config.get("routed_scaling_factor") or 1.0,
    }


def _deepseek_v2(config: Fields) -> Fields:
    derived = _latent_attention(config)
    method = "greedy" if derived["n_group"] == 1 else "group_limited_greedy"
    return {**derived, "topk_method": method}


def _deepseek(
    name: str, derive: Callable[[Fields], Fields], gating: tuple[object, ...]
) -> Architecture:
    """Return how files store DeepSeek-V2 and V3, which have one name there.

    Args:
        name: the Hugging Face one.
        derive: as in `Architecture`.
        gating: values of `expert_gating_func`.
    """
    return Architecture(
        name=name,
        blocks={
            **_LLAMA,
            **_EXPERTS,
            **_SHARED_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj.*",
            "attn_v_b": "self_attn.v_b_proj.*",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        fields={
            **_GROUPED_EXPERT_FIELDS,
            "attention.kv_lora_rank": ("kv_lora_rank", int),
            "attention.q_lora_rank": ("q_lora_rank", int),
            "attention.key_length": ("key_length", int),
            "attention.key_length_mla": ("key_length_mla", int),
            "attention.value_length": ("value_length", int),
            "attention.value_length_mla": ("value_length_mla", int),
            "rope.dimension_count": ("qk_rope_head_dim", int),
            "rope.scaling.yarn_log_multiplier": ("yarn_log_multiplier", float),
        },
        derive=derive,
        neutral={"expert_gating_func": gating},
    )


ARCHITECTURES = {
    "llama": Architecture(name="LlamaForCausalLM", is_permuted=True),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM"),
    "qwen2moe": Architecture(
        name="Qwen2MoeForCausalLM",
        blocks={
            **_LLAMA,
            **_EXPERTS,
            **_SHARED_EXPERT,
        },
        fields={**_EXPERT_FIELDS, **_SHARED_EXPERT_FIELDS},
        derive=lambda _: {"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM",
        blocks={**_LLAMA, **_EXPERTS},
        fields=_EXPERT_FIELDS,
        derive=lambda _: {"norm_topk_prob": True},
    ),
    "qwen3next": Architecture(
        name="Qwen3NextForCausalLM",
        rotates_part=True,
        blocks={**_DELTA_RULE, **_EXPERTS, **_SHARED_EXPERT},
        fields={**_EXPERT_FIELDS, **_SHARED_EXPERT_FIELDS, **_DELTA_FIELDS},
        derive=_qwen3_next,
        norm_offset=1.0,
        restored=_DELTA_RESTORED,
    ),
    "qwen35": Architecture(
        name="Qwen3_5ForCausalLM",
        rotates_part=True,
        blocks=_DELTA_RULE,
        fields=_DELTA_FIELDS,
        derive=_qwen35,
        norm_offset=1.0,
        restored=_DELTA_RESTORED,
    ),
    "qwen35moe": Architecture(
        name="Qwen3_5MoeForCausalLM",
        rotates_part=True,
        blocks={**_DELTA_RULE, **_EXPERTS, **_SHARED_EXPERT},
        fields={**_EXPERT_FIELDS, **_SHARED_EXPERT_FIELDS, **_DELTA_FIELDS},
        derive=_qwen35,
        norm_offset=1.0,
        restored=_DELTA_RESTORED,
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
        rotates_part=True,
        blocks={
            **_LLAMA,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        name="Glm4MoeForCausalLM",
        rotates_part=True,
        blocks={
            **_LLAMA,
            **_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            **_SHARED_EXPERTS,
        },
        fields=_GROUPED_EXPERT_FIELDS,
        derive=_without_predicting_blocks,
        neutral={"expert_gating_func": (SIGMOID_GATING,)},
    ),
    "gpt-oss": Architecture(
        name="GptOssForCausalLM",
        blocks={
            **_LLAMA,
            **_EXPERTS,
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
        },
        fields={
            "expert_count": ("num_local_experts", int),
            "expert_used_count": ("num_experts_per_tok", int),
            "expert_feed_forward_length": ("intermediate_size", int),
        },
        yarn={"truncate": False},
        neutral={"expert_gating_func": (0, 1, 3)},
    ),
    "deepseek2": _deepseek("DeepseekV2ForCausalLM", _deepseek_v2, (0, 1)),
    "phi3": Architecture(
        name="Phi3ForCausalLM",
        rotates_part=True,
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


_DEEPSEEK3 = _deepseek("DeepseekV3ForCausalLM", _latent_attention, (SIGMOID_GATING,))
_WITH_WINDOW = {
    "llama": Architecture(name="MistralForCausalLM", is_permuted=True),
    "olmo2": Architecture(name="Olmo3ForCausalLM", blocks=_NORMS_AFTER, window_theta=0.0),
}


def architecture_of(
    name: str, has_experts: bool, has_window: bool = False, by_sigmoid: bool = False
) -> Architecture:
    """Return an entry of `ARCHITECTURES`, or an entry with the same name in files.

    Mixtral is called "llama" and has experts. Mistral is "llama" and OLMo 3 "olmo2", both with a
    window. DeepSeek-V3 is "deepseek2" and chooses experts by a sigmoid.
    """
    if name == "deepseek2" and by_sigmoid:
        return _DEEPSEEK3
    if name == "llama" and has_experts:
        return _MIXTRAL
    return _WITH_WINDOW[name] if has_window and name in _WITH_WINDOW else ARCHITECTURES[name]
