"""Members of a request with adapters of their own."""

from __future__ import annotations

import msgspec
import pytest
from support.adapters import lora, write_adapter, write_model

from hardpoint import LLM, RequestError, SamplingParams

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
    """A model and four adapters."""
    base = tmp_path_factory.mktemp("adapters")
    model = write_model(base / "model")
    for index in range(4):
        write_adapter(base / f"adapter{index}", model, seed=index, r=2, lora_alpha=4)
    return base


def opened(folders, settings=(), max_loras=2, max_cpu_loras=4):
    limits = {"max_loras": max_loras, "max_cpu_loras": max_cpu_loras, "max_lora_rank": 4}
    adapters = {"adapters": limits}
    config = {**ADAPTED, **adapters, **dict(settings)}
    return LLM(str(folders / "model"), dtype="float32", max_model_len=64, config=config)


def params(**arguments):
    args = {"adapted": arguments} if arguments else {}
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, plugin_args=args)


def added(llm, folders, index):
    return llm.adapters.add(lora(f"a{index}", 1 + index, str(folders / f"adapter{index}")))


def fields(adapter):
    return msgspec.structs.asdict(adapter)


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("form", FORMS)
def test_a_member_reads_its_prompt_with_its_adapter(folders, form):
    with opened(folders, FORMS[form]) as llm:
        base = token_ids(llm.generate(PROMPTS, params()))
        member, other = (added(llm, folders, index) for index in range(2))
        expected = token_ids(llm.generate(PROMPTS, params(), lora_request=member))
        assert base != expected
        assert token_ids(llm.generate(PROMPTS, params(adapter=fields(member)))) == expected
        both = llm.generate(PROMPTS, params(adapter=fields(member)), lora_request=other)
        assert token_ids(both) == expected


def test_groups_do_not_wait_for_the_slots_of_each_other(folders):
    with opened(folders, max_cpu_loras=2) as llm:
        adapters = [added(llm, folders, index) for index in range(4)]
        each = [params(adapter=fields(adapters[index])) for index in (1, 3)]
        requests = [adapters[0], adapters[2]]
        expected = [
            token_ids(llm.generate([prompt], one, lora_request=[adapter]))[0]
            for prompt, one, adapter in zip(PROMPTS, each, requests, strict=False)
        ]
        for adapter in requests:  # the adapters of the members have to be read
            llm.generate(PROMPTS[:1], params(), lora_request=adapter)
        assert token_ids(llm.generate(PROMPTS[:2], each, lora_request=requests)) == expected
        after = llm.generate(PROMPTS[:1], params(), lora_request=adapters[3])
        assert token_ids(after)[0]


def test_an_adapter_that_is_not_loaded_is_refused(folders):
    with opened(folders) as llm:
        adapter = {"name": "a9", "id": 9, "path": str(folders / "adapter0")}
        with pytest.raises(RequestError, match=r"lora.content_hash: expected .* for 'a9'"):
            llm.generate(PROMPTS[:1], params(adapter=adapter))
        assert token_ids(llm.generate(PROMPTS[:1], params()))[0]


def test_a_group_with_more_adapters_than_slots_is_refused(folders):
    with opened(folders, max_loras=1) as llm:
        member, other = (added(llm, folders, index) for index in range(2))
        message = r"members: expected at most 1 adapters in a group \(adapters.max_loras\), got 2"
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPTS[:1], params(adapter=fields(member)), lora_request=other)
        alone = token_ids(llm.generate(PROMPTS[:1], params(), lora_request=member))
        assert token_ids(llm.generate(PROMPTS[:1], params(adapter=fields(member)))) == alone
