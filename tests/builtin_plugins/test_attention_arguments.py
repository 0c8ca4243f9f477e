"""Requests give arguments for the attention backend: the same tokens in any batch."""

from __future__ import annotations

import pytest
from support.cases import nightly_but
from support.http_server import running

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.errors import PluginContractError
from hardpoint.testing import scripted_config

BACKEND = "support.plugins.windowed:Windowed"
PROMPT = "a prompt of some length that fills blocks"
WINDOWS = [None, 3, 9, None, 3, 20]


def config(folder, backend=BACKEND, **tables):
    extra = {"attention": {"use": backend}, "kv_cache": {"block_size": 4}, **tables}
    return scripted_config(folder, extra)


def params(window=None, name="windowed", **fields):
    arguments = {} if window is None else {"plugin_args": {name: {"window": window}}}
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **arguments, **fields)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(scripted):
    """The tokens of the prompt with each window, each in an engine of its own."""
    tokens = {}
    for window in {*WINDOWS}:
        with LLM(config=config(scripted)) as llm:
            tokens[window] = tokens_of(llm.generate([PROMPT], params(window)))[0]
    return tokens


TABLES = {
    "in one batch": {},
    "in chunks": {"scheduler": {"max_num_batched_tokens": 8}},
    "with preemptions": {"kv_cache": {"block_size": 4, "num_blocks": 40}, "max_model_len": 96},
    "with drafts": {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "plugin": {"scripted_speculator": {"right": 0.7}},
    },
    "planned ahead": {"scheduler": {"asynchronous": True}, "executor": {"use": "uniproc"}},
    "two stages": {"parallel": {"pipeline": 2}, "executor": {"use": "multiproc"}},
    "in a process": {"engine": {"in_process": False}},
}
ALWAYS = ("in one batch", "in chunks", "with preemptions", "with drafts")


@pytest.mark.parametrize("name", nightly_but(TABLES, *ALWAYS))
def test_tokens_are_the_same_as_alone(scripted, alone, name):
    with LLM(config=config(scripted, **TABLES[name])) as llm:
        outputs = llm.generate([PROMPT] * len(WINDOWS), [params(window) for window in WINDOWS])
        preemptions = llm.engines.scheduler_stats().num_preemptions
    assert tokens_of(outputs) == [alone[window] for window in WINDOWS]
    assert (preemptions > 0) == (name == "with preemptions")
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)


def test_prompts_are_shared_by_requests_with_the_same_arguments(scripted):
    with LLM(config=config(scripted)) as llm:
        cached = [
            llm.generate([PROMPT], params(window, name))[0].num_cached_tokens
            for window in (None, 3, 9, 3, None)
            for name in ("windowed",)
        ]
        other_name = llm.generate([PROMPT], params(9, "attention_backends/windowed"))
    assert [count > 0 for count in cached] == [False, False, False, True, True]
    assert other_name[0].num_cached_tokens == cached[-1]


def test_prepare_makes_arguments_for_each_request(scripted, alone):
    backend = "support.plugins.windowed:Prepared"
    half = len(PROMPT) // 2 + 1
    with LLM(config=config(scripted, backend)) as llm:
        outputs = llm.generate([PROMPT] * 3, [params(w, "prepared") for w in (None, half, 9)])
        with pytest.raises(RequestError, match=r"window: 13 brings no luck$"):
            llm.generate([PROMPT], params(13, "prepared"))
    first, same, nine = tokens_of(outputs)
    assert first == same
    assert nine == alone[9]


def test_wrong_arguments_are_refused(scripted):
    with LLM(config=config(scripted)) as llm:
        with pytest.raises(RequestError, match=r"plugin_args\.windowed\.window: .* >= 1"):
            llm.generate([PROMPT], params(0))
        with pytest.raises(RequestError, match=r"plugin_args\.windowed\.widow"):
            llm.generate([PROMPT], SamplingParams(plugin_args={"windowed": {"widow": 3}}))
    with LLM(config=scripted_config(scripted)) as llm:
        message = r"plugin_args\.windowed: no enabled plugin of that name takes arguments"
        with pytest.raises(RequestError, match=message):
            llm.generate([PROMPT], params(3))


def test_clients_of_a_server_give_arguments(scripted, alone):
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    with running(AsyncLLM(config=config(scripted))) as server:
        for window in (3, None, 9):
            given = {} if window is None else {"plugin_args": {"windowed": {"window": window}}}
            [choice] = server.post("/v1/completions", {**asked, **given}).json()["choices"]
            assert tuple(choice["token_ids"]) == tuple(alone[window])
        wrong = {**asked, "plugin_args": {"windowed": {"window": 0}}}
        response = server.post("/v1/completions", wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "plugin_args.windowed.window"


def test_each_argument_needs_a_default(scripted):
    with pytest.raises(PluginContractError, match=r"so its Arguments\.window needs a default$"):
        LLM(config=config(scripted, "support.plugins.windowed:Needs")).close()
