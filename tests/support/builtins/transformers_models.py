"""Tiny random models of transformers, of families that have no model of their own and others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
EARLY: dict[str, Any] = {
    "vocab_size": 97,
    "n_positions": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GEMMA = {"head_dim": 16, "sliding_window": 9, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", EARLY),
    "gemma3_text": ("Gemma3ForCausalLM", TINY | GEMMA | {"num_hidden_layers": 7}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", TINY | MOE | {"head_dim": 16}),
    "gpt_oss": ("GptOssForCausalLM", TINY | MOE | {"head_dim": 16, "sliding_window": 9}),
    "opt": ("OPTForCausalLM", TINY | {"ffn_dim": 48, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "gpt_neox": ("GPTNeoXForCausalLM", TINY),
    "phi": ("PhiForCausalLM", TINY),
    "stablelm": ("StableLmForCausalLM", TINY),
    "starcoder2": ("Starcoder2ForCausalLM", TINY | {"sliding_window": 9}),
    "mistral": ("MistralForCausalLM", TINY | {"sliding_window": 9}),
    "cohere": ("CohereForCausalLM", TINY),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", EARLY),
    "granitemoe": ("GraniteMoeForCausalLM", TINY | MOE),
    "smollm3": ("SmolLM3ForCausalLM", TINY),
    "ctrl": ("CTRLLMHeadModel", EARLY | {"dff": 48}),
}


def save(kind: str, name: str, fields: dict[str, Any], folder: Path) -> Any:
    """Save a random model of transformers; return it."""
    import transformers

    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(fields))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    assert type(model).__name__ == name
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    return model.eval()
