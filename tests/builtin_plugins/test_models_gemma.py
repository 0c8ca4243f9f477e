"""Gemma 2 and 3 equal transformers with random weights, and refuse what they cannot compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.builtins.model_harness import Runner, build_model, load_model, open_loader

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.gemma import Gemma2, Gemma3
from hardpoint.plugins import Model, ModelConfig, ModelError

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Caps that scores and logits of the random weights come near.
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}
VARIANTS: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "gemma2": (Gemma2, CAPS),
    "gemma2-no-caps": (Gemma2, dict.fromkeys(CAPS)),
    "gemma2-untied": (Gemma2, CAPS | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-layer-types": (
        Gemma2,
        CAPS | {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    "gemma3": (Gemma3, {"num_hidden_layers": 7}),
    "gemma3-ropes": (Gemma3, {"rope_parameters": ROPES, "sliding_window_pattern": 2}),
    "gemma3-cap": (Gemma3, {"final_logit_softcapping": 4.0, "sliding_window_pattern": 3}),
}
TOKENS: list[int] = torch.randint(
    0, 97, (60,), generator=torch.Generator().manual_seed(1)
).tolist()


def random_reference(variant: str, folder: Path) -> Any:
    """Make a small random transformers model and save it as safetensors."""
    import transformers

    kind, fields = VARIANTS[variant]
    name = "Gemma2" if kind is Gemma2 else "Gemma3"
    config_class = getattr(transformers, "Gemma2Config" if kind is Gemma2 else "Gemma3TextConfig")
    torch.manual_seed(5)
    # Its own dictionaries: transformers changes what it is given.
    config = config_class(**TINY | {k: _copied(v) for k, v in fields.items()})
    config._attn_implementation = "eager"  # the others leave soft caps out
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for parameter in reference.parameters():
        parameter.data.normal_(0.0, 0.2)  # norms' weights too: 1 is added to them
    reference.save_pretrained(folder)
    return reference


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gemma_equals_transformers(variant: str, tmp_path: Path) -> None:
    reference = random_reference(variant, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    model = load_model(VARIANTS[variant][0], loader, dtype=torch.float32, max_model_len=128)
    expected = reference_logits(reference, TOKENS)
    whole = Runner(model, dtype=torch.float32, block_size=4).logits([("a", TOKENS)])
    assert (whole - expected).abs().max() < 1e-4
    other = TOKENS[::-1][:20]
    runner = Runner(model, dtype=torch.float32, block_size=4)
    parts = [runner.logits([("a", TOKENS[:31])])]
    parts += [runner.logits([("b", other[:1]), ("a", TOKENS[31:50])])[1:]]
    parts += [runner.logits([("a", [token]), ("b", [other[1]])])[:1] for token in TOKENS[50:]]
    assert (torch.cat(parts) - expected).abs().max() < 1e-4
