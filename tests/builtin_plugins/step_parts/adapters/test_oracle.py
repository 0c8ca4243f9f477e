"""Adapters beside PEFT: the logprobs of a request are equal to the merged model's."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file
from support.adapters import (
    ALL_LINEAR,
    ATTENTION,
    FAMILIES,
    PHI3,
    all_logprobs,
    difference,
    lora,
    write_adapter,
    write_model,
)

from hardpoint import LLM

PROMPT = [5, 17, 200, 31, 8, 99, 64, 3]
NEAR = 1e-4
SETTINGS = {
    "adapters": {"max_loras": 2, "max_lora_rank": 8},
    "kv_cache": {"num_blocks": 64},
}
KINDS = {
    "all": {},
    "rank_and_alpha": {
        "r": 3,
        "lora_alpha": 5,
        "rank_pattern": {"layers.1.self_attn.o_proj": 8, "down_proj": 2},
        "alpha_pattern": {"layers.2.mlp.down_proj": 3},
    },
    "rslora": {"use_rslora": True, "r": 8},
    "one_layer": {"layers_to_transform": [1]},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = write_model(folder, request.param)
    with LLM(str(folder), config=SETTINGS, max_model_len=64) as llm:
        yield request.param, model, llm


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_merged_model(family, kind, tmp_path):
    name, model, llm = family
    modules = PHI3 if name == "Phi3" else ALL_LINEAR
    merged = write_adapter(tmp_path, model, target_modules=modules, **KINDS[kind])
    number = 1 + list(KINDS).index(kind)
    adapted = llm.adapters.add(lora(kind, number, tmp_path))
    assert len(adapted.content_hash) == 64
    changed, plain = llm.generate(
        [PROMPT, PROMPT], all_logprobs(), lora_request=[lora(kind, number), None]
    )
    assert difference(changed, PROMPT, merged) < NEAR
    assert difference(plain, PROMPT, model) < NEAR
    assert difference(changed, PROMPT, model) > 0.1


def test_some_modules(family, tmp_path):
    name, model, llm = family
    modules = PHI3[:1] if name == "Phi3" else ATTENTION[:2]
    merged = write_adapter(tmp_path, model, target_modules=modules)
    request = lora("some", 99, tmp_path)  # loaded by its first request
    (changed,) = llm.generate([PROMPT], all_logprobs(), lora_request=request)
    assert difference(changed, PROMPT, merged) < NEAR
    assert llm.adapters.remove(99)


def test_a_base_of_few_bits(tmp_path):
    model = write_model(tmp_path / "model")
    merged = write_adapter(tmp_path / "adapter", model)
    settings = SETTINGS | {"quantization": {"use": "int8"}}
    with LLM(str(tmp_path / "model"), config=settings, max_model_len=64) as llm:
        (plain,) = llm.generate([PROMPT], all_logprobs(1))
        request = lora("poet", 1, tmp_path / "adapter")
        (changed,) = llm.generate([PROMPT], all_logprobs(1), lora_request=request)
    of_codes = difference(plain, PROMPT, model)
    assert of_codes > NEAR
    assert difference(changed, PROMPT, merged) < 5 * of_codes
    assert difference(changed, PROMPT, model) > 20 * of_codes


@pytest.mark.parametrize("wrapped", ["model.language_model.", "language_model.model."])
def test_modules_of_the_text_model_of_a_larger_one(family, tmp_path, wrapped):
    """An adapter that was trained with the class that also reads images has other names."""
    name, model, llm = family
    modules = PHI3[:1] if name == "Phi3" else ATTENTION[:2]
    merged = write_adapter(tmp_path, model, target_modules=modules)
    file = tmp_path / "adapter_model.safetensors"
    before, after = "base_model.model.model.", f"base_model.model.{wrapped}"
    save_file({name.replace(before, after): t for name, t in load_file(file).items()}, file)
    (changed,) = llm.generate([PROMPT], all_logprobs(), lora_request=lora("wrapped", 98, tmp_path))
    assert difference(changed, PROMPT, merged) < NEAR
    assert llm.adapters.remove(98)
