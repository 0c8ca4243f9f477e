"""Adapters of a model with images: of its text model, beside others; towers are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.adapters import lora, write_adapter, write_tensors
from support.gemma_images import distance, prompt, reference, write_model

from hardpoint import LLM, ModelError, SamplingParams

PROMPTS = [prompt("see ", 0, " what?"), prompt("text alone"), prompt(1, " and ", 2)]
PARAMS = SamplingParams(
    max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=120, detokenize=False
)
OF_TEXT = r".*language_model.*\.(q_proj|v_proj|down_proj)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma3"), num_hidden_layers=2, layer_types=None)


def open_llm(folder: Path, **tables: Any) -> LLM:
    config = {"dtype": "float32", "max_model_len": 256, "kv_cache": {"block_size": 8}}
    return LLM(str(folder), config=config | {"adapters": {"max_loras": 2}} | tables)


def write_merged(folder: Path, base: Path) -> tuple[Path, Path]:
    """Write an adapter of the text model; return its folder, and the folder of the merged model."""
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    merged = write_adapter(base / "adapter", model, target_modules=OF_TEXT, size=0.2)
    shutil.copytree(folder, base / "merged")
    merged.save_pretrained(base / "merged")
    return base / "adapter", base / "merged"


def test_prompts_with_images_get_what_a_model_with_these_weights_gives(folder, tmp_path):
    adapter, merged = write_merged(folder, tmp_path)
    changed, plain = reference(merged), reference(folder)
    with open_llm(folder, scheduler={"max_num_batched_tokens": 24}) as llm:
        requests = [lora("poet", 1, adapter), None] * len(PROMPTS)
        prompts = [item for item in PROMPTS for _ in range(2)]
        outputs = llm.generate(prompts, PARAMS, lora_request=requests)
    for item, lora_request, output in zip(prompts, requests, outputs, strict=True):
        used, other = (changed, plain) if lora_request else (plain, changed)
        assert distance(output.prompt_logprobs, used.logprobs(item)[1]) < 1e-4
        assert distance(output.prompt_logprobs, other.logprobs(item)[1]) > 1e-2
        assert output.outputs[0].token_ids == used.greedy(item, 4)


def test_an_adapter_of_the_tower_is_refused_by_the_name_of_its_module(folder, tmp_path):
    module = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    write_tensors(tmp_path / "seer", module, 2, rows=48, columns=48)
    with open_llm(folder) as llm:
        (before,) = llm.generate(PROMPTS[:1], PARAMS)
        words = f"'seer': the model has no linear layer {module}, which the adapter changes"
        with pytest.raises(ModelError, match=words):
            llm.generate(PROMPTS[:1], PARAMS, lora_request=lora("seer", 1, tmp_path / "seer"))
        (after,) = llm.generate(PROMPTS[:1], PARAMS)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
