"""`/v1/chat/completions`."""

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(config=configured())) as running_server:
        yield running_server


def test_answers_whole(server):
    answer = server.post("/v1/chat/completions", ASK).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello there , friend",
        "refusal": None,
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4


def test_streams_the_same_text(server):
    events = server.events("/v1/chat/completions", {**ASK, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello there , friend"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
