from __future__ import annotations

import dataclasses
import math
import random
import weakref
from pathlib import Path

import pytest
import torch
from support.builtins.model_harness import Runner, build_model, load_model, open_loader
from support.demo_reference import RANDOM_TEXT, TEXTS, TextReference

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.llama import Llama, Mistral
from hardpoint.builtin_plugins.models.qwen import Qwen2, Qwen3
from hardpoint.plugins import Model, ModelConfig, ModelError

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
PROPORTIONAL = LINEAR | {"rope_type": "proportional", "partial_rotary_factor": 0.5}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
VARIANTS = {
    "llama": ("Llama", Llama, {}),
    "llama-tied": ("Llama", Llama, {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", Llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", Llama, {"head_dim": 12}),
    "llama-one-kv-head": ("Llama", Llama, {"num_key_value_heads": 1}),
    "llama3-rope": ("Llama", Llama, {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", Llama, {"rope_parameters": YARN}),
    "llama-linear": ("Llama", Llama, {"rope_parameters": LINEAR}),
    "llama-proportional": ("Llama", Llama, {"rope_parameters": PROPORTIONAL}),
    "mistral-window": ("Mistral", Mistral, {"sliding_window": 7}),
    "mistral-no-window": ("Mistral", Mistral, {"sliding_window": None}),
    "qwen2": ("Qwen2", Qwen2, {}),
    "qwen2-window": ("Qwen2", Qwen2, WINDOWED),
    "qwen3": ("Qwen3", Qwen3, {"head_dim": 16}),
    "qwen3-window": ("Qwen3", Qwen3, WINDOWED | {"head_dim": 16, "attention_bias": True}),
}


def reference_logits(reference, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0].float()


def random_reference(family: str, fields: dict, folder: Path):
    """Make a small random transformers model and save it as safetensors."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**TINY | fields)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    for parameter in reference.parameters():
        # Large enough for attention to matter; the initial values give flat scores.
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{len(text.tokens)} tokens")
def test_demo_logits_equal_transformers(demo_model: Model, text: TextReference) -> None:
    logits = Runner(demo_model, dtype=torch.float32).logits([("a", text.tokens)])
    assert logits.argmax(-1).tolist() == text.best
    top = logits.gather(1, torch.tensor(text.top_ids))
    for got, expected in (
        (top, text.top_logits),
        (logits.mean(-1), text.mean),
        (logits.std(-1), text.std),
    ):
        assert (got - torch.tensor(expected)).abs().max() < 2e-3


def test_demo_weight_shapes_are_those_of_transformers(demo_model: Model, demo_loader) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        reference = LlamaForCausalLM(LlamaConfig(**demo_loader.config().hf))
    expected = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    expected.pop("lm_head.weight")
    assert demo_model.weight_shapes() == expected


@pytest.mark.nightly
def test_bfloat16_argmax_is_as_good_as_transformers_own(demo_loader) -> None:
    tokens, exact = RANDOM_TEXT.tokens, torch.tensor(RANDOM_TEXT.best)
    model = load_model(Llama, demo_loader, dtype=torch.bfloat16)
    runner = Runner(model, dtype=torch.bfloat16)
    ours = torch.cat([runner.logits([("a", tokens[i : i + 64])]) for i in range(0, 256, 64)])
    assert int((ours.argmax(-1) == exact).sum()) >= RANDOM_TEXT.bf16_equal - 2


@pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.nightly), 16])
def test_chunks_and_decode_equal_the_whole_prefill(demo_model: Model, block_size: int) -> None:
    tokens, other = TEXTS[3].tokens[:36], TEXTS[3].tokens[60:72]
    whole = Runner(demo_model, dtype=torch.float32).logits([("a", tokens)])
    runner = Runner(demo_model, dtype=torch.float32, block_size=block_size)
    parts = [runner.logits([("a", tokens[:17])]), runner.logits([("a", tokens[17:23])])]
    parts.append(runner.logits([("a", tokens[23:32]), ("b", other)])[:9])
    for index, token in enumerate(tokens[32:]):
        mixed = [("a", [token]), ("b", other[:1])] if index % 2 else [("a", [token])]
        parts.append(runner.logits(mixed)[:1])
    assert (torch.cat(parts) - whole).abs().max() < 1e-4 * whole.abs().max()
    assert (torch.cat(parts).log_softmax(-1) - whole.log_softmax(-1)).abs().max() < 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, kind, fields = VARIANTS[variant]
    reference = random_reference(family, fields, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    model = load_model(kind, loader, dtype=torch.float32, max_model_len=128)
    tokens = torch.randint(0, 97, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(reference, tokens)
    whole = Runner(model, dtype=torch.float32, block_size=4).logits([("a", tokens)])
    assert (whole - expected).abs().max() < 1e-4
    runner = Runner(model, dtype=torch.float32, block_size=4)
    parts = [runner.logits([("a", tokens[:41])])]
    parts += [runner.logits([("a", tokens[41:70])])]
    parts += [runner.logits([("a", [token])]) for token in tokens[70:]]
    assert (torch.cat(parts) - expected).abs().max() < 1e-4


def test_the_window_matters_in_its_test(tmp_path: Path) -> None:
    random_reference("Mistral", {"sliding_window": 7}, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    config = loader.config()
    open_config = dataclasses.replace(config, hf=dict(config.hf) | {"sliding_window": None})
    tokens = list(range(40))
    results = []
    for each in (config, open_config):
        model = build_model(Mistral, each, dtype=torch.float32)
        model.load_weights(loader.weights(model.weight_shapes()))
        results.append(Runner(model, dtype=torch.float32).logits([("a", tokens)]))
    assert torch.allclose(results[0][:7], results[1][:7], atol=1e-5)
    assert (results[0][8:] - results[1][8:]).abs().max() > 1e-2


def test_old_and_new_rope_spelling_agree(tmp_path: Path) -> None:
    random_reference("Llama", {"rope_parameters": LLAMA3}, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    config = loader.config()
    old = dict(config.hf)
    scaling = dict(old.pop("rope_parameters"))
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    results = []
    for hf in (config.hf, old):
        model = build_model(Llama, dataclasses.replace(config, hf=hf), dtype=torch.float32)
        model.load_weights(loader.weights(model.weight_shapes()))
        results.append(Runner(model, dtype=torch.float32).logits([("a", list(range(60)))]))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_low_precision_stays_close(dtype: torch.dtype, fields: dict, tmp_path: Path) -> None:
    reference = random_reference("Llama", fields, tmp_path)
    model = load_model(Llama, open_loader(SafetensorsLoader, tmp_path), dtype=dtype)
    tokens = list(range(50))
    got = Runner(model, dtype=dtype).logits([("a", tokens)])
    expected = reference_logits(reference, tokens)
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_weights_come_in_any_order_and_are_not_kept(tmp_path: Path) -> None:
    random_reference("Llama", {"attention_bias": True}, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    model = build_model(Llama, loader.config(), dtype=torch.float32)
    ordered = load_model(Llama, loader, dtype=torch.float32)
    names = list(model.weight_shapes())
    random.Random(0).shuffle(names)
    alive: list[weakref.ref[torch.Tensor]] = []

    def one_by_one():
        weights = dict(loader.weights(model.weight_shapes()))
        for name in names:
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = weights.pop(name)
            alive.append(weakref.ref(tensor))
            yield name, tensor

    model.load_weights(one_by_one())
    results = [Runner(m, dtype=torch.float32).logits([("a", [1, 2, 3])]) for m in (model, ordered)]
    assert len(alive) == len(names)
    assert torch.equal(*results)


def test_missing_weights_are_named_when_the_model_runs(tmp_path: Path) -> None:
    random_reference("Llama", {}, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    model = build_model(Llama, loader.config(), dtype=torch.float32)
    lost = "model.layers.1.self_attn.k_proj.weight"
    weights = loader.weights(model.weight_shapes())
    model.load_weights((name, tensor) for name, tensor in weights if name != lost)
    with pytest.raises(RuntimeError, match=f"weights were not loaded: {lost}"):
        Runner(model, dtype=torch.float32).logits([("a", [1])])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "LlamaForCausalLM config: hidden_size: missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number >= 1, got 0"),
        ({"num_attention_heads": "6"}, "num_attention_heads: expected a whole number .* got '6'"),
        ({"num_attention_heads": 7}, "num_attention_heads: expected a divisor of hidden_size 48"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor .* 6, got 4"),
        ({"head_dim": 7}, "head_dim: expected an even number .* got 7"),
        (
            {"hidden_act": "gelu"},
            "hidden_act: expected 'silu' or 'gelu_pytorch_tanh', got 'gelu'",
        ),
        ({"is_causal": False}, "is_causal: expected true .causal attention., got false"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps: expected a number > 0, got 'tiny'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"rope_scaling": 4}, "rope_scaling: expected a table, got 4"),
        ({"rope_theta": 0}, "rope_theta: expected a number > 0, got 0"),
        ({"rope_parameters": LINEAR | {"rope_theta": 0.0}}, "rope_theta: expected a number > 0"),
        ({"rope_parameters": LINEAR | {"factor": 0}}, "factor: expected a number > 0, got 0"),
        ({"rope_parameters": LINEAR | {"factor": -2.0}}, "factor: expected a number > 0, got -2"),
        ({"rope_parameters": YARN | {"factor": math.nan}}, "factor: expected a number > 0, got n"),
        ({"rope_parameters": YARN | {"attention_factor": math.nan}}, "that are not finite"),
        ({"rope_theta": -1}, "rope_theta: expected a number > 0, got -1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' depends on the running"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 2, 3]}},
            r"short_factor: expected 4 numbers > 0, got \[1, 2, 3\]",
        ),
        ({"rope_parameters": {"rope_type": "spiral"}}, "expected one of default,.* got 'spiral'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: .* does not work"),
        ({"rope_parameters": {"full_attention": {}}}, "a set per layer type is not supported"),
    ],
)
def test_unsupported_configs_are_refused(fields: dict, message: str) -> None:
    hf = TINY | {"architectures": ["LlamaForCausalLM"]} | fields
    config = ModelConfig(
        architecture="LlamaForCausalLM", hf=hf, vocab_size=97, max_position_embeddings=256
    )
    with pytest.raises(ModelError, match=message):
        build_model(Llama, config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [None, 9, 9]),
        ({"max_window_layers": 0}, [9, 9, 9]),
        ({"max_window_layers": None}, "max_window_layers: expected a whole number >= 0, got None"),
        ({"use_sliding_window": False}, [None, None, None]),
        ({"layer_types": ["sliding_attention", *["full_attention"] * 2]}, [9, None, None]),
    ],
)
def test_qwen_windows_follow_the_config(fields: dict, expected: list | str) -> None:
    config = ModelConfig(
        architecture="Qwen2ForCausalLM",
        hf=TINY | WINDOWED | fields,
        vocab_size=97,
        max_position_embeddings=256,
    )
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            build_model(Qwen2, config, dtype=torch.float32)
    else:
        model = build_model(Qwen2, config, dtype=torch.float32)
        assert [spec.window for spec in model.kv_specs()] == expected


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention"] * 2 + ["linear"]])
def test_odd_layer_types_are_refused(types: list[str]) -> None:
    hf = TINY | WINDOWED | {"layer_types": types}
    config = ModelConfig(
        architecture="Qwen2ForCausalLM", hf=hf, vocab_size=97, max_position_embeddings=256
    )
    with pytest.raises(ModelError, match="layer_types: expected 3 of full_attention or sliding"):
        build_model(Qwen2, config, dtype=torch.float32)
