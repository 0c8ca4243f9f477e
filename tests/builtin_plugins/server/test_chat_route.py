"""`/v1/chat/completions`."""

import threading

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


def test_the_vocabulary_is_read_in_another_thread(monkeypatch):
    """It takes a second, for which the event loop would stop all streams."""
    engine, threads = FakeEngine(config=configured()), []

    def vocabulary():
        threads.append(threading.get_ident())
        raise NotImplementedError

    monkeypatch.setattr(engine.tokenizer, "vocabulary", vocabulary, raising=False)
    with running(engine) as server:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert server.client.post("/v1/chat/completions", json=body).is_success
        assert threads == []
        more = {"logprobs": True, "top_logprobs": 1}
        assert server.client.post("/v1/chat/completions", json=body | more).is_success
        assert threads
        assert server.thread.ident not in threads
