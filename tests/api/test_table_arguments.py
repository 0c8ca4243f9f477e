"""Arguments that are tables with numbers as keys: the same in a program and over HTTP."""

from __future__ import annotations

import pytest
from support.adapters import write_model
from support.http_server import running
from support.plugins.keyed import KEYED

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams

PROMPT = [1, 2, 3]
KEYS = {"a number": 7, "its text": "7"}
COMMON = {
    "plugins": KEYED,
    "stats": {"sinks": []},
    "kv_cache": {"num_blocks": 64},
    "max_model_len": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keyed") / "model"
    write_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(config={"model": folder, **COMMON}) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(folder):
    config = {"model": folder, **COMMON, "server": {"port": 0, "access_log": "off"}}
    with running(AsyncLLM(config=config)) as server:
        yield server


def arguments(token, layer):
    return {
        "forced": {"weights": {token: 1000.0}},
        "shifted": {"weights": {layer: 0.5}},
        "shown": {"weights": {token: 0.5}},
    }


def program(llm, plugin_args):
    params = SamplingParams(
        max_tokens=2, temperature=0, ignore_eos=True, include=["shown"], plugin_args=plugin_args
    )
    (output,) = llm.generate([PROMPT], params)
    completion = output.outputs[0]
    assert completion.error is None
    (tapped,) = completion.part_arrays["activation_taps"].values()
    figures = completion.part_figures["shown"]
    return completion.token_ids, [*tapped.positions], tapped.values.shape, figures["seen"]


def body(plugin_args):
    return {
        "prompt": PROMPT,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "include": ["shown"],
        "return_token_ids": True,
        "plugin_args": plugin_args,
    }


@pytest.mark.parametrize("token", [7, "7"])
@pytest.mark.parametrize("layer", [1, "1"])
def test_a_program_may_give_numbers_and_their_texts(llm, token, layer):
    tokens, positions, shape, seen = program(llm, arguments(token, layer))
    assert tokens == [7, 7]
    assert (positions, shape) == ([0, 1, 2, 3], (4,))
    assert seen == "{'weights': {7: 0.5}}"


def test_http_gives_what_a_program_does(server):
    answer = server.post("/v1/completions", body(arguments("7", "1")))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["token_ids"] == [7, 7]
    assert choice["part_arrays"]["activation_taps"]["shifted/1/layer_output"]["shape"] == [4]
    assert choice["part_figures"]["shown"]["seen"] == "{'weights': {7: 0.5}}"


@pytest.mark.parametrize("name", ["forced", "shifted", "shown"])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"x": 1.0}, "expected a whole number as key, got 'x'"),
        ({"-1": 1.0}, "expected a whole number >= 0 as key, got '-1'"),
    ],
)
def test_both_refuse_the_same(llm, server, name, weights, message):
    given = {name: {"weights": weights}}
    expected = f"plugin_args.{name}.weights: {message}"
    with pytest.raises(RequestError) as refused:
        llm.generate([PROMPT], SamplingParams(plugin_args=given))
    assert str(refused.value) == expected
    answer = server.post("/v1/completions", body(given))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, expected)


def test_a_key_that_is_given_twice_is_refused(llm):
    given = {"forced": {"weights": {7: 1.0, "7": 2.0}}}
    with pytest.raises(
        RequestError, match=r"forced.weights: expected each key once, got \[7, '7'\]"
    ):
        llm.generate([PROMPT], SamplingParams(plugin_args=given))
