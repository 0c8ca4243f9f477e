"""Drafts, samples, adapters, few bits and refusals, of models through transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import all_logprobs, difference, lora, write_adapter, write_model
from support.plugins.tapping import TAPS

from hardpoint import LLM, SamplingParams
from hardpoint.errors import PluginContractError
from hardpoint.plugins import ConfigError, ModelError

THROUGH: dict[str, Any] = {"models": {"use": "transformers"}, "dtype": "float32"}
NATIVELY: dict[str, Any] = {"dtype": "float32"}
PROMPTS = ([5, 9, 33, 7] * 12, [11, 80, 4] * 9, list(range(40, 71)))
NEAR = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("through") / "model"


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return write_model(folder)


def prompts_of(ids: Any = PROMPTS) -> list[Any]:
    return [{"prompt_token_ids": list(prompt)} for prompt in ids]


def test_drafts_samples_and_adapters_have_the_logits_of_the_model(
    folder: Path, reference: torch.nn.Module, tmp_path: Path
) -> None:
    merged = write_adapter(tmp_path / "adapter", reference)
    config = THROUGH | {
        "speculation": {"use": ["ngram"], "adaptive": False},
        "adapters": {"max_loras": 1},
        "scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
        "kv_cache": {"num_blocks": 160, "block_size": 4},
    }
    greedy, drawn = all_logprobs(12), all_logprobs(6, temperature=1.0, seed=4, n=3)
    with LLM(str(folder), config=config) as llm:
        outputs = llm.generate(prompts_of(), greedy)
        adapted = llm.generate(
            prompts_of(), greedy, lora_request=lora("a", 1, tmp_path / "adapter")
        )
        (several,) = llm.generate(prompts_of(PROMPTS[:1]), drawn)
        stats = llm.engines.scheduler_stats()
    assert stats.num_accepted_drafts
    for prompt, plain, other in zip(PROMPTS, outputs, adapted, strict=True):
        assert difference(plain, prompt, reference) < NEAR
        assert difference(other, prompt, merged) < 5 * NEAR
    tokens = {tuple(completion.token_ids) for completion in several.outputs}
    assert len(tokens) == 3
    with LLM(str(folder), config=NATIVELY) as llm:
        (native,) = llm.generate(prompts_of(PROMPTS[:1]), drawn)
    assert [c.token_ids for c in several.outputs] == [c.token_ids for c in native.outputs]


@pytest.mark.parametrize("loader", ["safetensors", "dummy"])
def test_matrices_of_few_bits_and_random_weights_give_the_tokens_of_the_native_model(
    folder: Path, reference: torch.nn.Module, loader: str
) -> None:
    assert reference
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    settings = {"load": {"use": loader}, "quantization": {"use": "int8"}}
    completions = []
    for config in (THROUGH, NATIVELY):
        with LLM(str(folder), config=config | settings) as llm:
            outputs = llm.generate(prompts_of(), params)
        completions.append([output.outputs[0] for output in outputs])
    for through, native in zip(*completions, strict=True):
        assert through.token_ids == native.token_ids
        assert through.cumulative_logprob == pytest.approx(native.cumulative_logprob, abs=1e-3)


def test_taps_that_change_the_layers_are_refused(folder: Path, reference: torch.nn.Module) -> None:
    assert reference
    message = r"changes what layers add, .* does not call ModelContext\.hooks\.added"
    with pytest.raises(PluginContractError, match=message):
        LLM(str(folder), config=THROUGH | {"plugins": TAPS})


def test_stages_are_refused(folder: Path, reference: torch.nn.Module) -> None:
    assert reference
    settings = {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}}
    with pytest.raises((ConfigError, ModelError), match=r"parallel\.pipeline: .*transformers"):
        LLM(str(folder), config=THROUGH | settings)


@pytest.mark.parametrize("name", ["GPT2Model", "DistilBertForTokenClassification"])
def test_bodies_of_decoders_and_other_heads_are_refused(name: str, tmp_path: Path) -> None:
    fields = {"architectures": [name], "vocab_size": 97, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = {"load": {"use": "dummy"}, "tokenizer": {"use": "none"}}
    with pytest.raises(ModelError, match=f"architecture '{name}' is not supported"):
        LLM(str(tmp_path), config=settings)


def test_code_in_the_folder_is_named_and_not_run(tmp_path: Path) -> None:
    fields = {
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
        "vocab_size": 97,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "modeling_baichuan.py").write_text("raise SystemExit('it was run')")
    message = (
        r"'BaichuanForCausalLM' is not supported: its config\.json names code for it "
        r"\(auto_map: 'modeling_baichuan\.BaichuanForCausalLM'\), which is never run; supported: "
    )
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), config={"load": {"use": "dummy"}, "tokenizer": {"use": "none"}})


def test_a_model_with_images_runs_as_text(tmp_path: Path) -> None:
    import transformers

    text = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=96)
    torch.manual_seed(3)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([PROMPTS[1]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
    settings = {"dtype": "float32", "tokenizer": {"use": "none"}}
    with LLM(str(tmp_path), config=settings) as llm:
        (output,) = llm.generate(prompts_of(PROMPTS[1:2]), params)
    assert list(output.outputs[0].token_ids) == expected[0, prompt.shape[1] :].tolist()
