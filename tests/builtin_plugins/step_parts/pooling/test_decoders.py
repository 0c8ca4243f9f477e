"""Vectors of decoder models: equal to transformers, in every situation, at every length."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from support.builtins.checkpoint_harness import TINY, random_model
from support.cases import nightly_but
from support.plugins import pooling

from hardpoint import LLM, AsyncLLM, PluginError, PoolingParams, RequestError, SamplingParams
from hardpoint.errors import PromptTooLongError
from hardpoint.plugins import EngineCoreRequest
from hardpoint.testing import write_scripted_model

LIMIT = 48
FAULTY = "support.plugins.pooling:Faulty"
LENGTHS = [1, 2, 7, 8, 9, 23, LIMIT - 1, LIMIT]
PROMPTS = [[(7 * n + 3 * length) % 61 for n in range(length)] for length in LENGTHS]
TABLE = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": LIMIT,
    "kv_cache": {"block_size": 8, "num_blocks": 60},
    "scheduler": {"max_num_seqs": 8},
}

SITUATIONS = {
    "whole prompts": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 11}},
    "single tokens": {
        "scheduler": {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 1}
    },
    "preemptions": {
        "kv_cache": {"num_blocks": 9, "watermark": 0.0},
        "scheduler": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 4},
    },
    "planned ahead": {"executor": {"use": "multiproc"}, "scheduler": {"asynchronous": True}},
    "engine process": {"engine": {"in_process": False}},
    "stores": {
        "kv_connector": {"stores": ["memory"], "load_seconds": 120.0},
        "plugin": {"memory": {"size_bytes": 1 << 20}, "stores": {"timeout_seconds": 60.0}},
        "kv_cache": {"num_blocks": 12, "watermark": 0.0},
        "scheduler": {"max_num_seqs": 2},
    },
    "a speculator": {"speculation": {"use": ["ngram"]}},
    "the canary": {"debug": {"kv_canary": True}},
    "recorded steps": {"ops": {"use": "native_cpu"}, "attention": {"use": "native_cpu"}},
    "two ranks": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
    "two stages": {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of random models, and the models of transformers."""
    by_family = {}
    for family in ("Llama", "Qwen3"):
        model = random_model(family, max_position_embeddings=LIMIT, vocab_size=257)
        folder = write_scripted_model(tmp_path_factory.mktemp(family))
        model.save_pretrained(folder)
        by_family[family] = folder, model
    return by_family


@pytest.fixture(scope="module")
def folder(models):
    return models["Llama"][0]


def settings(folder, situation=None, **tables):
    table = {"model": str(folder), **TABLE}
    for key, value in [*(situation or {}).items(), *tables.items()]:
        table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
    return table


def hidden_states(model, prompt):
    """The hidden states of transformers, after the last norm: float32 [tokens, hidden]."""
    with torch.inference_mode():
        result = model.model(torch.tensor([prompt]), use_cache=False)
    return result.last_hidden_state[0].numpy()


POOLED = {
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(0),
}


def normalised(vector):
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_vectors_are_those_of_transformers(models, family):
    folder, model = models[family]
    hidden = [hidden_states(model, prompt) for prompt in PROMPTS]
    with LLM(config=settings(folder)) as llm:
        assert llm.model.supported_tasks == ("generate", "embed", "token_embed")
        for name, pooled in POOLED.items():
            for normalize in (True, False):
                params = PoolingParams(pooler=name, normalize=normalize)
                outputs = llm.embed(PROMPTS, params)
                for output, states in zip(outputs, hidden, strict=True):
                    expected = pooled(states)
                    expected = normalised(expected) if normalize else expected
                    assert output.outputs.dtype == np.float32
                    np.testing.assert_allclose(output.outputs, expected, atol=1e-5, rtol=1e-5)
        raw = PoolingParams(task="token_embed", normalize=False)
        for output, states in zip(llm.encode(PROMPTS, raw), hidden, strict=True):
            np.testing.assert_allclose(output.outputs, states, atol=1e-5, rtol=1e-5)
        by_default = llm.embed(PROMPTS[2])[0].outputs
        np.testing.assert_allclose(by_default, normalised(hidden[2][-1]), atol=1e-5)


