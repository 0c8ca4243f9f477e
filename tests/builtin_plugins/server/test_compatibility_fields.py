"""Fields of other servers that a plugin or a grammar implements."""

import pytest
from support.http_server import running
from support.scripted_server import server_config, user, write_model

from hardpoint import AsyncLLM

COMPLETIONS = "/v1/completions"
THINK = 257
"""The token that begins the reasoning of the scripted model."""
MIROSTAT = "support.plugins.mirostat:Mirostat"


@pytest.fixture(scope="module")
def mirostat_server(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    config = server_config(folder, plugins={"enable": [MIROSTAT]})
    with running(AsyncLLM(config=config)) as running_server:
        yield running_server


@pytest.mark.parametrize("tau", [65, 66])
def test_mirostat_uses_the_enabled_plugin(mirostat_server, tau):
    body = {"prompt": "say abc", "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
    answer = mirostat_server.post(COMPLETIONS, {**body, "mirostat": 2, "mirostat_tau": tau})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == [tau] * 3
    without = mirostat_server.post(COMPLETIONS, {**body, "mirostat": 0, "mirostat_tau": tau})
    assert without.json()["choices"][0]["token_ids"] != [tau] * 3


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "ab"}, "ab"),
        ({"ebnf": 'root ::= "ab"'}, "ab"),
        ({"grammar": 'root ::= "ab"'}, "ab"),
        ({"json_schema": {"const": 5}}, "5"),
        ({"json_schema": '{"const": 5}'}, "5"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": user("hi")}),
    ],
)
def test_grammars_of_other_servers_constrain_the_answer(server, path, body, fields, text):
    without_reasoning = {"temperature": 0, "logit_bias": {str(THINK): -100}}
    answer = server.post(path, {**body, **fields, **without_reasoning, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text


@pytest.mark.parametrize("stream", [False, True])
def test_n_predict_is_the_length_of_the_answer(server, stream):
    body = {"messages": user("say abc"), "n_predict": 3, "stream": stream, "temperature": 0}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert '"finish_reason":"length"' in answer.text
