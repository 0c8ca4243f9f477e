"""Graceful ends of requests by plugins, in each dialect."""

from __future__ import annotations

import json

import pytest
from support.http_server import running
from support.scripted_server import server_config, user, write_model

from hardpoint import AsyncLLM

REASON = {"plugin": "token_budget", "reason": "budget", "stop_reason": 9}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tables = {
        "plugins": {"enable": ["support.plugins.finishing:TokenBudget"]},
        "plugin": {"token_budget": {"tokens": 9}},
    }
    config = server_config(write_model(tmp_path_factory.mktemp("model")), **tables)
    with running(AsyncLLM(config=config)) as server:
        yield server


def _post(server, path, **body):
    answer = server.client.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    return answer


def _events(answer):
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_chat(server):
    body = {"messages": user("fox"), "temperature": 0}
    (choice,) = _post(server, "/v1/chat/completions", **body).json()["choices"]
    assert choice["message"]["content"] == "the quick"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", REASON)
    events = _events(_post(server, "/v1/chat/completions", **body, stream=True))
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "the quick"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", REASON)


def test_completions(server):
    (choice,) = _post(server, "/v1/completions", prompt="loop", temperature=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("nananana" + "n", "stop")
    assert choice["stop_reason"] == REASON


def test_messages(server):
    body = {"messages": user("fox"), "temperature": 0, "max_tokens": 50}
    answer = _post(server, "/v1/messages", **body).json()
    assert answer["content"] == [{"type": "text", "text": "the quick"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    events = _events(_post(server, "/v1/messages", **body, stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert [delta["stop_reason"] for delta in deltas] == ["end_turn"]


def test_responses(server):
    body = {"input": "fox", "temperature": 0}
    answer = _post(server, "/v1/responses", **body).json()
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["output"][-1]["content"][0]["text"] == "the quick"
    events = _events(_post(server, "/v1/responses", **body, stream=True))
    assert events[-1]["type"] == "response.completed"
