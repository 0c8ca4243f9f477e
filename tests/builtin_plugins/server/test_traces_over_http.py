"""Traces over HTTP: for clients that may have them, refused by name for others."""

from __future__ import annotations

import contextlib
import io

import msgspec
import pytest
from support.http_server import running
from support.scripted_server import server_config, user, write_model

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.server.dialects.sessions import InputCommit
from hardpoint.cli import main
from hardpoint.plugins.server import Authenticator, Client, InstalledExtension
from hardpoint.toolkit.trace import Trace

ROUTES = {
    "/v1/chat/completions": {"messages": user("fox")},
    "/v1/completions": {"prompt": "say abc"},
    "/inference/v1/generate": {"token_ids": [1, 2, 1, 2]},
}
SAMPLING = {"max_tokens": 5, "temperature": 0.8, "seed": 3, "top_k": 20}
NEEDED = "traces need server.trace = true, or a key with trace = true in server.keys_file"


class ByName:
    """Lets one of two clients have traces."""

    async def authenticate(self, headers, path):
        name = headers.get("x-name", "nobody")
        return Client(name=name, trace=name == "alice")


def serving(folder, **server):
    tables = {"server": server_config(folder)["server"] | server}
    return running(AsyncLLM(config=server_config(folder, **tables)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def allowing(folder):
    with serving(folder, trace=True) as server:
        yield server


@pytest.fixture(scope="module")
def refusing(folder):
    with serving(folder) as server:
        yield server


def body_of(route, **fields):
    sampling = SAMPLING | fields
    if route == "/inference/v1/generate":
        stream = {"stream": sampling.pop("stream")} if "stream" in sampling else {}
        return ROUTES[route] | stream | {"sampling_params": sampling}
    return ROUTES[route] | sampling


def check_trace(trace, has_texts):
    tokens = trace["tokens"]
    assert [token["position"] for token in tokens] == list(range(5))
    assert [token["token_id"] for token in tokens] == trace["token_ids"]
    assert [change["plugin"] for change in tokens[0]["changes"]] == ["temperature", "top_k"]
    assert tokens[0]["draw"] == {"sampler": "default", "greedy": False, "seed": 3}
    assert ("text" in tokens[0]) == has_texts
    assert trace["steps"][0]["num_tokens"] > 1


@pytest.mark.parametrize("route", ROUTES)
def test_a_trace_comes_with_the_answer_and_changes_no_token(allowing, route):
    answer = allowing.post(route, body_of(route, trace=True)).json()
    (choice,) = answer["choices"]
    has_texts = route != "/inference/v1/generate"
    check_trace(choice.pop("trace"), has_texts)
    assert "part_figures" not in choice
    (plain,) = allowing.post(route, body_of(route)).json()["choices"]
    assert plain == choice


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_has_it_where_the_completion_ends(allowing, route):
    events = allowing.events(route, body_of(route, trace=True, stream=True))
    choices = [choice for event in events for choice in event["choices"]]
    *others, last = choices
    assert all("trace" not in choice for choice in others)
    check_trace(last["trace"], route != "/inference/v1/generate")


def test_each_completion_has_its_own(allowing):
    fields = body_of("/v1/completions", trace=True, n=2)
    first, second = allowing.post("/v1/completions", fields).json()["choices"]
    assert (first["trace"]["index"], second["trace"]["index"]) == (0, 1)
    noises = [choice["trace"]["tokens"][0]["candidates"][0]["noise"] for choice in (first, second)]
    assert noises[0] != noises[1]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("field", ["trace", "include"])
def test_it_is_off_by_default_and_refused_by_name(refusing, route, field):
    value = True if field == "trace" else ["trace"]
    response = refusing.post(route, body_of(route, **{field: value}))
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["message"] == f"{field}: {NEEDED}"
    assert (error["type"], error["param"]) == ("permission_error", field)
    assert refusing.post(route, body_of(route, trace=False)).status_code == 200


def test_a_response_is_refused_one_too(refusing, allowing):
    fields = {"input": "fox", "include": ["trace"]}
    response = refusing.post("/v1/responses", fields)
    assert response.status_code == 403
    assert response.json()["error"]["message"] == f"include: {NEEDED}"
    assert "record" in allowing.post("/v1/responses", fields).json()["part_figures"]["trace"]


def test_a_key_may_have_the_permission(folder):
    extension = Authenticator(authenticate=ByName().authenticate)
    engine = AsyncLLM(config=server_config(folder))
    with running(engine, authenticators=[InstalledExtension("keys", "tests", extension)]) as server:
        for name, status in (("alice", 200), ("bob", 403)):
            response = server.post(
                "/v1/completions",
                body_of("/v1/completions", trace=True),
                headers={"x-name": name},
            )
            assert response.status_code == status, response.text


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_asks_for_a_number_of_candidates(allowing, refusing, route):
    fields = body_of(route, trace={"candidates": 12})
    (choice,) = allowing.post(route, fields).json()["choices"]
    assert {len(token["candidates"]) for token in choice["trace"]["tokens"]} == {12}
    assert refusing.post(route, fields).status_code == 403


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("all", "trace: expected"),
        ({"candidates": 21}, "trace.candidates: expected"),
        ({"candidate": 1}, "trace.candidate: unknown field (did you mean 'candidates'?)"),
    ],
    ids=["text", "too many", "misspelled"],
)
def test_other_traces_are_refused(allowing, value, message):
    response = allowing.post("/v1/completions", body_of("/v1/completions", trace=value))
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_other_unknown_options_of_a_trace_are_listed(allowing):
    body = body_of("/v1/completions", trace={"a": 1})
    response = allowing.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    assert response.headers["x-hardpoint-ignored-fields"] == "trace.a"
    assert response.json()["choices"][0]["trace"]["tokens"]


