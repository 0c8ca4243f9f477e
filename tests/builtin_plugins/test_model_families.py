"""Dense families of a file of their own: equal to transformers', alone and divided."""

from __future__ import annotations

import copy

import pytest
import torch
from support.builtins.model_harness import Runner, build_model, load_model, open_loader
from support.builtins.transformers_parity import (
    TOKENS,
    check_logits_and_greedy_tokens,
    check_parts,
)

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.cohere2 import Cohere2
from hardpoint.builtin_plugins.models.glm4 import Glm4
from hardpoint.builtin_plugins.models.granite import Granite
from hardpoint.builtin_plugins.models.olmo import Olmo2, Olmo3
from hardpoint.builtin_plugins.models.phi3 import Phi3
from hardpoint.builtin_plugins.models.smollm3 import SmolLM3
from hardpoint.plugins import ModelConfig, ModelError
from hardpoint.plugins.parallel import Communicator, Parallel
from hardpoint.testing.model.rank_threads import run_ranks

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 9}
LONGROPE = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 32,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.5, 2.5, 9.0],
    },
    "partial_rotary_factor": 0.75,
}
YARN_OF_FULL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
VARIANTS = {
    "phi3": ("Phi3", Phi3, {"sliding_window": 9}),
    "phi3-longrope": ("Phi3", Phi3, LONGROPE),
    "phi3-grouped": (
        "Phi3",
        Phi3,
        {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", Olmo2, {"num_key_value_heads": 8}),
    "olmo2-one-kv-head": ("Olmo2", Olmo2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", Olmo3, {"sliding_window": 9}),
    "olmo3-yarn": ("Olmo3", Olmo3, {"sliding_window": 9, "rope_parameters": YARN_OF_FULL}),
    "cohere2": ("Cohere2", Cohere2, {"sliding_window": 9, "logit_scale": 0.3}),
    "cohere2-untied": (
        "Cohere2",
        Cohere2,
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "glm4": ("Glm4", Glm4, {"head_dim": 8, "num_key_value_heads": 2}),
    "glm4-unbiased": (
        "Glm4",
        Glm4,
        {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    "granite": ("Granite", Granite, FACTORS),
    "granite-tied": ("Granite", Granite, FACTORS | {"tie_word_embeddings": True}),
    "granite-biases": ("Granite", Granite, {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", SmolLM3, {}),
    "smollm3-layers": (
        "SmolLM3",
        SmolLM3,
        {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False, "attention_bias": True},
    ),
    "smollm3-window": (
        "SmolLM3",
        SmolLM3,
        SLIDING | {"no_rope_layer_interval": 2, "mlp_bias": True},
    ),
    "smollm3-layer-types": (
        "SmolLM3",
        SmolLM3,
        SLIDING | {"layer_types": ["sliding_attention", *["full_attention"] * 3]},
    ),
}


NIGHTLY = {
    "cohere2-untied",
    "glm4-unbiased",
    "granite-biases",
    "olmo3-yarn",
    "phi3-grouped",
    "smollm3-layer-types",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name in VARIANTS
    ],
)
def variant(request, tmp_path_factory):
    """A random model of transformers, saved: the model, our class, and the folder."""
    import transformers

    family, kind, fields = VARIANTS[request.param]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**TINY | copy.deepcopy(fields))
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    for parameter in reference.parameters():
        # Large enough for attention to matter; the initial values give flat scores.
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return reference, kind, folder


def test_logits_and_greedy_tokens_equal_transformers(variant) -> None:
    check_logits_and_greedy_tokens(variant)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(8, 1, marks=pytest.mark.nightly),
    ],
)
def test_parts_equal_transformers(variant, ranks: int, stages: int) -> None:
    check_parts(variant, ranks, stages)


@torch.inference_mode()
def test_bfloat16_stays_close(variant) -> None:
    reference, kind, folder = variant
    model = load_model(kind, open_loader(SafetensorsLoader, folder), dtype=torch.bfloat16)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    logits = Runner(model, dtype=torch.bfloat16).logits([("a", TOKENS)])
    rounded = type(reference).from_pretrained(folder, dtype=torch.bfloat16)
    theirs = rounded(torch.tensor([TOKENS])).logits[0].float()
    assert (logits - expected).norm() < 1.1 * (theirs - expected).norm()


def test_the_original_context_of_phi3_is_4096_unless_configured():
    def variant(length, **fields):
        hf = TINY | LONGROPE | {"max_position_embeddings": 8192} | fields
        config = ModelConfig(architecture="Any", hf=hf, vocab_size=97, max_position_embeddings=8192)
        return build_model(Phi3, config, dtype=torch.float32, max_model_len=length).kv_variant

    original, scaling = "original_max_position_embeddings", LONGROPE["rope_scaling"]
    assert [variant(n, **{original: None}) for n in (4096, 4097)] == ["short", "long"]
    within = {original: None, "rope_scaling": scaling | {original: 8}}
    assert [variant(n, **within) for n in (8, 9)] == ["short", "long"]
    assert [variant(n, **{original: 16}) for n in (16, 17)] == ["short", "long"]


def longrope(**fields) -> dict:
    """Return a config with other parameters of LongRoPE."""
    return LONGROPE | {"rope_scaling": LONGROPE["rope_scaling"] | fields}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Granite, {"embedding_multiplier": 0}, "embedding_multiplier: expected a number > 0"),
        (Granite, {"residual_multiplier": "1"}, "residual_multiplier: expected a number > 0"),
        (Granite, {"attention_multiplier": -1}, "attention_multiplier: expected a number > 0"),
        (Granite, {"logits_scaling": True}, "logits_scaling: expected a number > 0, got True"),
        (
            Granite,
            {"residual_multiplier": 1e-200},
            r"residual_multiplier: expected .* rms_norm_eps .* is finite in float32, got 1e-200",
        ),
        (Granite, {"residual_multiplier": 1e-30}, "residual_multiplier: expected .*, got 1e-30"),
        (
            Granite,
            {"residual_multiplier": 1e-10, "embedding_multiplier": 1e38},
            "residual_multiplier: expected .* embedding_multiplier .* is finite in float32",
        ),
        (
            Phi3,
            LONGROPE | {"original_max_position_embeddings": 0},
            "original_max_position_embeddin",
        ),
        (
            Phi3,
            LONGROPE | {"original_max_position_embeddings": 1},
            ".*: expected at least 2, got 1",
        ),
        (Phi3, longrope(factor=0), "factor: expected a number > 0, got 0"),
        (Phi3, LONGROPE | {"partial_rotary_factor": 1.0}, "short_factor: expected 4 numbers > 0, "),
        (Phi3, longrope(long_factor=[1.0, 2.0, 0]), "long_factor: expected a number > 0, got 0"),
        (Phi3, longrope(long_factor=3), "long_factor: expected 3 numbers > 0, got 3"),
        (Phi3, longrope(factor="x"), "factor: expected a number > 0, got 'x'"),
        (Phi3, longrope(attention_factor=-1), "attention_factor: expected a number > 0, got -1"),
        (Phi3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected a number of at mo"),
        (Phi3, {"partial_rotary_factor": 0.4}, "partial_rotary_factor: .* head size 8, got 0.4"),
        (Phi3, {"partial_rotary_factor": "x"}, "partial_rotary_factor: expected a number > 0"),
        (Phi3, {"sliding_window": 0}, "sliding_window: expected a whole number >= 1, got 0"),
        (Cohere2, {"logit_scale": 0}, "logit_scale: expected a number > 0, got 0"),
        (Cohere2, {"use_qk_norm": True}, "use_qk_norm: expected false, got true"),
        (Cohere2, {"sliding_window_pattern": 0}, "sliding_window_pattern: expected a whole number"),
        (Glm4, {"partial_rotary_factor": 2}, "partial_rotary_factor: expected a number of at mo"),
        (Olmo3, {"layer_types": ["full"]}, "layer_types: expected 4 of full_attention"),
        (Olmo3, {"rope_parameters": {"rope_theta": 1}}, "rope_parameters: expected a table for"),
        (Olmo2, {"rms_norm_eps": 0}, "rms_norm_eps: expected a number > 0, got 0"),
        (SmolLM3, {"no_rope_layers": [1, 0]}, r"no_rope_layers: expected 4 of 0 .* got \[1, 0\]"),
        (SmolLM3, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers: expected 4 of 0"),
        (SmolLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval: expected a whole number"),
        (SmolLM3, SLIDING | {"layer_types": ["full"]}, "layer_types: expected 4 of full_attention"),
        (SmolLM3, {"use_sliding_window": 1}, "use_sliding_window: expected true or false, got 1"),
    ],
)
def test_wrong_fields_are_named(kind, fields: dict, message: str) -> None:
    config = ModelConfig(
        architecture="TestForCausalLM",
        hf=TINY | fields,
        vocab_size=97,
        max_position_embeddings=256,
    )
    with pytest.raises(ModelError, match=f"TestForCausalLM config: {message}"):
        build_model(kind, config, dtype=torch.float32)


def test_what_a_config_of_smollm3_leaves_out_is_as_in_transformers() -> None:
    import transformers

    fields = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    reference = transformers.SmolLM3Config(**fields)
    config = ModelConfig(
        architecture="SmolLM3ForCausalLM", hf=fields, vocab_size=97, max_position_embeddings=256
    )
    model = build_model(SmolLM3, config, dtype=torch.float32)
    hf = SmolLM3.config_defaults
    assert reference.rope_parameters["rope_theta"] == hf["rope_theta"]
    for name in ("num_key_value_heads", "tie_word_embeddings"):
        assert getattr(reference, name) == hf[name]
    assert [rope is not None for rope in model.rotary_embeddings()] == [True, True, True, False]
    assert "lm_head.weight" not in model.weight_shapes()


@pytest.mark.parametrize(
    "fields",
    [{}, {"type": "su"}, {"type": "yarn"}, {"factor": 4.0}, {"attention_factor": 1.5}],
    ids=str,
)
@pytest.mark.parametrize("max_model_len", [32, 33])
def test_max_model_len_chooses_the_factors_of_longrope(fields: dict, max_model_len: int) -> None:
    import transformers
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    hf = TINY | longrope(**fields)
    theirs = TINY | longrope(**fields | {"type": "longrope"})  # its old names are the same
    rotary = Phi3RotaryEmbedding(transformers.Phi3Config(**copy.deepcopy(theirs)))
    positions = torch.arange(max_model_len)
    cos, sin = (part[0, :, :3] for part in rotary(torch.zeros(1), positions[None]))
    config = ModelConfig(
        architecture="Phi3ForCausalLM", hf=hf, vocab_size=97, max_position_embeddings=256
    )
    model = build_model(Phi3, config, dtype=torch.float32, max_model_len=max_model_len)
    rope = model.rotary_embeddings()[0]
    rope.allocate()
    assert (rope.at(positions) - torch.cat((cos, sin), 1)).abs().max() < 1e-5
    assert model.kv_variant == ("short" if max_model_len == 32 else "long")


def test_a_rank_reads_its_rows_of_fused_matrices_alone(tmp_path) -> None:
    import transformers

    torch.manual_seed(5)
    config = transformers.Phi3Config(**TINY | {"num_key_value_heads": 2})
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    qkv = "model.layers.0.self_attn.qkv_proj.weight"

    def read(communicator: Communicator) -> tuple[int, torch.Tensor]:
        parallel = Parallel(communicator)
        model = build_model(Phi3, loader.config(), dtype=torch.float32, parallel=parallel)
        cuts = model.weight_cuts()
        weights = dict(loader.cut_weights(model.weight_shapes(), cuts))
        return len(weights[qkv]), cuts[qkv].of(torch.arange(96))

    (size, first), (_, second) = run_ranks(2, read)
    rows = [[*range(32), *range(64, 72), *range(80, 88)]]
    rows += [[*range(32, 64), *range(72, 80), *range(88, 96)]]
    assert [first.tolist(), second.tolist()] == rows
    assert size == 48
