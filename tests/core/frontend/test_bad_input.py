"""Every bad request gets one clear error, and nothing else is disturbed."""

from __future__ import annotations

import time

import pytest

from hardpoint import EngineClosedError, RequestError, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.testing import scripted_engine

NAN = float("nan")


@pytest.fixture(scope="module")
def engine(scripted):
    engine = scripted_engine(scripted)
    engine.add_request("bystander", "long", SamplingParams(temperature=0, max_tokens=90))
    yield engine
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert seen[-1].outputs[0].text == "0123456789" * 8  # undisturbed by all that went wrong
    engine.close()


def refused(engine, prompt="x", **fields) -> str:
    with pytest.raises(RequestError) as error:
        engine.add_request("bad", prompt, SamplingParams(**fields))
    engine.step()
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": NAN}, "temperature: expected a finite number, got nan"),
        ({"temperature": -1.0}, "temperature: expected a number >= 0, got -1.0"),
        ({"temperature": "hot"}, "temperature: expected a number >= 0, got 'hot'"),
        ({"top_p": 0.0}, "top_p: expected a number > 0, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected a number <= 1, got 1.1"),
        ({"top_k": -2}, "top_k: expected a whole number >= -1, got -2"),
        ({"min_p": 1.5}, "min_p: expected a number <= 1, got 1.5"),
        ({"n": 0}, "n: expected a whole number >= 1, got 0"),
        ({"logprobs": 258}, "logprobs: expected at most the vocabulary's 257, got 258"),
        ({"stop_token_ids": [257]}, "stop_token_ids[0]: expected a token id below 257, got 257"),
        (
            {"logprob_token_ids": [3, 257]},
            "logprob_token_ids[1]: expected a token id below 257, got 257",
        ),
        (
            {"logprob_token_ids": [3, -1]},
            "logprob_token_ids[1]: expected a whole number >= 0, got -1",
        ),
        ({"logprob_token_ids": []}, "logprob_token_ids: expected a list of length >= 1, got []"),
        (
            {"logprob_token_ids": list(range(129))},
            "logprob_token_ids: expected a list of length <= 128, got [0, 1, 2, ",
        ),
        ({"logprob_token_ids": 5}, "logprob_token_ids: expected a list or nothing, got 5"),
        ({"logit_bias": {999: 1.0}}, "logit_bias: "),
        ({"allowed_token_ids": [1, 400]}, "allowed_token_ids: "),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens: expected at most max_tokens (3), got 9"),
        (
            {"detokenize": False, "stop": "x"},
            "stop: stop strings need text, but detokenize is false",
        ),
        (
            {"allowed_token_ids": [5, 6], "logit_bias": {5: -100, 6: -100.0, 7: 1.0}},
            "logit_bias: each of allowed_token_ids is biased by -100, which leaves no token",
        ),
        (
            {"allowed_token_ids": [4, 5], "plugin_args": {"bad_words": {"sequences": [[5], [4]]}}},
            "plugin_args.bad_words: each of allowed_token_ids [4, 5] is forbidden",
        ),
        (
            {"thinking_token_budget": 5},
            "thinking_token_budget: ",
        ),
        (
            {"thinking_token_budget": -1},
            "thinking_token_budget: expected a whole number >= 0",
        ),
        (
            {"repetition_detection": {"max_pattern": 2, "min_pattern": 3}},
            "repetition_detection.min_pattern: expected at most max_pattern (2), got 3",
        ),
        (
            {"plugin_args": {"mirostat": {}}},
            "plugin_args.mirostat: no enabled plugin of that name takes arguments",
        ),
        ({"plugin_args": {"min_p": {"min_q": 1}}}, "plugin_args.min_p.min_q: unknown field"),
        (
            {"plugin_args": {"min_p": {"min_p": 0.1}}, "min_p": 0.2},
            "plugin_args.min_p: given twice, here and by min_p",
        ),
    ],
)
def test_parameters(engine, fields, message):
    assert refused(engine, **fields).startswith(message)


@pytest.mark.parametrize("value", [0, -3])
def test_max_tokens(engine, value):
    message = refused(engine, max_tokens=value)
    assert message.startswith("max_tokens: expected a whole number")
    assert message.endswith(f">= 1, got {value}")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: expected at least one token, got an empty prompt"),
        ([], "prompt: expected at least one token, got an empty prompt"),
        (
            [1] * 512,
            "prompt: the prompt is too long: 512 tokens; this model's maximum context length is "
            "512 tokens, less one to generate",
        ),
        ([1, 257], "prompt_token_ids[1]: expected a whole number from 0 to 256, got 257"),
        ([-1], "prompt_token_ids[0]: expected a whole number from 0 to 256, got -1"),
        ([1, "a"], "prompt_token_ids[1]: expected a whole number from 0 to 256, got 'a'"),
        ([True], "prompt_token_ids[0]: expected a whole number from 0 to 256, got True"),
        (b"bytes", "prompt: expected text or a list of token ids, got bytes"),
        (3.5, "prompt: expected text or a list of token ids, got float"),
        (
            {"text": "x"},
            "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', or a pair with "
            "'text' and 'text_pair', got the keys "
            "['text']",
        ),
        ({"prompt": [1]}, "prompt: expected a string, got list"),
    ],
)
def test_prompts(engine, prompt, message):
    assert refused(engine, prompt) == message


def test_params_of_another_type(engine):
    with pytest.raises(RequestError, match="sampling_params: expected SamplingParams, got dict"):
        engine.add_request("bad", "x", {"temperature": 0})


def test_request_ids(engine):
    with pytest.raises(RequestError, match="request_id: expected a string, got int"):
        engine.add_request(3, "x", SamplingParams())


def test_priority(engine):
    with pytest.raises(RequestError, match="priority: expected a whole number, got 'high'"):
        engine.add_request("bad", "x", SamplingParams(), RequestExtras(priority="high"))
    with pytest.raises(
        RequestError, match=r"^priority: expected a whole number of at most 64 bits"
    ):
        engine.add_request("bad", "x", SamplingParams(), RequestExtras(priority=2**70))


def test_the_callers_params_are_never_changed(engine):
    params = SamplingParams(max_tokens=None, temperature=1.0, plugin_args={})
    before = repr(params)
    engine.add_request("kept", "x", params)
    engine.abort_requests(["kept"])
    assert repr(params) == before


def test_a_closed_engine_refuses_calls(scripted):
    engine = scripted_engine(scripted)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.add_request("r", "x", SamplingParams())
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.step()


def test_a_switched_off_processor_is_missed_not_ignored(open_engine):
    engine = open_engine({"plugins": {"disable": ["min_p"]}})
    assert refused(engine, min_p=0.1) == (
        "min_p: no enabled logits processor applies it, so 0.1 would be ignored; "
        "enable one, or leave it at 0.0"
    )


def test_a_huge_map_is_refused_at_once(engine):
    began = time.thread_time()
    message = refused(engine, logit_bias=dict.fromkeys(range(50_000), 1.0))
    assert message == "logit_bias: expected token ids under 257 (the vocabulary), got 257"
    message = refused(engine, logit_bias={**dict.fromkeys(range(50_000), 1.0), 49_999: "x"})
    assert message.startswith("logit_bias.49999: expected a number")
    assert time.thread_time() - began < 60
