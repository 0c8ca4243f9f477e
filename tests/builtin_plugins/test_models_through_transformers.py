"""Models through transformers: equal to transformers', alone, in batches, in chunks; refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builtins.model_harness import build_model, load_model, open_loader
from support.builtins.transformers_parity import check_logits_and_greedy_tokens, check_parts

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.transformers import attention
from hardpoint.builtin_plugins.models.transformers.model import ThroughTransformers
from hardpoint.plugins import ModelError

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
GATE = ("gpt2", "gemma3_text", "qwen3_moe")
REFUSED = {
    "gpt_oss": (
        "GptOssForCausalLM",
        TINY | MOE,
        r"layers\.0\.self_attn: sinks \(s_aux\): 4 numbers",
    ),
    "diffllama": ("DiffLlamaForCausalLM", TINY, "attention: called more than once in a step"),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": 97, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
        "2 layers, of which 0 call the attention interface",
    ),
    "jamba": ("JambaForCausalLM", TINY, r"mamba\.conv1d \(Conv1d\), which keeps a state"),
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


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in GATE else [pytest.mark.nightly]) for k in FAMILIES],
)
def test_logits_and_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = save(kind, *FAMILIES[kind], tmp_path)
    check_logits_and_greedy_tokens((reference, ThroughTransformers, tmp_path))


def test_two_ranks_divide_a_model_by_its_tp_plan(tmp_path: Path) -> None:
    reference = save("smollm3", *FAMILIES["smollm3"], tmp_path)
    check_parts((reference, ThroughTransformers, tmp_path), 2, 1)


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
    monkeypatch.setattr(attention.Specs, "window_of", lambda *_: None)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn: eager attention .* differs by"):
        load_model(
            ThroughTransformers, open_loader(SafetensorsLoader, tmp_path), dtype=torch.float32
        )


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
