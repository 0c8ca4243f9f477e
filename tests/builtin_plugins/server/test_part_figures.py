"""Figures of step parts over HTTP, of requests that include them."""

from __future__ import annotations

import json
import time

import pytest
from support.http_server import running
from support.scripted_server import server_config, user, write_model

from hardpoint import AsyncLLM

ROUTES = {
    "/v1/chat/completions": {"messages": user("loop")},
    "/v1/completions": {"prompt": "loop"},
    "/inference/v1/generate": {"token_ids": [1, 2, 1, 2, 1, 2]},
    "/v1/responses": {"input": "loop"},
}
COUNTS = {"num_cached_tokens", "num_drafts", "num_accepted_drafts", "num_preemptions"}
FIGURES = {"num_drafts", "num_accepted_drafts", "num_verified_drafts", "num_accepted_by_position"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tables = {"speculation": {"use": ["ngram"], "adaptive": False}}
    folder = write_model(tmp_path_factory.mktemp("model"))
    with running(AsyncLLM(config=server_config(folder, **tables))) as server:
        yield server


def body_of(route, include, **fields):
    """Return a request that includes figures; `/inference/v1/generate` has a table for this."""
    fields |= ROUTES[route]
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    sampling = {limit: 40, "temperature": 0.0} | ({"include": include} if include else {})
    if route == "/inference/v1/generate":
        return fields | {"sampling_params": sampling}
    return fields | sampling


def figures_of(answer):
    (choice,) = answer.get("choices", [answer])
    return choice.get("part_figures")


@pytest.mark.parametrize("route", ROUTES)
def test_they_come_with_the_answer_if_they_are_included(server, route):
    answer = server.post(route, body_of(route, ["speculation"])).json()
    figures = figures_of(answer)["speculation"]
    assert figures.keys() == FIGURES
    assert figures["num_accepted_drafts"] == sum(figures["num_accepted_by_position"])
    plain = server.post(route, body_of(route, [])).json()
    assert figures_of(plain) is None


@pytest.mark.parametrize("route", [*ROUTES][:3])
def test_a_stream_has_them_where_the_completion_ends(server, route):
    events = server.events(route, body_of(route, ["speculation"], stream=True))
    *others, last = [figures_of(event) for event in events if event["choices"]]
    assert not any(others)
    assert last["speculation"].keys() == FIGURES


@pytest.mark.parametrize("route", ROUTES)
def test_a_part_without_figures_is_refused(server, route):
    response = server.post(route, body_of(route, ["structured_output"]))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.endswith(
        "include: expected 'speculation' or 'timings' or 'trace', got 'structured_output'"
    )


def test_names_of_openai_add_nothing_to_a_response(server):
    fields = body_of("/v1/responses", ["reasoning.encrypted_content"])
    answer = server.post("/v1/responses", fields).json()
    assert answer["status"] in ("completed", "incomplete")
    assert figures_of(answer) is None


@pytest.mark.parametrize("route", ROUTES)
def test_timings_come_if_they_are_included(server, route):
    server.post(route, body_of(route, []))
    began = time.perf_counter()
    timings = figures_of(server.post(route, body_of(route, ["timings"])).json())["timings"]
    milliseconds = 1e3 * (time.perf_counter() - began)
    stages = [timings.pop(name) for name in ("queue_ms", "prefill_ms", "decode_ms")]
    assert min(stages) > 0
    assert sum(stages) < milliseconds
    assert timings.keys() == COUNTS
    if route == "/v1/completions":  # whose answer repeats itself
        assert 0 < timings["num_accepted_drafts"] <= timings["num_drafts"]


def test_timings_count_cached_tokens_and_leave_other_answers_alone(server):
    body = {**body_of("/v1/completions", ["timings"]), "prompt": "loop" * 12}
    assert figures_of(server.post("/v1/completions", body).json())["timings"]
    again = figures_of(server.post("/v1/completions", body).json())["timings"]
    assert again["num_cached_tokens"] > 0
    asking = server.post("/v1/completions", body).json()
    plain = server.post("/v1/completions", {**body, "include": []}).json()
    assert [*plain["choices"][0]] == [n for n in asking["choices"][0] if n != "part_figures"]
    assert plain["choices"][0]["text"] == asking["choices"][0]["text"]


def test_the_end_of_a_stream_of_a_response_has_timings(server):
    body = body_of("/v1/responses", ["timings"], stream=True)
    with server.client.stream("POST", "/v1/responses", json=body) as response:
        *_, last = response.read().decode().strip().split("\n\n")
    completed = json.loads(last.partition("\ndata: ")[2])["response"]
    assert completed["part_figures"]["timings"]["decode_ms"] > 0