PARAMS = [
    *(PoolingParams(pooler=name, normalize=False) for name in ("last", "cls", "mean")),
    PoolingParams(task="token_embed", normalize=False),
]


@pytest.fixture(scope="module")
def alone(folder):
    """The vectors of each prompt, computed alone."""
    with LLM(config=settings(folder)) as llm:
        return [llm.encode(prompt, params)[0].outputs for params in PARAMS for prompt in PROMPTS]


@pytest.mark.parametrize(
    "situation",
    nightly_but(
        SITUATIONS, "single tokens", "preemptions", "stores", "recorded steps", "two stages"
    ),
)
def test_vectors_are_the_same_bits_in_every_situation(folder, alone, situation):
    with LLM(config=settings(folder, SITUATIONS[situation])) as llm:
        exact = situation not in ("two ranks",)  # whose sums have another order
        for _ in range(2):  # the second time with cached prefixes
            outputs = llm.encode(
                PROMPTS * len(PARAMS), [params for params in PARAMS for _ in PROMPTS]
            )
            for output, expected in zip(outputs, alone, strict=True):
                if exact:
                    np.testing.assert_array_equal(output.outputs, expected)
                else:
                    np.testing.assert_allclose(output.outputs, expected, atol=1e-5)
        stats = llm.engines.scheduler_stats()
        assert (stats.num_preemptions > 0) == (situation == "preemptions")
        assert stats.num_running == stats.num_waiting == 0
        assert not llm.plugins.health().fallbacks


def test_every_length_up_to_the_limit_has_a_vector_and_one_more_has_an_error(folder):
    lengths = range(1, LIMIT + 1)
    with LLM(config=settings(folder, SITUATIONS["chunks"])) as llm:
        outputs = llm.embed([[5] * length for length in lengths])
        assert [len(output.prompt_token_ids) for output in outputs] == list(lengths)
        assert all(output.finish_reason == "stop" for output in outputs)
        message = (
            rf"^prompts\[1\]: prompt: the prompt is too long: {LIMIT + 1} tokens; this model's "
            rf"maximum context length is {LIMIT} tokens$"
        )
        with pytest.raises(PromptTooLongError, match=message):
            llm.embed([[1], [5] * (LIMIT + 1)])
        with pytest.raises(PromptTooLongError, match="less one to generate"):
            llm.generate([[5] * LIMIT])
        cut = llm.embed([[1] * 9 + [5] * LIMIT], truncate_prompt_tokens=-1)[0]
        assert cut.prompt_token_ids == [5] * LIMIT
        np.testing.assert_array_equal(cut.outputs, outputs[-1].outputs)


def test_only_poolers_that_need_all_tokens_leave_the_prefix_cache_aside(folder):
    prompt = list(range(40))
    with LLM(config=settings(folder)) as llm:
        expected = llm.embed(prompt)[0].outputs
        before = llm.engines.scheduler_stats().prefix_cache.hit_tokens
        np.testing.assert_array_equal(llm.embed(prompt)[0].outputs, expected)
        hits = llm.engines.scheduler_stats().prefix_cache.hit_tokens
        assert hits - before == 32
        llm.embed(prompt, PoolingParams(pooler="mean"))
        llm.encode(prompt, PoolingParams(task="token_embed"))
        assert llm.engines.scheduler_stats().prefix_cache.hit_tokens == hits
        generated = llm.generate(prompt, SamplingParams(max_tokens=2))[0]
        assert generated.num_cached_tokens == 32  # what was pooled is cached for others


def test_requests_that_pool_and_that_generate_share_steps(folder):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(config=settings(folder)) as llm:
        texts = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:6], params)]
        vectors = [llm.embed(prompt)[0].outputs for prompt in PROMPTS]
        engine = llm.llm_engine
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(f"v{index}", prompt, PoolingParams())
            if index < 6:
                engine.add_request(f"t{index}", prompt, params)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {out.request_id: out for out in engine.step() if out.finished}
        for index, expected in enumerate(vectors):
            np.testing.assert_array_equal(outputs[f"v{index}"].outputs, expected)
        for index, expected in enumerate(texts):
            assert outputs[f"t{index}"].outputs[0].token_ids == expected


