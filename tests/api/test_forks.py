"""Forks of a request go on as it would, with whatever is in the mix."""

from __future__ import annotations

import pytest
from support.process.harness import process_config

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.testing import scripted_config

HERE = "support.broken.processors"
PLUGINS = {"plugins": {"enable": [f"{HERE}:Bias", f"{HERE}:Counter", f"{HERE}:Observer"]}}
ENGINES = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 8}},
    "few blocks": {"kv_cache": {"block_size": 4, "num_blocks": 12}, "max_model_len": 40},
    "no prefix cache": {"kv_cache": {"prefix_caching": False}},
    "drafts": {"speculation": {"use": ["ngram"]}},
    "planned ahead": {"scheduler": {"asynchronous": True}},
}
REQUESTS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "bad_words": ["a"]},
    "processors": {"plugin_args": {"bias": {"by": 3.0}, "counter": {"scale": 0.7}}},
    "grammar": {"structured": {"regex": "[a-f]{3,9}(,[0-9]{2}){0,3}"}, "ignore_eos": False},
    "stop": {"stop": "\u0000never", "min_tokens": 3},
}
PROMPT = "tell me about forks"


def request_of(**fields):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields})


def forked(llm, params, lengths):
    """Return the tokens of a request, and those of its forks, which run together."""
    source = llm.stream(PROMPT, params)
    tokens = [token for output in source for token in output.outputs[0].token_ids]
    forks = [source.fork(tokens[:length]) for length in lengths]
    last = [[output.outputs[0] for output in fork] for fork in forks]
    assert [one[0].index for one in last] == list(range(1, 1 + len(forks)))
    return tokens, [[token for each in one for token in each.token_ids] for one in last]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fork_of_own_tokens_goes_on_as_its_source(scripted, engine):
    with LLM(config=scripted_config(scripted, PLUGINS | ENGINES[engine])) as llm:
        for name, fields in REQUESTS.items():
            lengths = [0, 1, 2, 3]
            tokens, forks = forked(llm, request_of(**fields), lengths)
            given = [
                [*tokens[:n], *rest][: len(tokens)] for n, rest in zip(lengths, forks, strict=True)
            ]
            assert given == [tokens] * len(lengths), name
        assert not llm.llm_engine.has_unfinished_requests()


def test_a_fork_of_a_seeded_request_is_its_next_completion(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        given = {"temperature": 1.0, "seed": 3}
        (three,) = llm.generate(PROMPT, request_of(**given, n=3))
        source = llm.stream(PROMPT, request_of(**given, n=2))
        last = [output.outputs[0] for output in source.fork([])]
    assert {one.index for one in last} == {2}
    assert [token for one in last for token in one.token_ids] == three.outputs[2].token_ids


def test_other_tokens_are_as_if_they_had_been_sampled(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        source = llm.stream(PROMPT, request_of(structured={"regex": "(ab|xyz)c"}, ignore_eos=False))
        next(source)
        (x,) = llm.tokenizer.encode("x")
        last = [output.outputs[0] for output in source.fork([x])]
        assert "".join(one.text for one in last).endswith("yzc")
        (q,) = llm.tokenizer.encode("q")
        (last,) = source.fork([q])
        assert last.outputs[0].finish_reason == "error"
        assert "expected a token that the grammar allows" in last.outputs[0].error


def test_wrong_calls_are_refused(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        source = llm.stream(PROMPT, request_of())
        with pytest.raises(RequestError, match=r"token_ids\[0\]: expected a whole number, got 'a'"):
            source.fork(["a"])
        source.close()
        fork = source.fork([])
        assert next(fork).outputs[0].index == 1
        fork.close()
        assert list(fork) == []


@pytest.mark.parametrize("level", [{}, pytest.param(None, marks=pytest.mark.nightly)])
async def test_an_event_loop_forks_open_requests(scripted, level):
    config = scripted_config(scripted) if level == {} else process_config(scripted)

    async with AsyncLLM(config=config) as llm:
        source = llm.generate(PROMPT, request_of(), "r")
        tokens = [output async for output in source][-1].outputs[0].token_ids
        with pytest.raises(RequestError, match="'r' is not the id of an open request"):
            llm.fork("r", [])
        source = llm.generate(PROMPT, request_of(), "r")
        await anext(source)
        fork = [output.outputs[0] async for output in llm.fork("r", [])][-1]
        assert (fork.index, fork.token_ids) == (1, tokens)
        await source.aclose()
        conversation = llm.open_conversation(request_of(), "c")
        with pytest.raises(RequestError, match="'c' is not the id of an open request"):
            llm.fork("c", [])
        await conversation.aclose()


async def test_a_fork_that_begins_after_its_source_was_closed_is_of_the_same_request(scripted):
    params = request_of(**REQUESTS["processors"])
    async with AsyncLLM(config=scripted_config(scripted, PLUGINS)) as llm:
        source = llm.generate(PROMPT, params, "r")
        tokens = [output.outputs[0].token_ids async for output in llm.generate(PROMPT, params)][-1]
        await anext(source)
        unused, fork = llm.fork("r", []), llm.fork("r", [])
        await source.aclose()
        with pytest.raises(RequestError, match="'r' is not the id of an open request"):
            llm.fork("r", [])
        await anext(fork)
        last = [output.outputs[0] async for output in llm.fork("r", [])][-1]
        assert (last.index, last.token_ids) == (3, tokens)
        await fork.aclose()
        await unused.aclose()
        with pytest.raises(RequestError, match="'r' is not the id of an open request"):
            llm.fork("r", [])


async def test_a_fork_of_a_shared_id_is_of_the_one_open_request(scripted):
    several = r"'r' is the id of 2 open requests; give a request an id of its own to fork it"

    async def prompt_of(stream):
        return (await anext(stream)).prompt_token_ids

    async with AsyncLLM(config=scripted_config(scripted)) as llm:
        prompts = ["one", "two words", "three", "four"]
        first, second, third, fourth = (llm.generate(p, request_of(), "r") for p in prompts)
        await anext(first)
        expected = await prompt_of(second)
        with pytest.raises(RequestError, match=several):
            llm.fork("r", [])
        await first.aclose()
        fork = llm.fork("r", [])
        assert await prompt_of(fork) == expected
        await anext(third)
        await second.aclose()
        with pytest.raises(RequestError, match=several):  # the fork is open
            llm.fork("r", [])
        await third.aclose()
        assert await prompt_of(llm.fork("r", [])) == expected
        await llm.abort("r")
        expected = await prompt_of(fourth)
        await fork.aclose()  # which was aborted
        assert await prompt_of(llm.fork("r", [])) == expected
