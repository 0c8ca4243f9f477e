"""From a call to the engine: in which order things happen, and what an interrupt leaves behind."""

from __future__ import annotations

import itertools
import re
import time
from types import SimpleNamespace

import pytest
from support.internals import client_of, core_of, engine_of, open_calls_of, output_processor_of

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
MANY = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=3)


def test_one_tokenizer_for_all(llm):
    frontend = engine_of(llm)._frontend
    assert frontend.input.tokenizer is llm.tokenizer
    assert frontend.output._tokenizer is llm.tokenizer


def test_prompts_are_rendered_one_at_a_time(llm, monkeypatch):
    """The first request is in the engine before the last prompt was looked at."""
    events = []
    client, encode = llm.llm_engine.parts.client, llm.tokenizer.encode
    add = client.add_request

    def noted_encode(text, **given):
        events.append(("encode", text))
        return encode(text, **given)

    def noted_add(request):
        events.append(("add", llm.tokenizer.decode(request.prompt_token_ids)))
        add(request)

    monkeypatch.setattr(llm.tokenizer, "encode", noted_encode)
    monkeypatch.setattr(client, "add_request", noted_add)
    llm.generate(["one", "two", "three"], GREEDY)
    assert events == [
        (what, text) for text in ("one", "two", "three") for what in ("encode", "add")
    ]


def test_registration_comes_before_sending(open_engine):
    engine = open_engine()
    client, known = engine.parts.client, output_processor_of(engine)
    add, sent = client.add_requests, []

    def noted(requests):
        sent.extend((one.child_index, known.is_live(one.request_id)) for one in requests)
        add(requests)

    client.add_requests = noted
    engine.add_request("r", "x", MANY)
    assert sent == [(index, True) for index in range(4)]


async def test_in_an_event_loop_too(scripted):
    async with AsyncLLM(config=scripted_config(scripted)) as llm:
        client, known = client_of(llm), output_processor_of(engine_of(llm))
        offer, sent = client.offer_requests, []

        def noted(requests):
            sent.extend((one.child_index, known.is_live(one.request_id)) for one in requests)
            return offer(requests)

        client.offer_requests = noted
        outputs = [output async for output in llm.generate("x", MANY)]
        assert outputs[-1].finished
        assert sent == [(index, True) for index in range(4)]


def test_an_interrupt_while_prompts_are_added_leaves_none_behind(llm, monkeypatch):
    engine = engine_of(llm)
    add, calls = engine.add_requests, []

    def interrupted(*given, **more):
        internal = add(*given, **more)
        calls.append(internal)
        if len(calls) == 2:  # the engine has it, and the caller does not know yet
            raise KeyboardInterrupt
        return internal

    monkeypatch.setattr(engine, "add_requests", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY)
    assert not engine.has_unfinished_requests()
    assert core_of(engine).num_unfinished_requests() == 0
    assert len(open_calls_of(llm)) == 0
    monkeypatch.undo()
    assert llm.generate("a", GREEDY)[0].finished


@pytest.mark.parametrize("in_process", [True, False])
def test_a_prompt_that_comes_again_is_cached(scripted, in_process):
    config = scripted_config(scripted, {"engine": {"in_process": in_process}})
    with LLM(config=config) as llm:
        first, second = (llm.generate([[7] * 40], GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 32  # whole blocks of 16


def test_the_progress_bar_tells_both_speeds(scripted, capfd, monkeypatch):
    steps = itertools.count(step=0.001)
    clock = SimpleNamespace(perf_counter=steps.__next__, monotonic=time.monotonic)
    monkeypatch.setattr("hardpoint.progress.time", clock)
    with LLM(config=scripted_config(scripted), progress=True) as llm:
        capfd.readouterr()
        llm.generate(["say abc", "long"], GREEDY)
        shown = capfd.readouterr().err
        llm._draws_progress = False
        llm.generate("say abc", GREEDY)
        assert capfd.readouterr().err == ""
    assert "Generating" in shown
    assert "2/2" in shown
    prompt, output = re.findall(r"(\d+) prompt, (\d+) output tokens/s", shown)[-1]
    assert (int(prompt), int(output)) == (5500, 3000)  # 11 and 6 tokens in two milliseconds
