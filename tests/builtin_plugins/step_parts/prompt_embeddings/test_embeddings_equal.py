"""A prompt of the model's own embeddings has the results of its ids, bit for bit, wherever."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from support.cases import nightly_but
from support.embedded import EmbeddedModel, prompt_of

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.builtin_plugins.step_parts.prompt_embeddings.requests import EmbeddedRequests
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.toolkit.half_floats import float32_of

PROMPTS = [prompt_of(length) for length in (1, 3, 8, 17, 40, 61)]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, ignore_eos=True)
RANKS = {"executor": {"use": "multiproc"}}
SITUATIONS = {
    "whole prompts": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 13}},
    "preemptions": {
        "kv_cache": {"num_blocks": 14, "watermark": 0.0},
        "scheduler": {"max_num_batched_tokens": 16},
    },
    "an engine process": {"engine": {"in_process": False}},
    "stores": {
        "kv_connector": {"stores": ["memory"]},
        "plugin": {
            "memory": {"size_bytes": 1 << 20},
            "prompt_embeddings": {"enabled": True},
        },
        "kv_cache": {"num_blocks": 14, "watermark": 0.0},
    },
    "drafts": {"speculation": {"use": ["ngram", "suffix"], "adaptive": False}},
    "the canary": {"debug": {"kv_canary": True}},
    "planned ahead": {"scheduler": {"asynchronous": True}},
    "no recorded steps": {"executor": {"enforce_eager": True}},
    "two stages": {**RANKS, "parallel": {"pipeline": 2}},
}


def results(outputs):
    """Tokens and log-probabilities; the text of the first token depends on the text before it."""
    return [
        [
            (c.token_ids, [{t: v.logprob for t, v in at.items()} for at in c.logprobs])
            for c in output.outputs
        ]
        for output in outputs
    ]


def forms(embedded, ids):
    prompts = [embedded.embedded(ids), embedded.mixed(ids)]
    return prompts if len(ids) < 3 else [*prompts, embedded.in_parts(ids)]


@pytest.fixture(scope="module")
def expected(embedded):
    with LLM(config=embedded.settings()) as llm:
        yield {tuple(ids): results(llm.generate([ids], GREEDY))[0] for ids in PROMPTS}


@pytest.mark.parametrize(
    "situation", nightly_but(SITUATIONS, "chunks", "preemptions", "stores", "drafts", "two stages")
)
def test_tokens_are_those_of_ids(embedded, expected, situation):
    pairs = [(ids, form) for ids in PROMPTS for form in forms(embedded, ids)]
    with LLM(config=embedded.settings(SITUATIONS[situation])) as llm:
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate([form for _, form in pairs], GREEDY)
            for (ids, form), result in zip(pairs, results(outputs), strict=True):
                assert result == expected[tuple(ids)], (len(ids), sorted(form))
        stats = llm.engines.scheduler_stats()
    assert (situation == "preemptions") <= (stats.num_preemptions > 0)


def test_tensor_ranks_each_have_the_rows(embedded):
    """Two ranks add their sums in another order than one: compared with ids in two ranks."""
    with LLM(config=embedded.settings({**RANKS, "parallel": {"tensor": 2}})) as llm:
        by_ids = results(llm.generate([[*ids] for ids in PROMPTS], GREEDY))
        for make in (embedded.embedded, embedded.mixed):
            assert results(llm.generate([make(ids) for ids in PROMPTS], GREEDY)) == by_ids


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "Granite"])
def test_embeddings_enter_where_inputs_embeds_of_transformers_do(tmp_path, family):
    """Gemma's table is scaled before that, Granite's embeddings after it."""
    fields = {"Gemma2": {}, "Gemma3": {"head_dim": 16}, "Granite": {"embedding_multiplier": 12.0}}
    more = {"residual_multiplier": 0.5} if family == "Granite" else {}
    model = EmbeddedModel(tmp_path, family, tie_word_embeddings=True, **fields[family], **more)
    ids, params = PROMPTS[3], SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(len(ids), model.table.shape[1], generator=generator)
    rows = model.table[ids] + noise * model.table.std()
    with torch.inference_mode():
        logits = model.model(inputs_embeds=rows.unsqueeze(0)).logits[0, -1]
    expected = logits.log_softmax(-1).numpy()
    with LLM(config=model.settings()) as llm:
        by_ids, by_rows, others = llm.generate(
            [ids, model.embedded(ids), {"prompt_embeds": rows}], params
        )
    assert results([by_ids]) == results([by_rows])
    entries = others.outputs[0].logprobs[0]
    logprobs = np.array([entries[token].logprob for token in range(len(expected))])
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    assert (
        abs(logprobs - [by_ids.outputs[0].logprobs[0][t].logprob for t in range(257)]).max() > 0.1
    )


def test_sampling_grammars_priorities_and_completions_go_on(embedded):
    ids = PROMPTS[4]
    params_by_name = {
        "seeded": SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, logprobs=1),
        "grammar": SamplingParams(
            max_tokens=9,
            temperature=0.0,
            logprobs=1,
            structured=StructuredOutputs(regex="[a-f]{3,9}"),
        ),
        "stop": SamplingParams(max_tokens=30, temperature=1.0, seed=5, stop=["a"], logprobs=1),
    }
    with LLM(config=embedded.settings({"scheduler": {"policy": "priority"}})) as llm:
        for name, params in params_by_name.items():
            by_ids = results(llm.generate([ids], params))
            for form in forms(embedded, ids):
                assert results(llm.generate([form], params, priority=-1)) == by_ids, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_float_are_rounded_to_the_dtype_of_the_model(tmp_path, dtype):
    model = EmbeddedModel(tmp_path)
    model.model.get_input_embeddings().weight.data = model.table.to(dtype).float()
    model.model.lm_head.weight.data = model.model.lm_head.weight.data.clone()
    model.model.save_pretrained(model.folder)
    with LLM(config=model.settings({"dtype": "bfloat16"})) as llm:
        by_ids = results(llm.generate([PROMPTS[3]], GREEDY))
        rows = model.table.to(dtype)[PROMPTS[3]]
        assert results(llm.generate({"prompt_embeds": rows}, GREEDY)) == by_ids
        as_array = rows.float().numpy()
        assert results(llm.generate({"prompt_embeds": as_array}, GREEDY)) == by_ids
        parts = {"prompt_parts": [rows[:3], as_array[3:]]}
        assert results(llm.generate(parts, GREEDY)) == by_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_keep_their_dtype_on_the_way(dtype):
    """Of bfloat16, which numpy has not, the bits travel."""
    half = EmbeddedRequests(4, 1000)
    rows = torch.linspace(-3, 70, 12).reshape(3, 4).to(dtype)
    size = {torch.float32: 48}.get(dtype, 24)
    parts = [
        half.read_prompt({"prompt_embeds": rows}, None),
        half.read_prompt({"prompt_parts": [rows[:1], rows[1:]]}, None),
    ]
    for prompt in parts:
        array = prompt.fields["prompt_embeds"]
        assert array.nbytes == size
        assert float32_of(array).tolist() == rows.float().tolist()
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=[0] * 3, params=GREEDY, prompt_embeds=array
        )
        frames = [bytes(frame) for frame in Encoder().encode(request)]
        assert Decoder(EngineCoreRequest).decode(frames).prompt_embeds.tobytes() == array.tobytes()
        half.prepare(request, None)
        assert request.prompt_embeds is array
    mixed = half.read_prompt({"prompt_parts": [rows, rows.half()]}, None).fields["prompt_embeds"]
    assert mixed.dtype == (np.float16 if dtype == torch.float16 else np.float32)
    assert float32_of(mixed).tolist() == torch.cat([rows.float(), rows.half().float()]).tolist()


def test_vectors_are_those_of_ids(embedded):
    with LLM(config=embedded.settings()) as llm:
        for pooler in ("last", "mean"):
            params = {"pooler": pooler}
            by_ids = [out.outputs for out in embed(llm, PROMPTS, params)]
            for make in (embedded.embedded, embedded.mixed):
                outputs = embed(llm, [make(ids) for ids in PROMPTS], params)
                for output, ids, vector in zip(outputs, PROMPTS, by_ids, strict=True):
                    np.testing.assert_array_equal(output.outputs, vector)
                    assert len(output.prompt_token_ids) == len(ids)


def embed(llm, prompts, fields):
    from hardpoint import PoolingParams

    return llm.embed(prompts, PoolingParams(**fields))


async def test_an_aborted_prompt_leaves_the_others_alone(embedded, expected):
    config = embedded.settings({"scheduler": {"max_num_batched_tokens": 8}})
    async with AsyncLLM(config=config) as llm:

        async def last(prompt):
            async for output in llm.generate(prompt, GREEDY):
                last_output = output
            return last_output

        gone = asyncio.ensure_future(last(embedded.embedded(prompt_of(80))))
        task = asyncio.ensure_future(last(embedded.mixed(PROMPTS[4])))
        await asyncio.sleep(0.05)
        gone.cancel()
        output = await task
        assert results([output])[0] == expected[tuple(PROMPTS[4])]


def test_the_caller_may_write_to_the_tensor_at_once(embedded, expected):
    ids = PROMPTS[4]
    rows = embedded.table[ids].clone()
    with LLM(config=embedded.settings()) as llm:
        stream = llm.stream({"prompt_embeds": rows}, GREEDY)
        tokens = [*next(stream).outputs[0].token_ids]
        rows.zero_()
        for output in stream:
            tokens += output.outputs[0].token_ids
    assert tokens == expected[tuple(ids)][0][0]
