"""Unknown fields of requests: ignored, listed, logged and counted; near misses are errors."""

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import user

from hardpoint.builtin_plugins.server.access.counts import Counts
from hardpoint.builtin_plugins.server.operations.ignored_fields import (
    IgnoredFieldLog,
    IgnoredFields,
    is_near_miss,
)

HEADER = "x-hardpoint-ignored-fields"
CHAT = "/v1/chat/completions"
ROUTES = [
    (CHAT, {"messages": user("hi")}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/messages", {"messages": user("hi"), "max_tokens": 3}),
    ("/v1/responses", {"input": "hi"}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3]}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/score", {"text_1": "hi", "text_2": "ho"}),
    ("/v1/rerank", {"query": "hi", "documents": ["ho"]}),
    ("/v1/classify", {"input": "hi"}),
    ("/pooling", {"input": "hi"}),
]


@pytest.fixture(scope="module")
def fake():
    with running(FakeEngine(config=configured())) as server:
        yield server


@pytest.fixture(scope="module")
def strict():
    with running(FakeEngine(config=configured(unknown_fields="error"))) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_unknown_fields_are_ignored_and_listed(fake, path, body):
    response = fake.post(path, {**body, "wherefore": 1, "xyz_mode": {"a": 2}})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "wherefore, xyz_mode"
    assert HEADER not in fake.post(path, body).headers


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_unknown_fields_can_be_errors(strict, path, body):
    response = strict.post(path, {**body, "wherefore": 1})
    assert response.status_code == 400
    assert "wherefore: unknown field" in response.text


THINKING = [
    (CHAT, {"messages": user("hi")}, "enable_thinking", True),
    (CHAT, {"messages": user("hi")}, "enable_thinking", False),
    (CHAT, {"messages": user("hi")}, "thinking", {"type": "disabled"}),
    ("/v1/messages", {"messages": user("hi"), "max_tokens": 3}, "enable_thinking", True),
    ("/v1/responses", {"input": "hi"}, "enable_thinking", True),
    ("/tokenize", {"messages": user("hi")}, "enable_thinking", True),
    ("/v1/messages/count_tokens", {"messages": user("hi")}, "enable_thinking", True),
]


def without_variable(**server):
    """Return an engine with a chat template without a variable for thinking."""
    engine = FakeEngine(config=configured(**server))
    engine.tokenizer.chat_template = "{{ messages }}"
    return engine


@pytest.mark.parametrize(("path", "body", "name", "value"), THINKING)
@pytest.mark.parametrize("mode", ["warn", "error"])
def test_fields_for_thinking_need_a_variable_of_the_template(mode, path, body, name, value):
    with running(without_variable(unknown_fields=mode)) as server:
        response = server.post(path, {**body, name: value})
        if mode == "error":
            assert response.status_code == 400
            assert f"{name}: not supported: the model's chat template" in response.text
            return
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == name


def test_a_budget_for_thinking_is_not_ignored_with_its_type():
    with running(without_variable()) as server:
        thinking = {"type": "enabled", "budget_tokens": 5}
        response = server.post(CHAT, {"messages": user("hi"), "thinking": thinking})
        assert response.headers[HEADER] == "thinking"
        assert server.engine.asked[-1][1].thinking_token_budget == 5


def test_sampling_parameters_of_a_count_are_unknown(fake, strict):
    path, body = "/v1/messages/count_tokens", {"messages": user("hi"), "top_k": 3}
    assert fake.post(path, body).headers[HEADER] == "top_k"
    response = strict.post(path, body)
    assert response.status_code == 400
    assert "top_k: unknown field" in response.text


@pytest.mark.parametrize("name", ["temprature", "max_token", "tmeperature", "modle"])
def test_near_misses_are_errors(fake, name):
    response = fake.post(CHAT, {"messages": user("hi"), "wherefore": 1, name: 1})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{name}: unknown field (did you mean")


@pytest.mark.parametrize("stream", [False, True])
def test_fields_of_messages_are_ignored_always(strict, stream):
    messages = [{**user(text)[0], "rol": 1, "shade": 2} for text in ("a", "b")]
    parts = [{"type": "text", "text": "c", "tex": 1}]
    messages.append({"role": "user", "content": parts})
    response = strict.post(CHAT, {"messages": messages, "stream": stream})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "messages[].rol, messages[].shade"


def test_items_of_responses_and_blocks_of_messages_are_ignored(strict):
    part = {"type": "input_text", "text": "Hi", "shade": 1}
    item = {"type": "message", "role": "user", "content": [part], "phase_x": "y"}
    assert strict.post("/v1/responses", {"input": [item]}).status_code == 200
    block = {"type": "text", "text": "Hi", "shade": 1}
    tool = {"name": "f", "input_schema": {"type": "object"}, "eager_x": True}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 3, "tools": [tool]}
    response = strict.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "messages[].content[].shade, tools[].eager_x"


def test_fields_of_chat_tools_are_ignored_always(strict):
    function = {"name": "f", "parameters": {"type": "object"}, "returns": {}}
    tool = {"type": "function", "function": function, "strict": True, "cache_control": {}}
    for path in (CHAT, "/tokenize"):
        response = strict.post(path, {"messages": user("hi"), "tools": [tool]})
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == "tools[].strict, tools[].cache_control"


def test_arguments_of_plugins_stay_strict(server):
    response = server.post(CHAT, {"messages": user("hi"), "plugin_args": {"zz": {"a": 1}}})
    assert response.status_code == 400
    assert "plugin_args.zz" in response.text


def test_hostile_names_are_escaped_and_bounded(fake):
    names = ["x\r\nset-cookie: a=b", 'y,"\\', "\u20ac" * 10, "z" * 500]
    response = fake.post(CHAT, {"messages": user("hi"), **dict.fromkeys(names, 1)})
    assert response.status_code == 200, response.text
    assert "set-cookie" not in response.headers
    listed = response.headers[HEADER].split(", ")
    assert len(listed) == len(names)
    assert max(map(len, listed)) <= 64
    assert listed[1] == "y\\x2c\\x22\\x5c"
    many = {f"w{index:04}xyz": 1 for index in range(50)}
    response = fake.post(CHAT, {"messages": user("hi"), **many})
    assert len(response.headers[HEADER].split(", ")) == 20


def test_each_field_is_logged_once_and_counted(caplog):
    with running(FakeEngine(config=configured())) as server:
        for _ in range(3):
            messages = [{**user("x")[0], "shade_q": 1}, {**user("y")[0], "shade_q": 1}]
            server.post(CHAT, {"messages": messages, "wherefore": 1})
        metrics = server.client.get("/metrics").text
    assert caplog.text.count("wherefore") == 1
    assert caplog.text.count("shade_q") == 1
    assert 'hardpoint:http_ignored_fields_total{field="wherefore"} 3.0' in metrics
    assert 'hardpoint:http_ignored_fields_total{field="messages[].shade_q"} 3.0' in metrics


def test_names_in_log_and_counters_are_bounded(caplog):
    counts = Counts()
    log = IgnoredFieldLog(counts)
    for start in range(0, 1500, 100):
        fields = IgnoredFields()
        for index in range(start, start + 100):
            fields.add(f"w{index}")
        log.record(fields)
    counted = dict(counts.items("ignored "))
    assert len(counted) == 1001
    assert counted["(other)"] == 500
    assert len(caplog.records) == 10


def test_too_many_unknown_fields_are_an_error(fake):
    many = {f"w{index:04}xyz": 1 for index in range(1001)}
    response = fake.post(CHAT, {"messages": user("hi"), **many})
    assert response.status_code == 400
    assert "w1000xyz: unknown field" in response.text


@pytest.mark.parametrize(
    ("name", "known", "is_near"),
    [
        ("temprature", "temperature", True),
        ("tmeperature", "temperature", True),
        ("temp", "temperature", False),
        ("emperature", "temperature", False),
        ("stpo", "stop", True),
        ("stop", "stop", False),
        ("seedabc", "seed", False),
    ],
)
def test_near_misses(name, known, is_near):
    assert is_near_miss(name, known) is is_near
