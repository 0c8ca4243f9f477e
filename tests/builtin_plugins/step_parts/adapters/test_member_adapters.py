"""Members of a request with adapters of their own."""

from __future__ import annotations

import pytest
from support.adapters import lora, write_adapter, write_model

from hardpoint import LLM, SamplingParams

ADAPTED = {"plugins": {"enable": ["support.plugins.grouped:Adapted"]}}
FORMS = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 8}},
    "preemption": {"kv_cache": {"num_blocks": 12, "watermark": 0.0}},
    "process": {"engine": {"in_process": False}},
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11] * 30, [12, 13]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and two adapters."""
    base = tmp_path_factory.mktemp("adapters")
    model = write_model(base / "model")
    for index in range(2):
        write_adapter(base / f"adapter{index}", model, seed=index, r=2, lora_alpha=4)
    return base


def opened(folders, settings=(), max_loras=2):
    adapters = {"adapters": {"max_loras": max_loras, "max_lora_rank": 4}}
    config = {**ADAPTED, **adapters, **dict(settings)}
    return LLM(str(folders / "model"), dtype="float32", max_model_len=64, config=config)


def params(**arguments):
    args = {"adapted": arguments} if arguments else {}
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, plugin_args=args)


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("form", FORMS)
def test_a_member_reads_its_prompt_with_its_adapter(folders, form):
    path = str(folders / "adapter0")
    with opened(folders, FORMS[form]) as llm:
        base = token_ids(llm.generate(PROMPTS, params()))
        expected = token_ids(llm.generate(PROMPTS, params(), lora_request=lora("a7", 7, path)))
        assert base != expected
        assert token_ids(llm.generate(PROMPTS, params(path=path))) == expected
        other = lora("a8", 8, str(folders / "adapter1"))
        both = llm.generate(PROMPTS, params(path=path), lora_request=other)
        assert token_ids(both) == expected


def test_adapters_that_have_no_room_at_once_are_refused_by_name(folders):
    other = lora("a8", 8, str(folders / "adapter1"))
    with opened(folders, max_loras=1) as llm:
        asked = params(path=str(folders / "adapter0"))
        (output,) = llm.generate(PROMPTS[:1], asked, lora_request=other)
        assert "members: expected a group that fits at once, got 1: " in output.outputs[0].error
        assert token_ids(llm.generate(PROMPTS[:1], params()))[0]


def test_a_missing_adapter_of_a_member_ends_the_request(folders):
    with opened(folders) as llm:
        (output,) = llm.generate(PROMPTS[:1], params(path=str(folders / "none"), id=9))
        assert "none" in output.outputs[0].error
        assert token_ids(llm.generate(PROMPTS[:1], params()))[0]
