"""Parameters of the KV connector over HTTP: from keys that may, to the engine and back."""

from __future__ import annotations

import pytest
from support.builtins.split import DECODE, PREFILL, REMOTE, split_config
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import server_config, user, write_model

from hardpoint import AsyncLLM
from hardpoint.plugins.server import Authenticator, Client, InstalledExtension

ASKED = {"do_remote_decode": True}
GIVEN = {"do_remote_prefill": True, "remote_engine_id": "a", "num_tokens": 16}
ROUTES = {
    "/v1/chat/completions": {"messages": user("hi")},
    "/v1/completions": {"prompt": "hi"},
    "/inference/v1/generate": {"token_ids": [1, 2, 3]},
}


class Marked:
    """Lets everybody give them."""

    async def authenticate(self, headers, path):
        return Client(name="me", kv_transfer=True)


MARKED = (("keys", Authenticator(authenticate=Marked().authenticate)),)


@pytest.fixture(scope="module")
def fake():
    tables = {"kv_connector": {"stores": ["memory"]}}
    engine = FakeEngine(config=configured(tables), extensions=MARKED, transfer=GIVEN)
    with running(engine) as server:
        yield server


@pytest.mark.parametrize("route", ROUTES)
def test_they_reach_the_engine_and_come_with_the_answer(fake, route):
    response = fake.post(route, {**ROUTES[route], "kv_transfer_params": ASKED})
    assert response.status_code == 200, response.text
    assert fake.engine.asked[-1][2]["kv_transfer_params"] == ASKED
    assert response.json()["kv_transfer_params"] == GIVEN


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_has_them_in_one_event_near_its_end(fake, route):
    events = fake.events(route, {**ROUTES[route], "stream": True, "kv_transfer_params": ASKED})
    (event_with_params,) = [event for event in events if event.get("kv_transfer_params")]
    assert event_with_params["kv_transfer_params"] == GIVEN
    assert events.index(event_with_params) >= len(events) - 2
    assert all("choices" in event for event in events)


def test_requests_without_any_give_the_engine_none(fake):
    assert fake.post("/v1/completions", ROUTES["/v1/completions"]).status_code == 200
    assert "kv_transfer_params" not in fake.engine.asked[-1][2]


def test_one_prompt_has_them(fake):
    fields = {"prompt": ["a", "b"], "kv_transfer_params": ASKED}
    response = fake.post("/v1/completions", fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "kv_transfer_params: expected one prompt with them, got 2"
    )


@pytest.mark.nightly
def test_two_servers_share_the_work(tmp_path):
    base = server_config(write_model(tmp_path / "model"))
    sockets = tmp_path / "s"

    def engine(name):
        llm = AsyncLLM(config=split_config(base, sockets, name))
        return running(llm, authenticators=[InstalledExtension("keys", "keys", MARKED[0][1])])

    with engine(PREFILL) as prefill, engine(DECODE) as decode:
        for streams in (False, True):
            prompt = f"{streams}: The quick brown fox jumps over the lazy dog. " * 6
            fields = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            wanted = prefill.post("/v1/completions", fields).json()["choices"][0]["text"]
            first = prefill.post(
                "/v1/completions", {**fields, "max_tokens": 1, "kv_transfer_params": REMOTE}
            ).json()
            second = {**fields, "kv_transfer_params": first["kv_transfer_params"]}
            if streams:
                events = decode.events("/v1/completions", {**second, "stream": True})
                parts = [choice["text"] for event in events for choice in event["choices"]]
                assert "".join(parts) == wanted
                continue
            answer = decode.post("/v1/completions", second).json()
            assert answer["choices"][0]["text"] == wanted
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == len(prompt) // 16 * 16
        wrong = {**second["kv_transfer_params"], "remote_engine_id": "tcp://10.0.0.1:5"}
        response = decode.post("/v1/completions", {**fields, "kv_transfer_params": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "kv_transfer_params.remote_engine_id"
