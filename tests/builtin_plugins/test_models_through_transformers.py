"""Models through transformers: equal to transformers', alone, in batches, in chunks; refusals."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builtins.model_harness import Runner, build_model, load_model, open_loader
from support.builtins.transformers_models import FAMILIES, MOE, TINY, save
from support.builtins.transformers_parity import TOKENS, check_logits_and_greedy_tokens

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.transformers import attention
from hardpoint.builtin_plugins.models.transformers.model import ThroughTransformers
from hardpoint.plugins import ModelError

GATE = ("gpt2", "gemma3_text", "qwen3_moe", "gpt_oss")
REFUSED = {
    "diffllama": ("DiffLlamaForCausalLM", TINY, "attention: called more than once in a step"),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": 97, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
        r"attention of MptModel does not call the attention interface .* \(position_bias\)",
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 97, "hidden_size": 64, "n_head": 4, "n_layer": 2},
        r"attention of BloomModel does not call .* adds biases of positions .* \(alibi\)",
    ),
    "bart": (
        "BartForCausalLM",
        {"vocab_size": 97, "d_model": 64, "decoder_layers": 2, "is_encoder_decoder": False},
        "BartDecoder takes no position_ids and counts positions from the beginning of a step",
    ),
    "rwkv": (
        "RwkvForCausalLM",
        {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2},
        r"layers that keep a state per sequence .* as transformers declares \(_is_stateful\)",
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        TINY | MOE,
        r"2 layers, of which 1 call .*; model\.layers\.1 \(MiniMaxLightningAttention, ",
    ),
    "moshi": (
        "MoshiForCausalLM",
        TINY | {"ffn_dim": 48, "sliding_window": 9},
        "a cache of fewer tokens than its masks show: sliding_window 9",
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        TINY | {"is_causal": False},
        "attention_mask: neither causal nor a sliding window: cannot be kept",
    ),
    "jamba": ("JambaForCausalLM", TINY, r"mamba\.conv1d \(Conv1d\), which keeps a state"),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in GATE else [pytest.mark.nightly]) for k in FAMILIES],
)
def test_logits_and_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = save(kind, *FAMILIES[kind], tmp_path)
    check_logits_and_greedy_tokens((reference, ThroughTransformers, tmp_path))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in GATE else [pytest.mark.nightly]) for k in FAMILIES],
)
@torch.inference_mode()
def test_packed_weights_make_the_same_model(kind: str, tmp_path: Path) -> None:
    save(kind, *FAMILIES[kind], tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    model = load_model(ThroughTransformers, loader, dtype=torch.float32)
    packed = model.packed_weights()
    assert packed is not None
    again = build_model(ThroughTransformers, loader.config(), dtype=torch.float32)
    again.load_packed(packed)
    first, second = (
        Runner(each, dtype=torch.float32).logits([("a", TOKENS)]) for each in (model, again)
    )
    assert torch.equal(first, second)
    version = next(name for name in packed if name.startswith("transformers "))
    for name in (version, sorted(packed)[0]):
        rest = {other: tensor for other, tensor in packed.items() if other != name}
        message = f"packed with {version}" if name == version else name
        with pytest.raises((KeyError, ValueError), match=message):
            build_model(ThroughTransformers, loader.config(), dtype=torch.float32).load_packed(rest)


def test_experts_are_copied_as_they_come(tmp_path: Path) -> None:
    save("qwen3_moe", *FAMILIES["qwen3_moe"], tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    model = build_model(ThroughTransformers, loader.config(), dtype=torch.float32)
    references: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in loader.weights(model.weight_shapes()):
            assert isinstance(tensor, torch.Tensor)
            if ".experts." in name:
                references.append(weakref.ref(tensor))
                alive.append(sum(reference() is not None for reference in references))
            yield name, tensor

    model.load_weights(watched())
    assert len(references) == 2 * 4 * 3
    assert max(alive) <= 2  # this one, and the one before, which the model has just copied


def test_sinks_that_are_no_parameter_of_the_layer_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    save("gpt_oss", *FAMILIES["gpt_oss"], tmp_path)
    config = open_loader(SafetensorsLoader, tmp_path).config()

    def doubled(self: torch.nn.Module, name: str) -> Any:
        value = torch.nn.Module.__getattr__(self, name)
        return value * 2 if name == "sinks" else value

    monkeypatch.setattr(GptOssAttention, "__getattr__", doubled, raising=False)
    message = r"layers\.0\.self_attn: sinks \(s_aux\) that are no parameter of the layer: \[4\] n"
    with pytest.raises(ModelError, match=message):
        build_model(ThroughTransformers, config, dtype=torch.float32)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    name, fields, message = REFUSED[kind]
    save(kind, name, fields, tmp_path)
    config = open_loader(SafetensorsLoader, tmp_path).config()
    with pytest.raises(ModelError, match=message):
        build_model(ThroughTransformers, config, dtype=torch.float32)


def test_a_layer_that_was_observed_wrongly_is_found_when_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields = FAMILIES["mistral"]
    save("mistral", name, fields | {"sliding_window": 3}, tmp_path)
    monkeypatch.setattr(attention.Specs, "window_of", lambda *_: 5)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn: eager attention .* differs by"):
        load_model(
            ThroughTransformers, open_loader(SafetensorsLoader, tmp_path), dtype=torch.float32
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_that_mix_a_little_of_other_tokens_are_found(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

    forward = GPTNeoXMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> Any:
        return forward(self, x + 0.05 * torch.nn.functional.pad(x, (0, 0, 1, -1)))

    save("gpt_neox", *FAMILIES["gpt_neox"], tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    load_model(ThroughTransformers, loader, dtype=dtype)
    monkeypatch.setattr(GPTNeoXMLP, "forward", mixing)
    message = "two prompts in one batch have other logits than .*: its modules mix tokens besides"
    with pytest.raises(ModelError, match=message):
        load_model(ThroughTransformers, loader, dtype=dtype)


def test_an_engine_falls_back_and_reuses_prefixes(tmp_path: Path) -> None:
    reference = save("gpt_neox", *FAMILIES["gpt_neox"], tmp_path)
    prompt = [5, 9, 33, 7] * 12
    config = {
        "dtype": "float32",
        "scheduler": {"max_num_batched_tokens": 20},
        "tokenizer": {"use": "none"},
    }
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    with LLM(str(tmp_path), config=config) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt}] * 2, params)
            assert [list(o.outputs[0].token_ids) for o in outputs] == [expected] * 2
        assert outputs[0].num_cached_tokens


def test_without_a_fallback_an_architecture_is_not_supported(tmp_path: Path) -> None:
    save("gpt_neox", *FAMILIES["gpt_neox"], tmp_path)
    with pytest.raises(ModelError, match="architecture 'GPTNeoXForCausalLM' is not supported"):
        LLM(str(tmp_path), config={"models": {"fallback": "none"}})
