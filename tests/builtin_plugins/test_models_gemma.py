"""Gemma 2 and 3: equal to transformers', alone, in batches, in ranks and in stages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builtins.model_harness import Runner, build_model, load_model, open_loader
from support.builtins.transformers_parity import (
    TOKENS,
    check_logits_and_greedy_tokens,
    check_parts,
)

from hardpoint.builtin_plugins.attention.native_cpu import NativeAttention
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.gemma.text import Gemma2, Gemma3
from hardpoint.plugins import Model, ModelConfig, ModelError

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 80,  # whose square root bfloat16 rounds
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
MISSING = object()  # of a field that a config leaves out


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: Any, tmp_path_factory: Any) -> tuple[Any, type[Model], Path]:
    """A random model of transformers, saved: the model, our class, and the folder."""
    import transformers

    kind, fields = VARIANTS[request.param]
    config_class = transformers.Gemma2Config if kind is Gemma2 else transformers.Gemma3TextConfig
    torch.manual_seed(5)
    # Copied, as transformers changes the tables that it is given.
    config = config_class(**copy.deepcopy(TINY | fields))
    reference = transformers.AutoModelForCausalLM.from_config(
        config,
        attn_implementation="eager",  # the others leave soft caps out
        dtype=torch.float32,
    ).eval()
    for parameter in reference.parameters():
        parameter.data.normal_(0.0, 0.2)  # also the weights of norms, which are added to 1
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return reference, kind, folder


def test_logits_and_greedy_tokens_equal_transformers(variant) -> None:
    check_logits_and_greedy_tokens(variant)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2)])
def test_parts_equal_transformers(variant, ranks: int, stages: int) -> None:
    check_parts(variant, ranks, stages)


@pytest.mark.parametrize("backend", [TorchAttention, NativeAttention])
@torch.inference_mode()
def test_bfloat16_is_as_close_as_in_transformers(variant, backend) -> None:
    reference, kind, folder = variant
    model = load_model(kind, open_loader(SafetensorsLoader, folder), dtype=torch.bfloat16)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    logits = Runner(model, dtype=torch.bfloat16, attention=backend).logits([("a", TOKENS)])
    rounded = type(reference).from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert torch.equal(
        model.embed(torch.tensor(TOKENS)), rounded.model.embed_tokens(torch.tensor(TOKENS))
    )
    theirs = rounded(torch.tensor([TOKENS])).logits[0].float()
    assert (logits - expected).norm() < 1.1 * (theirs - expected).norm()


@torch.inference_mode()
def test_a_loaded_model_can_be_kept(variant) -> None:
    _, kind, folder = variant
    loader = open_loader(SafetensorsLoader, folder)
    model = load_model(kind, loader, dtype=torch.bfloat16)
    again = build_model(kind, loader.config(), dtype=torch.bfloat16)
    again.load_packed(model.packed_weights())
    results = [Runner(m, dtype=torch.bfloat16).logits([("a", TOKENS)]) for m in (model, again)]
    assert torch.equal(*results)


def config(kind: type[Model], fields: dict[str, Any]) -> ModelConfig:
    hf = {name: value for name, value in (TINY | fields).items() if value is not MISSING}
    return ModelConfig(
        architecture=f"{kind.__name__}ForCausalLM",
        hf=hf,
        vocab_size=97,
        max_position_embeddings=256,
    )


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    import transformers

    fields = dict.fromkeys(("head_dim", "query_pre_attn_scalar", "sliding_window"), MISSING)
    for kind, reference in (
        (Gemma2, transformers.Gemma2Config()),
        (Gemma3, transformers.Gemma3TextConfig()),
    ):
        model = build_model(kind, config(kind, fields), dtype=torch.float32)
        spec = model.kv_specs()[0]
        assert spec.head_size == reference.head_dim
        assert spec.scale == pytest.approx(reference.query_pre_attn_scalar**-0.5)
        assert spec.window == reference.sliding_window
        assert spec.softcap == reference.attn_logit_softcapping
        assert "lm_head.weight" not in model.weight_shapes()
        layers = 13
        deep = build_model(kind, config(kind, {"num_hidden_layers": layers}), dtype=torch.float32)
        types = type(reference)(num_hidden_layers=layers).layer_types
        windows = [spec.window for spec in deep.kv_specs()]
        assert windows == [8 if kind == "sliding_attention" else None for kind in types]


def test_gemma3_honours_a_soft_cap_of_attention() -> None:
    """Which transformers reads and does not use."""
    model = build_model(Gemma3, config(Gemma3, {"attn_logit_softcapping": 5}), dtype=torch.float32)
    assert [spec.softcap for spec in model.kv_specs()] == [5.0] * 4


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
@torch.inference_mode()
def test_old_and_new_spelling_of_rope_agree(scaling) -> None:
    full = {"rope_theta": 3e5, **(scaling or {"rope_type": "default"})}
    new = {"sliding_attention": {"rope_theta": 77.0}, "full_attention": full}
    old = {"rope_theta": 3e5, "rope_local_base_freq": 77.0, "rope_scaling": scaling}
    tables = []
    for fields in ({"rope_parameters": new}, old):
        model = build_model(
            Gemma3, config(Gemma3, fields | {"num_hidden_layers": 6}), dtype=torch.float32
        )
        ropes = model.rotary_embeddings()
        for rope in (ropes[0], ropes[5]):
            rope.allocate()
            tables.append(rope.at(torch.arange(40)))
    assert torch.equal(tables[0], tables[2])
    assert torch.equal(tables[1], tables[3])
    assert not torch.equal(tables[0], tables[1])


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Gemma2, {"hidden_size": MISSING}, "hidden_size: missing"),
        (Gemma2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping: expected a number > 0"),
        (Gemma2, {"attn_logit_softcapping": "50"}, "attn_logit_softcapping: .* got '50'"),
        (Gemma2, {"final_logit_softcapping": -30.0}, "final_logit_softcapping: .* got -30.0"),
        (Gemma3, {"final_logit_softcapping": True}, "final_logit_softcapping: .* got True"),
        (Gemma2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a number > 0"),
        (Gemma2, {"head_dim": 15}, "head_dim: expected an even number .* got 15"),
        (Gemma2, {"hidden_activation": "gelu"}, "hidden_activation: expected .* got 'gelu'"),
        (Gemma2, {"layer_types": ["full_attention"]}, "layer_types: expected 4 of full_attention"),
        (Gemma2, {"sliding_window": -1}, "sliding_window: expected a whole number >= 1, got -1"),
        (Gemma2, {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected f"),
        (Gemma3, {"sliding_window_pattern": 0}, "sliding_window_pattern: expected a whole number"),
        (Gemma3, {"rope_local_base_freq": 0}, "rope_local_base_freq: expected a number > 0, got 0"),
        (Gemma3, {"rope_theta": "x"}, "rope_theta: expected a number > 0, got 'x'"),
        (Gemma3, {"rope_scaling": 8}, "rope_scaling: expected a table, got 8"),
        (
            Gemma3,
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters: expected a table for full_attention and .* got 'rope_type'",
        ),
        (
            Gemma3,
            {"rope_parameters": {"full_attention": 1e6}},
            "rope_parameters: full_attention: expected a table, got 1000000.0",
        ),
        (
            Gemma3,
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type: 'dynamic' depends on the running length",
        ),
    ],
)
def test_wrong_fields_are_named(kind, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"{kind.__name__}ForCausalLM config: {message}"):
        build_model(kind, config(kind, fields), dtype=torch.float32)
