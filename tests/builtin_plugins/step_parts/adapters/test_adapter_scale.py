"""The scale of an adapter: a factor of its products, per request."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.adapters import all_logprobs, difference, lora, write_adapter, write_model
from support.cases import nightly_but

from hardpoint import LLM, LoRARequest, RequestError, SamplingParams
from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.kv_cache.block_hash import extra_keys, sharing_key

PROMPT = [5, 17, 200, 31, 8, 99, 64, 3]
SCALES = (1.0, 0.5, 0.0, -2.0, None)
NEAR = 1e-4
MULTIPROC = {"executor": {"use": "multiproc"}}
FORMS = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 16}},
    "drafts": {"speculation": {"use": ["ngram"], "adaptive": False}},
    "process": {"engine": {"in_process": False}},
    "tensor ranks": {**MULTIPROC, "parallel": {"tensor": 2}},
    "ahead": {**MULTIPROC, "scheduler": {"asynchronous": True}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, its folder, an adapter's folder, and the models merged with it by scale."""
    base = tmp_path_factory.mktemp("scales")
    model = write_model(base / "model")
    merged = {None: model}
    for scale in SCALES[:-1]:
        name = "adapter" if scale == 1.0 else f"adapter{scale}"
        merged[scale] = write_adapter(base / name, model, seed=1, r=4, lora_alpha=4 * scale)
    return base / "model", base / "adapter", merged


def settings_of(form, **fields):
    return {
        "adapters": {"max_loras": 1, "max_lora_rank": 4},
        "kv_cache": {"num_blocks": 128},
        **FORMS[form],
    } | fields


def of_scale(folder, scale):
    return None if scale is None else LoRARequest("poet", 1, str(folder), scale=scale)


def logprobs_of(output):
    completion = output.outputs[0]
    return completion.token_ids, [
        {t: e.logprob for t, e in at.items()} for at in completion.logprobs
    ]


@pytest.mark.parametrize("form", nightly_but(FORMS, "plain", "drafts"))
def test_scales_share_a_slot_and_are_as_each_alone(folders, form):
    base, adapter, merged = folders
    jobs = [(PROMPT[: 3 + index % 5] * 5, SCALES[index % 5]) for index in range(10)]
    prompts, scales = zip(*jobs, strict=True)
    chosen = [of_scale(adapter, scale) for scale in scales]
    params = all_logprobs(4)
    with LLM(str(base), config=settings_of(form), max_model_len=64) as llm:
        together = llm.generate(list(prompts), params, lora_request=chosen)
        llm.reset_prefix_cache()
        for index in range(0, len(jobs), 1 if form == "plain" else 3):
            (alone,) = llm.generate([prompts[index]], params, lora_request=chosen[index])
            assert logprobs_of(alone) == logprobs_of(together[index]), index
        assert [x.scale for x in llm.adapters.list()] == [1.0]
    for (prompt, scale), output in zip(jobs, together, strict=True):
        assert difference(output, prompt, merged[scale]) < NEAR, scale
        assert (output.lora_request and output.lora_request.scale) == scale


def test_the_bits_of_scale_1_and_of_scale_0(folders):
    base, adapter, _ = folders
    params = all_logprobs(4)
    with LLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:
        without = lora("poet", 1, adapter)
        plain, whole, half, zero, none = map(
            logprobs_of,
            llm.generate(
                [PROMPT] * 5,
                params,
                lora_request=[without, *(of_scale(adapter, s) for s in (1.0, 0.5, 0.0)), None],
            ),
        )
        assert plain == whole != half
        assert zero == none != half
        llm.reset_prefix_cache()
        (alone,) = llm.generate([PROMPT], params, lora_request=without)
        assert logprobs_of(alone) == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_is_that_of_alpha(folders, tmp_path, dtype):
    """In bfloat16, too, the products of an adapter are scaled before they are rounded."""
    base, adapter, _ = folders
    write_adapter(tmp_path, write_model(tmp_path / "model"), seed=1, r=4, lora_alpha=2)
    settings = settings_of("plain", dtype=dtype, adapters={"max_loras": 2, "max_lora_rank": 4})
    with LLM(str(base), config=settings, max_model_len=64) as llm:
        chosen = [of_scale(adapter, 0.5), lora("half", 2, tmp_path)]
        scaled, half = llm.generate([PROMPT] * 2, all_logprobs(3), lora_request=chosen)
    assert logprobs_of(scaled) == logprobs_of(half)  # a power of two rounds nothing


def test_other_scales_share_no_blocks(folders):
    base, adapter, _ = folders
    prompt = [7, 9, 11, 13] * 10
    with LLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:

        def cached(scale):
            (output,) = llm.generate(
                [prompt], SamplingParams(max_tokens=1), lora_request=of_scale(adapter, scale)
            )
            return output.num_cached_tokens

        assert [cached(scale) for scale in SCALES] == [0] * 5
        assert [cached(scale) for scale in SCALES] == [32] * 5


def test_keys_of_scales():
    def keys(scale):
        adapter = None if scale is None else LoRARequest("a", 1, "", "c" * 64, scale)
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=list(range(32)),
            params=SamplingParams(),
            lora=adapter,
        )
        return sharing_key(request), tuple(extra_keys(request, 0, 2, 16).items())

    scale_keys = [keys(scale) for scale in (None, 1.0, 0.5, 0.25, 0.0)]
    assert len(set(scale_keys)) == 5
    assert keys(0.5) == keys(0.5)


WRONG = {
    "large": (1e6, r"lora_request.*scale.*<= 100"),
    "small": (-101.0, r"lora_request.*scale.*>= -100"),
    "nan": (math.nan, r"lora_request.*scale: expected a finite number, got nan"),
    "inf": (math.inf, r"lora_request.*scale"),
    "text": ("half", r"lora_request.*scale.*float.*str|lora_request.*scale.*'half'"),
}


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(str(folders[0]), config=settings_of("plain"), max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_scale_names_field_and_value(llm, folders, case):
    scale, message = WRONG[case]
    with pytest.raises(RequestError, match=message):
        llm.generate(
            [PROMPT], SamplingParams(max_tokens=1), lora_request=of_scale(folders[1], scale)
        )
    assert llm.adapters.list() == []


def test_a_scale_is_of_requests(llm, folders):
    _, adapter, _ = folders
    with pytest.raises(RequestError, match=r"lora.scale: expected 1.0, as each request .* got 0.5"):
        llm.adapters.add(of_scale(adapter, 0.5))
    assert llm.adapters.list() == []
    added = llm.adapters.add(lora("poet", 1, adapter))
    half = msgspec.structs.replace(added, scale=0.5)
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=1), lora_request=half)
    assert output.lora_request == half
    assert llm.adapters.list() == [added]
    assert llm.adapters.remove(1)