def command(url, *arguments):
    """Exit code, output and error of `hardpoint trace --url`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["trace", "--url", url, *arguments])
    return code, out.getvalue(), err.getvalue()


def test_the_command_asks_a_server(allowing, tmp_path):
    sampling = ["--temperature", "0.8", "--seed", "3", "--top-k", "20", "--max-tokens", "5"]
    code, out, err = command(allowing.url, "say abc", *sampling, "--json", "--candidates", "12")
    assert (code, err) == (0, "")
    trace = msgspec.json.decode(out, type=Trace)
    assert (trace.prompt, trace.num_prompt_tokens) == ("say abc", 7)
    assert {len(token.candidates) for token in trace.completions[0].tokens} == {12}
    expected = allowing.post("/v1/completions", body_of("/v1/completions", trace=True)).json()
    assert trace.completions[0].token_ids == expected["choices"][0]["trace"]["token_ids"]
    options = ["--structured", "choice=yes", "--structured", "choice=no", "--n", "2", "--chat"]
    code, out, err = command(allowing.url, "fox", *options)
    assert (code, err) == (0, "")
    assert "completion 1, " in out
    assert "mask: structured_output (hardpoint " in out
    page = tmp_path / "trace.html"
    assert command(allowing.url, "say abc", "--html", str(page))[0] == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.nightly
def test_the_command_sends_the_key(folder, monkeypatch):
    async def authenticate(headers, path):
        return Client(name="any", trace=headers.get("authorization") == "Bearer secret")

    extension = InstalledExtension("keys", "tests", Authenticator(authenticate=authenticate))
    with running(AsyncLLM(config=server_config(folder)), authenticators=[extension]) as server:
        assert command(server.url, "say abc", "--max-tokens", "2")[0] == 2
        monkeypatch.setenv("HARDPOINT_API_KEY", "secret")
        assert command(server.url, "say abc", "--max-tokens", "2")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a"], 2, f"trace: {NEEDED} (403)"),
        (["a", "--model", "no"], 2, "(404)"),
        (["a", "--plugin-args", "no.such=1"], 2, f"trace: {NEEDED} (403)"),
        (["a", "--set", "seed=1"], 2, "--set: expected none with --url: the server has its own"),
        (["a", "--candidates", "21"], 2, "--candidates: expected 1 to 20, got 21"),
    ],
    ids=["permission", "model", "permission first", "set", "candidates"],
)
def test_a_refusal_is_one_line(refusing, arguments, code, message):
    status, out, err = command(refusing.url, *arguments)
    assert (status, out) == (code, "")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.nightly
def test_an_address_that_is_no_server():
    assert "--url: 127.0.0.1:9 cannot be reached" in command("127.0.0.1:9", "a")[2]
    assert "--url: expected unix:PATH, HOST:PORT or" in command("nowhere", "a")[2]


def test_a_conversation_has_none():
    assert "the text and the usage alone" in InputCommit.refused["trace"]