def test_dimensions_are_cut_before_vectors_are_scaled(folder):
    with LLM(config=settings(folder)) as llm:
        raw = llm.embed(PROMPTS[3], PoolingParams(normalize=False))[0].outputs
        assert np.linalg.norm(raw) > 1.5
        tags = PoolingParams(
            task="token_embed", pooler="step", plugin_args={"step": {"step_tag_id": 24}}
        )
        prompt = [24, 1, 24, 2, 3]
        every = llm.encode(prompt, PoolingParams(task="token_embed"))[0].outputs
        np.testing.assert_array_equal(llm.encode(prompt, tags)[0].outputs, every[[0, 2]])
        assert llm.encode([1, 2], tags)[0].outputs.shape == (0, TINY["hidden_size"])


WRONG = [
    ([1], PoolingParams(pooler="men"), r"prompts\[0\]: pooler: expected one of cls, last, mean for "
     r'the task "embed", got \'men\' .did you mean'),
    ([1], PoolingParams(pooler="all"), r"pooler: expected one of cls, last, mean for the task"),
    ([1], PoolingParams(task="token_embed", pooler="mean"), r"expected one of all, step for the"),
    ([1], PoolingParams(task="classify"), r"classify: this model cannot do it; it can: generate, "
     "embed, token_embed"),
    ([1], PoolingParams(task="guess"), r"guess: this model cannot do it; it can: generate, embed"),
    ([1], PoolingParams(dimensions=0), r"dimensions: expected .*>= 1"),
    ([1], PoolingParams(task="token_embed", pooler="step",
                        plugin_args={"step": {"step_tag_id": -1}}), r"args.step.step_tag_id: exp"),
    ([1], PoolingParams(plugin_args={"mean": {}}), r"plugin_args.mean: poolers/mean takes no arg"),
    ([1], PoolingParams(plugin_args={"step": {"step_tag_id": 1}}),
     r"prompts\[0\]: plugin_args.step: expected none, because the pooler is 'last'"),
    ([1], PoolingParams(plugin_args={"min_p": {"min_p": 0.5}}),
     r"\[0\]: plugin_args.min_p: expected none, because the request pools, and logits_proc"),
    ([1], PoolingParams(plugin_args={"logits_processors/min_p": {"min_p": 0.5}}),
     "plugin_args.logits_processors/min_p: expected none"),
    ([1], SamplingParams(), r"^pooling_params: expected PoolingParams, got SamplingParams$"),
    ([[1], []], PoolingParams(), r"prompts\[1\]: prompt: expected at least one token"),
    ([[1], [299]], PoolingParams(), r"prompts\[1\]: prompt.*\[0\]: expected .*256.*299"),
    ([[1], [2]], [PoolingParams()], r"^pooling_params: expected one or 2, one per prompt, got 1$"),
]  # fmt: skip


@pytest.mark.parametrize("in_process", [True, False])
def test_wrong_requests_are_refused_and_disturb_nothing(folder, in_process):
    with LLM(config=settings(folder, engine={"in_process": in_process})) as llm:
        expected = llm.embed(PROMPTS[4])[0].outputs
        for prompts, params, message in WRONG:
            with pytest.raises(RequestError, match=message):
                llm.encode(prompts, params)
        with pytest.raises(RequestError, match='pooling_params.task: expected "embed" in this'):
            llm.embed([1], PoolingParams(task="score"))
        with pytest.raises(RequestError, match="sampling_params: expected SamplingParams, got"):
            llm.generate([1], PoolingParams())
        for_pooler = SamplingParams(plugin_args={"poolers/step": {"step_tag_id": 1}})
        words = "plugin_args.poolers/step: expected none, because the request does not pool"
        with pytest.raises(RequestError, match=words):
            llm.generate([1], for_pooler)
        assert llm.encode([]) == []
        np.testing.assert_array_equal(llm.embed(PROMPTS[4])[0].outputs, expected)


