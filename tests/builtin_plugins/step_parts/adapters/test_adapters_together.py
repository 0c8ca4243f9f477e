"""Adapters with all other features of steps: each request gets the same as alone."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from support.adapters import all_logprobs, difference, lora, write_adapter, write_model
from support.cases import nightly_but

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.plugins.structured import StructuredOutputs

MULTIPROC = {"executor": {"use": "multiproc"}}
FORMS = {
    "plain": {},
    "few slots": {"adapters": {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 16}},
    "preemption": {"kv_cache": {"num_blocks": 40}},
    "drafts": {"speculation": {"use": ["ngram"], "adaptive": False}},
    "process": {"engine": {"in_process": False}},
    "tensor ranks": {**MULTIPROC, "parallel": {"tensor": 2}},
    "stages": {**MULTIPROC, "parallel": {"pipeline": 2}},
    "ahead": {**MULTIPROC, "scheduler": {"asynchronous": True}},
}
GRAMMAR = {"structured": StructuredOutputs(regex="[a-f]{3,9}"), "ignore_eos": False}
NEAR = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, its folder, and 8 adapters: their folders and merged models."""
    base = tmp_path_factory.mktemp("adapters")
    model = write_model(base / "model")
    merged = {}
    for index in range(8):
        folder = base / f"adapter{index}"
        merged[folder] = write_adapter(folder, model, seed=index, r=1 + index, lora_alpha=4)
    return model, base / "model", merged


def settings_of(form):
    return {
        "adapters": {"max_loras": 8, "max_lora_rank": 8},
        "kv_cache": {"num_blocks": 256},
        **FORMS[form],
    }


def jobs_of(folders, count=32):
    """Return prompts, parameters and adapters: each of 8 and none, prompts of many lengths."""
    loras = [lora(f"a{i}", i + 1, folder) for i, folder in enumerate(folders)]
    choices = [None, *loras]
    rng = random.Random(3)
    prompts, params, chosen = [], [], []
    for index in range(count):
        pattern = [rng.randrange(256) for _ in range(rng.randrange(1, 7))]
        prompts.append((pattern * 20)[: rng.randrange(3, 40)])
        more = GRAMMAR if index % 8 == 7 else {}
        params.append(all_logprobs(8, seed=index, temperature=index % 2 * 1.0, **more))
        chosen.append(choices[index % len(choices)])
    return prompts, params, chosen


def contents(outputs):
    return [
        (
            output.outputs[0].token_ids,
            [
                {token: entry.logprob for token, entry in at.items()}
                for at in output.outputs[0].logprobs
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("form", nightly_but(FORMS, "few slots", "tensor ranks"))
def test_adapters_of_a_batch_are_as_each_alone(folders, form):
    model, base, merged = folders
    prompts, params, chosen = jobs_of(merged)
    with LLM(str(base), config=settings_of(form), max_model_len=64) as llm:
        together = llm.generate(prompts, params, lora_request=chosen)
        llm.reset_prefix_cache()
        some = range(len(prompts)) if form == "plain" else range(0, len(prompts), 5)
        for index in some:
            alone = llm.generate([prompts[index]], params[index], lora_request=chosen[index])
            assert contents(alone) == contents([together[index]]), index
        if form == "preemption":
            assert llm.engines.scheduler_stats().num_preemptions > 0
        if form == "drafts":
            assert llm.engines.scheduler_stats().num_accepted_drafts > 0
    models = [model, *merged.values()]
    for index, output in enumerate(together):
        if index % 8 != 7:
            reference = models[index % len(models)]
            assert difference(output, prompts[index], reference) < NEAR, index


def test_the_same_prompt_shares_blocks_by_content_alone(folders):
    _, base, merged = folders
    first, second, *_ = merged
    prompt = [7, 9, 11, 13] * 10
    with LLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:

        def cached(request):
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=1), lora_request=request)
            return output.num_cached_tokens

        assert cached(lora("one", 1, first)) == 0
        assert cached(None) == 0
        assert cached(lora("two", 2, second)) == 0
        assert cached(lora("one", 1)) == 32
        assert cached(lora("same", 3, first)) == 32
        assert cached(lora("two", 2)) == 32


def test_sleep_and_wake_up(folders):
    _, base, merged = folders
    prompts, params, chosen = jobs_of(merged, 9)
    with LLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:
        before = contents(llm.generate(prompts, params, lora_request=chosen))
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert contents(llm.generate(prompts, params, lora_request=chosen)) == before


def test_async(folders):
    _, base, merged = folders
    prompts, params, chosen = jobs_of(merged, 9)

    async def run():
        async with AsyncLLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:

            async def one(index):
                stream = llm.generate(prompts[index], params[index], lora_request=chosen[index])
                return [output async for output in stream][-1]

            outputs = await asyncio.gather(*map(one, range(9)))
            assert {x.name for x in await llm.adapters.list()} == {x.name for x in chosen[1:]}
            assert await llm.adapters.pin(1)
            assert [await llm.adapters.remove(1), await llm.adapters.remove(1)] == [True, False]
            return outputs

    outputs = asyncio.run(run())
    with LLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:
        expected = llm.generate(prompts, params, lora_request=chosen)
    assert contents(outputs) == contents(expected)


def test_vectors_are_those_of_the_merged_model(folders):
    """Calls that pool load adapters in the same way as calls that generate."""
    model, base, merged = folders
    (first, merged_first), (second, other), *_ = merged.items()
    prompt = [7, 9, 11, 13, 2]

    @torch.no_grad()
    def expected(reference):
        vector = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(vector, dim=0).numpy()

    def check(outputs, models):
        for output, reference in zip(outputs, models, strict=True):
            np.testing.assert_allclose(output.outputs, expected(reference), atol=NEAR)

    async def run():
        async with AsyncLLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:
            alone = [x async for x in llm.encode(prompt, lora_request=lora("one", 1, first))]
            batch = await llm.encode_batch([prompt] * 2, lora_request=lora("two", 2, second))
            return [*alone, *batch]

    check(asyncio.run(run()), [merged_first, other, other])
    with LLM(str(base), config=settings_of("plain"), max_model_len=64) as llm:
        chosen = [lora("one", 1, first), None, lora("two", 2, second)]
        check(llm.embed([prompt] * 3, lora_request=chosen), [merged_first, model, other])
        check(llm.embed([prompt], lora_request=lora("two", 2)), [other])
        with pytest.raises(RequestError, match="^lora_request: expected one of 'one', 'two', or"):
            llm.embed([prompt], lora_request=lora("three", 3))
        (score,) = llm.score([prompt], [[4, 5]], lora_request=lora("one", 1))
        (plain,) = llm.score([prompt], [[4, 5]])
        assert score.outputs != plain.outputs
