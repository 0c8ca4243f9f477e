"""SamplingParams: a wrong value is rejected with field, value and expectation."""

from __future__ import annotations

import math

import msgspec
import pytest

from hardpoint.plugins import RequestError, RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf


def refusal(**fields):
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields).checked()
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 0}, "n: expected a whole number >= 1, got 0"),
        ({"n": 5000}, "n: expected a whole number <= 4096, got 5000"),
        ({"temperature": -0.1}, "temperature: expected a number >= 0, got -0.1"),
        ({"temperature": NAN}, "temperature: expected a finite number, got nan"),
        ({"temperature": INF}, "temperature: expected a finite number, got inf"),
        ({"top_p": 0.0}, "top_p: expected a number > 0, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected a number <= 1, got 1.1"),
        ({"top_p": NAN}, "top_p: expected a finite number, got nan"),
        ({"top_k": -2}, "top_k: expected a whole number >= -1, got -2"),
        ({"min_p": -0.5}, "min_p: expected a number >= 0, got -0.5"),
        ({"min_p": 2.0}, "min_p: expected a number <= 1, got 2.0"),
        ({"seed": 2**63}, f"seed: expected a whole number <= {2**63 - 1}, got {2**63}"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number >= 1, got 0"),
        ({"max_tokens": -3}, "max_tokens: expected a whole number >= 1, got -3"),
        ({"min_tokens": -1}, "min_tokens: expected a whole number >= 0, got -1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]: expected a whole number >= 0, got -1"),
        ({"logprobs": -2}, "logprobs: expected a whole number >= -1, got -2"),
        ({"prompt_logprobs": -2}, "prompt_logprobs: expected a whole number >= -1, got -2"),
        ({"presence_penalty": 2.5}, "presence_penalty: expected a number <= 2, got 2.5"),
        ({"presence_penalty": -2.5}, "presence_penalty: expected a number >= -2, got -2.5"),
        ({"frequency_penalty": 3.0}, "frequency_penalty: expected a number <= 2, got 3.0"),
        ({"frequency_penalty": NAN}, "frequency_penalty: expected a finite number, got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number > 0, got 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty: expected a number > 0, got -1.0"),
        ({"logit_bias": {7: 200.0}}, "logit_bias.7: expected a number <= 100, got 200.0"),
        ({"logit_bias": {7: -101.0}}, "logit_bias.7: expected a number >= -100, got -101.0"),
        ({"logit_bias": {7: NAN}}, "logit_bias.7: expected a finite number, got nan"),
        ({"logit_bias": {7: INF}}, "logit_bias.7: expected a finite number, got inf"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false, got 1"),
        ({"detokenize": "no"}, "detokenize: expected true or false, got 'no'"),
        ({"plugin_args": [1]}, "plugin_args: expected a table, got [1]"),
        (
            {"plugin_args": {"top_a": {"a": NAN}}},
            "plugin_args.top_a.a: expected a finite number, got nan",
        ),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens: expected at most max_tokens (4), got 5",
        ),
        (
            {"stop": "x", "detokenize": False},
            "stop: stop strings need text, but detokenize is false",
        ),
    ],
)
def test_refused_word_by_word(fields, expected):
    assert refusal(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"n": 1.5}, "n: expected a whole number"),
        ({"n": None}, "n: expected a whole number"),
        ({"temperature": "0.7"}, "temperature: expected a number"),
        ({"temperature": None}, "temperature: expected a number"),
        ({"top_k": "5"}, "top_k: expected a whole number"),
        ({"max_tokens": "5"}, "max_tokens: expected a whole number"),
        ({"max_tokens": 5.5}, "max_tokens: expected a whole number"),
        ({"max_tokens": True}, "max_tokens: expected a whole number"),
        ({"seed": "x"}, "seed: expected a whole number"),
        ({"stop": 5}, "stop: expected a string or a list"),
        ({"stop": ""}, "stop: expected a "),
        ({"stop": ["a", ""]}, "stop[1]: expected a "),
        ({"stop": ["a", None]}, "stop[1]: expected a string"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]: expected a whole number"),
        ({"bad_words": "word"}, "bad_words: expected a list"),
        ({"bad_words": ["a", ""]}, "bad_words[1]: expected a "),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected a "),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]: expected a whole number >= 0"),
        ({"logit_bias": {7: "5"}}, "logit_bias.7: expected a number"),
        ({"logit_bias": {-7: 1.0}}, "logit_bias: expected a whole number >= 0 as key"),
        ({"logit_bias": {"seven": 1.0}}, "logit_bias: expected a whole number"),
        ({"logit_bias": [1]}, "logit_bias: expected a table"),
        ({"output_kind": 7}, "output_kind: "),
        ({"output_kind": "delta"}, "output_kind: expected"),
        ({"plugin_args": {3: {}}}, "plugin_args: expected a string as key"),
    ],
)
def test_wrong_types_name_the_field_and_the_right_type(fields, start):
    assert refusal(**fields).startswith(start)


def test_an_unknown_field_cannot_even_be_written():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_is_frozen_and_keyword_only():
    with pytest.raises(AttributeError, match="immutable"):
        SamplingParams().n = 2
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(2)


def test_the_defaults_are_right_and_stay_equal():
    assert SamplingParams().checked() == SamplingParams()


def test_checking_keeps_every_value():
    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=-(2**63),
        max_tokens=None,
        min_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[1],
        ignore_eos=True,
        logprobs=-1,
        prompt_logprobs=0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.3,
        logit_bias={7: -100.0, 0: 100.0},
        bad_words=["x"],
        allowed_token_ids=[1, 2],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.DELTA,
        plugin_args={"top_a": {"a": 0.5}},
    )
    assert params.checked() == params


@pytest.mark.parametrize(
    ("field", "edges"),
    [
        ("n", [1, 4096]),
        ("temperature", [0, 0.0, 1e300]),
        ("top_p", [1e-300, 1, 1.0]),
        ("top_k", [-1, 0, 10**9]),
        ("min_p", [0.0, 1.0]),
        ("seed", [None, 0, 2**63 - 1, -(2**63)]),
        ("max_tokens", [None, 1]),
        ("logprobs", [None, -1, 0]),
        ("presence_penalty", [-2, 2]),
        ("repetition_penalty", [1e-300]),
        ("stop", ["x", [], ["x"]]),
        ("allowed_token_ids", [None, [0]]),
    ],
)
def test_the_edges_of_each_range_are_allowed(field, edges):
    for value in edges:
        assert getattr(SamplingParams(**{field: value}).checked(), field) == value


def test_arguments_given_as_instances_become_plain():
    class Arguments(msgspec.Struct):
        a: float

    params = SamplingParams(plugin_args={"top_a": Arguments(0.5)}).checked()
    assert params.plugin_args == {"top_a": {"a": 0.5}}


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)]
)
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(("stop", "strings"), [("x", ["x"]), (["x", "y"], ["x", "y"]), ([], [])])
def test_stop_strings(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings
