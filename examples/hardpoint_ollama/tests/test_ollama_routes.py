"""The routes over HTTP, with bodies as Ollama's clients send them."""

import json

import pytest
from hardpoint_ollama.models import has_thinking

from hardpoint.testing import serve

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string"}},
        },
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
REPLIES = {
    "user: hi\nassistant: ": "hello",
    "system: be brief\nuser: hi\nassistant: ": "yo",
    "user: color\nassistant: ": "<think>so it is</think>blue",
    "user: think\nassistant: ": "<think>so it is</think>yes",
    f"tools: {json.dumps([WEATHER])}\nuser: weather\nassistant: ": "I look. " + CALL,
    "say abc": " abc abc abc",
    "loop": "na" * 40,
}
CONFIG = {
    "plugins": {"enable": ["ollama"]},
    "server": {"served_names": ["scripted"]},
    "reasoning": {"parser": "think_tags"},
    "tools": {"parser": "hermes"},
}


@pytest.fixture(scope="module")
def server():
    with serve(CONFIG, replies=REPLIES) as running:
        yield running


def user(text):
    return [{"role": "user", "content": text}]


def chat(server, text="hi", **fields):
    body = {"model": "scripted", "messages": user(text), "options": {"temperature": 0}, **fields}
    return server.ask("/api/chat", body)


def lines(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


def test_chat_streams_lines_and_ends_with_figures(server):
    *parts, last = lines(chat(server))
    assert "".join(part["message"]["content"] for part in parts) == "hello"
    assert all(part["done"] is False and part["model"] == "scripted" for part in parts)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 6)
    assert last["prompt_eval_count"] > 0
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"]


def test_chat_without_a_stream_is_one_object(server):
    answer = chat(server, stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": "hello"}
    assert answer["done"] is True


def test_num_predict_limits_the_answer(server):
    answer = chat(server, stream=False, options={"temperature": 0, "num_predict": 2}).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("he", "length")


@pytest.mark.parametrize("limit", [{}, {"num_predict": 0}, {"num_predict": -1}])
def test_without_num_predict_an_answer_is_whole(server, limit):
    options = {"temperature": 0, **limit}
    body = {"model": "scripted", "prompt": "loop", "raw": True, "options": options}
    answer = server.ask("/api/generate", {**body, "stream": False}).json()
    assert (answer["response"], answer["done_reason"]) == ("na" * 40, "stop")
    assert chat(server, stream=False, options=options).json()["message"]["content"] == "hello"


def test_options_of_memory_and_unknown_fields_are_ignored(server):
    options = {"temperature": 0, "num_ctx": 8192, "num_gpu": 1, "mirostat": 0, "typical_p": 1.0}
    answer = chat(server, stream=False, options=options, keep_alive="5m", surprise=1).json()
    assert answer["message"]["content"] == "hello"


def test_a_wrong_option_is_named(server):
    answer = chat(server, options={"top_p": 7})
    assert answer.status == 400
    assert answer.json()["error"].startswith("top_p: ")
    answer = chat(server, options={"temperature": "warm"})
    assert answer.json()["error"].startswith("options.temperature: ")


def test_tool_calls_have_objects_as_arguments(server):
    *_, call, last = lines(chat(server, "weather", tools=[WEATHER]))
    function = call["message"]["tool_calls"][0]["function"]
    assert function == {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    assert last["done_reason"] == "stop"
    assert last["eval_duration"] > 0


@pytest.mark.parametrize("name", [{"tool_name": "get_weather"}, {}])
def test_results_of_tools_need_no_ids(server, name):
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        *user("weather"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sun", **name},
    ]
    body = {"model": "scripted", "messages": messages, "options": {"num_predict": 1}}
    assert server.ask("/api/chat", body).status == 200
    messages[-1]["tool_name"] = "another"
    refused = server.ask("/api/chat", body)
    assert refused.status == 400
    assert refused.json()["error"].startswith("messages[2]: ")


def test_format_is_enforced(server):
    schema = {"type": "string", "enum": ["red"]}
    answer = chat(server, "color", stream=False, format=schema).json()
    assert answer["message"]["content"] == '"red"'
    refused = chat(server, format="yaml")
    assert refused.json() == {"error": "format: expected \"json\" or a JSON schema, got 'yaml'"}


def test_generate_uses_the_template_unless_raw(server):
    body = {"model": "scripted", "prompt": "hi", "stream": False, "options": {"temperature": 0}}
    assert server.ask("/api/generate", body).json()["response"] == "hello"
    body["system"] = "be brief"
    assert server.ask("/api/generate", body).json()["response"] == "yo"
    raw = {"model": "scripted", "prompt": "say abc", "raw": True, "options": {"temperature": 0}}
    *parts, last = lines(server.ask("/api/generate", raw))
    assert "".join(part["response"] for part in parts) == " abc abc abc"
    assert last["done_reason"] == "stop"


def test_requests_without_a_prompt_load_the_model(server):
    for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        answer = server.ask(path, {"model": "scripted:latest", **empty}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert server.ask("/api/embed", {"model": "scripted", "input": ""}).json()["embeddings"] == []
    empty = server.ask("/api/embeddings", {"model": "scripted", "prompt": ""}).json()
    assert empty == {"embedding": []}


ERRORS = [
    ("/api/chat", {"model": "other"}, 404),
    ("/api/generate", {"model": "other"}, 404),
    ("/api/embed", {"model": "other", "input": ""}, 404),
    ("/api/embeddings", {"model": "other", "prompt": ""}, 404),
    ("/api/show", {}, 400),
    ("/api/chat", [], 400),
    ("/api/generate", {"model": "scripted", "options": {"stop": 1}}, 400),
    ("/api/tags", {}, 405),
]


@pytest.mark.parametrize(("path", "body", "status"), ERRORS)
def test_errors_are_texts(server, path, body, status):
    answer = server.ask(path, body)
    assert answer.status == status
    assert isinstance(answer.json()["error"], str)


def test_names_may_have_the_tag_latest(server):
    assert lines(chat(server, model="scripted:latest"))[-1]["done"] is True
    unknown = chat(server, model="other:7b")
    assert unknown.status == 404
    assert "other:7b" in unknown.json()["error"]


def test_models_are_listed_and_described(server):
    (model,) = server.ask("/api/tags").json()["models"]
    assert (model["name"], len(model["digest"])) == ("scripted", 64)
    assert server.ask("/api/ps").json()["models"][0]["context_length"] > 0
    shown = server.ask("/api/show", {"model": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "embedding", "tools", "thinking"]
    assert server.ask("/api/show", {"model": "other"}).status == 404
    assert server.ask("/api/version").json()["version"]


def test_thinking_depends_on_the_parser_and_the_template():
    assert has_thinking("think_tags", "")
    assert has_thinking("auto", "{{ '<think>' }}")
    assert not has_thinking("auto", "{{ messages }}")
    assert not has_thinking("none", "{{ '<think>' }}")


def test_embeddings_are_those_of_the_servers_route(server):
    texts = {"model": "scripted", "input": ["hi", "ho"]}
    expected = [item["embedding"] for item in server.ask("/v1/embeddings", texts).json()["data"]]
    answer = server.ask("/api/embed", texts).json()
    assert (answer["embeddings"], answer["prompt_eval_count"]) == (expected, 4)
    single = server.ask("/api/embeddings", {"model": "scripted", "prompt": "hi"}).json()
    assert single["embedding"] == expected[0]
    length = server.ask("/api/ps").json()["models"][0]["context_length"]
    long = "".join(chr(ord("a") + index % 26) for index in range(length + 9))
    cut = server.ask("/api/embed", {"model": "scripted", "input": long}).json()
    same = server.ask("/api/embed", {"model": "scripted", "input": long[:length]}).json()
    assert cut["embeddings"] == same["embeddings"]
    assert cut["prompt_eval_count"] == length
    refused = server.ask("/api/embed", {"model": "scripted", "input": long, "truncate": False})
    assert refused.json()["error"].startswith("input[0]: the prompt is too long")
    refused = server.ask("/api/embed", {**texts, "dimensions": 100_000})
    assert refused.status == 400
    assert refused.json()["error"].startswith("dimensions: ")


@pytest.mark.parametrize("think", [None, True, "low", "max"])
def test_thoughts_are_apart(server, think):
    answer = chat(server, "think", stream=False, think=think).json()
    assert answer["message"] == {"role": "assistant", "content": "yes", "thinking": "so it is"}


def test_log_probabilities(server):
    answer = chat(server, stream=False, logprobs=True, top_logprobs=2).json()
    assert [item["token"] for item in answer["logprobs"]][:2] == ["h", "e"]
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2


def test_openapi_has_the_routes(server):
    paths = server.ask("/openapi.json").json()["paths"]
    assert {"/api/chat", "/api/generate", "/api/embed", "/api/tags", "/api/show"} <= paths.keys()


class TestPythonClient:
    @pytest.fixture
    def client(self, server):
        ollama = pytest.importorskip("ollama", reason="pip install ollama")
        return ollama.Client(host=server.url)

    def test_chat(self, client):
        options = {"temperature": 0}
        parts = list(client.chat("scripted", user("hi"), stream=True, options=options))
        assert "".join(part.message.content for part in parts) == "hello"
        answer = client.chat("scripted", user("weather"), tools=[WEATHER], options=options)
        assert answer.message.tool_calls[0].function.arguments == {"city": "Paris"}

    def test_models(self, client):
        assert [model.model for model in client.list().models] == ["scripted"]
        assert client.show("scripted").capabilities[0] == "completion"
        assert client.ps().models[0].name == "scripted"

    def test_generate_and_errors(self, client):
        answer = client.generate("scripted", "hi", options={"temperature": 0})
        assert answer.response == "hello"
        with pytest.raises(Exception, match="other") as caught:
            client.chat("other", user("hi"))
        assert caught.value.status_code == 404