def test_scores_are_cosines(folder):
    with LLM(config=settings(folder)) as llm:
        first, *others = (llm.embed(prompt)[0].outputs for prompt in PROMPTS[:4])
        expected = [float(first @ other) for other in others]
        scores = [output.outputs for output in llm.score(PROMPTS[0], PROMPTS[1:4])]
        assert scores == pytest.approx(expected, abs=1e-6)
        pairs = [output.outputs for output in llm.score(PROMPTS[:2], PROMPTS[:2])]
        assert pairs == pytest.approx([1.0, 1.0])
        with pytest.raises(RequestError, match="texts_1: expected one text or 3, as texts_2 has"):
            llm.score(PROMPTS[:2], PROMPTS[:3])


FAULTS = [
    "start() failed: RuntimeError: not today",
    "update() failed: KeyError: 'no hidden states'",
    "finish() failed: ValueError: nothing to give",
    "finish() gave [3] of torch.float32, expected a tensor [64] of floating-point numbers",
    "finish() gave list, expected a tensor [64]",
    "finish() gave numbers that are not finite",
    "start() gave Tensor, expected a PromptPooler",
]


def test_a_fault_of_a_pooler_ends_its_request_alone(folder):
    table = settings(folder, plugins={"enable": [FAULTY]})
    with LLM(config=table) as llm:
        params = PoolingParams(pooler="faulty")
        expected = llm.embed([50, 1], params)[0].outputs
        engine = llm.llm_engine
        for kind in range(len(pooling.Faulty.fails)):
            engine.add_request(str(kind), [kind, 1], params)
        engine.add_request("right", [50, 1], params)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {out.request_id: out for out in engine.step()}
        np.testing.assert_array_equal(outputs["right"].outputs, expected)
        assert outputs["0"].finish_reason == "stop"
        for kind, fault in enumerate(FAULTS, 1):
            output = outputs[str(kind)]
            assert (output.finish_reason, output.outputs) == ("error", None)
            assert "faulty" in output.error
            assert fault in output.error
        with pytest.raises(PluginError, match=r"^prompts\[1\]: .*its update\(\) failed"):
            llm.embed([[50], [2, 2]], params)


def test_a_request_made_ready_elsewhere(folder):
    with LLM(config=settings(folder)) as llm:
        expected = llm.embed(PROMPTS[3], PoolingParams(pooler="mean"))[0].outputs
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=PROMPTS[3],
            params=SamplingParams(n=2, max_tokens=9),
            pooling_params=PoolingParams(pooler="mean"),
        )
        engine = llm.llm_engine
        engine.add_request("mine", request)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        (output,) = outputs
        assert output.request_id == "mine"
        np.testing.assert_array_equal(output.outputs, expected)


def test_the_part_can_name_the_pooler(folder):
    with LLM(config=settings(folder, plugin={"pooling": {"pooler": "mean"}})) as llm:
        mean = llm.embed(PROMPTS[5], PoolingParams(pooler="mean"))[0].outputs
        np.testing.assert_array_equal(llm.embed(PROMPTS[5])[0].outputs, mean)
        assert not np.array_equal(
            llm.embed(PROMPTS[5], PoolingParams(pooler="last"))[0].outputs, mean
        )


def test_async_llm_encodes(folder):
    async def main():
        async with AsyncLLM(config=settings(folder)) as llm:

            async def one(prompt):
                (output,) = [output async for output in llm.encode(prompt)]
                return output

            outputs = await asyncio.gather(*map(one, PROMPTS))
            with pytest.raises(RequestError, match="pooling_params: expected PoolingParams, got"):
                llm.encode([1], SamplingParams())
            with pytest.raises(RequestError, match="classify: this model cannot do it"):
                await anext(llm.encode([1], PoolingParams(task="classify")))
            return outputs

    outputs = asyncio.run(main())
    with LLM(config=settings(folder)) as llm:
        for output, expected in zip(outputs, llm.embed(PROMPTS), strict=True):
            np.testing.assert_array_equal(output.outputs, expected.outputs)
