"""Engines generate the same tokens with the attention of Triton as with that of torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.cases import nightly_but
from support.gemma_images import prompt, write_model
from support.triton import kernel_device

from hardpoint import LLM, SamplingParams
from hardpoint.testing import write_scripted_model

pytest.importorskip("triton")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
PROMPTS = [{"prompt_token_ids": list(range(1, 2 + count))} for count in (3, 20)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)


def generate(
    folder: Any, prompts: list[Any], attention: str, dtype: str = "float32", **tables: Any
) -> list[Any]:
    """Return the results of an engine with this attention."""
    settings = {"attention": {"use": attention}, "device": kernel_device(), **tables}
    with LLM(str(folder), dtype=dtype, config=settings, progress=False) as llm:
        return [output.outputs[0] for output in llm.generate(prompts, GREEDY)]


def assert_same(results: list[Any], expected: list[Any], tolerance: float) -> None:
    assert [result.token_ids for result in results] == [other.token_ids for other in expected]
    for result, other in zip(results, expected, strict=True):
        for token, mine, theirs in zip(
            result.token_ids, result.logprobs, other.logprobs, strict=True
        ):
            assert abs(mine[token].logprob - theirs[token].logprob) < tolerance


def write_llama(folder: Any, **fields: Any) -> None:
    write_scripted_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | LLAMA | fields))


@pytest.mark.parametrize("cache_dtype", nightly_but(["fp8", "int8"], "int8"))
def test_tokens_of_a_quantized_cache(tmp_path, cache_dtype) -> None:
    write_llama(tmp_path)
    tables = {"load": {"use": "dummy"}, "kv_cache": {"dtype": cache_dtype, "num_blocks": 16}}
    expected = generate(tmp_path, PROMPTS, "torch", **tables)
    assert_same(generate(tmp_path, PROMPTS, "triton", **tables), expected, 1e-3)


def test_tokens_of_heads_of_512_elements(tmp_path) -> None:
    write_llama(tmp_path, head_dim=512, num_attention_heads=2, num_key_value_heads=1)
    tables = {"load": {"use": "dummy"}, "kv_cache": {"num_blocks": 16}, "dtype": "bfloat16"}
    expected = generate(tmp_path, PROMPTS, "torch", **tables)
    assert_same(generate(tmp_path, PROMPTS, "triton", **tables), expected, 0.03)


@pytest.mark.nightly
def test_tokens_of_prompts_with_images(tmp_path) -> None:
    write_model(tmp_path, num_hidden_layers=2, layer_types=None)
    prompts = [prompt("see ", 0, " and ", 1, "."), prompt("text alone")]
    tables = {"max_model_len": 128, "kv_cache": {"block_size": 8}}
    expected = generate(tmp_path, prompts, "torch", **tables)
    assert_same(generate(tmp_path, prompts, "triton", **tables), expected, 1e-3)
