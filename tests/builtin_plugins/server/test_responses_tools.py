"""Tools of `/v1/responses` besides functions: hosted and custom tools, and namespaces."""

import json

import openai
import pytest
from openai.types.responses import ResponseCustomToolCall
from support.delta_engine import DeltaEngine, call, typed_events
from support.fake_engine import FakeEngine, configured
from support.http_server import running

PATH = "/v1/responses"
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "mcp__sky__", "description": "x", "tools": [FUNCTION]}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edit a file."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
HOSTED = {"type": "web_search", "external_web_access": True}


@pytest.fixture(scope="module")
def fake():
    with running(FakeEngine(config=configured())) as server:
        yield server


def names_of(server):
    return [tool["function"]["name"] for tool in server.engine.asked[-1][2]["tools"] or ()]


def test_hosted_tools_are_left_out_with_a_warning(fake):
    body = {"input": "hi", "tools": [HOSTED, FUNCTION], "client_metadata": {"a": "b"}}
    response = fake.post(PATH, body)
    assert response.status_code == 200, response.text
    assert response.headers["x-hardpoint-ignored-fields"] == "tools[].web_search"
    assert names_of(fake) == ["weather"]


def test_hosted_tools_can_be_rejected():
    with running(FakeEngine(config=configured(hosted_tools="reject"))) as server:
        response = server.post(PATH, {"input": "hi", "tools": [HOSTED]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].type"


def test_a_choice_of_a_hosted_tool_is_an_error(fake):
    body = {"input": "hi", "tools": [HOSTED], "tool_choice": {"type": "web_search"}}
    assert fake.post(PATH, body).json()["error"]["param"] == "tool_choice.type"


def test_functions_of_a_namespace_have_flat_names(fake):
    other = {**NAMESPACE, "name": "sea"}
    response = fake.post(PATH, {"input": "hi", "tools": [NAMESPACE, other, FUNCTION]})
    assert response.status_code == 200, response.text
    assert names_of(fake) == ["mcp__sky__weather", "sea__weather", "weather"]


def test_a_call_of_a_namespace_comes_back_with_its_flat_name(fake):
    item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": "hi"},
        {**item, "namespace": "mcp__sky__"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    response = fake.post(PATH, {"input": items, "tools": [NAMESPACE]})
    assert response.status_code == 200, response.text
    messages = fake.engine.asked[-1][0]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "mcp__sky__weather"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_names_its_namespace(stream):
    begun = {"tool_calls": [call(0, "call_1", "mcp__sky__weather", "{}")]}
    engine = DeltaEngine(deltas=(begun, {"finish_reason": "tool_calls"}), config=configured())
    body = {"input": "hi", "tools": [NAMESPACE], "stream": stream}
    with running(engine) as server:
        if stream:
            events = typed_events(server, PATH, body)
            items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        else:
            items = server.post(PATH, body).json()["output"]
    (item,) = items
    assert (item["namespace"], item["name"]) == ("mcp__sky__", "weather")


def test_a_custom_tool_is_a_function_with_one_text(fake):
    response = fake.post(PATH, {"input": "hi", "tools": [CUSTOM]})
    assert response.status_code == 200, response.text
    assert "x-hardpoint-ignored-fields" not in response.headers
    assert response.json()["tools"] == [CUSTOM]
    (tool,) = fake.engine.asked[-1][2]["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("patch", "Edit a file.")
    assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string"}}


def test_a_grammar_of_a_custom_tool_is_described_and_listed_as_not_enforced(fake):
    tools = [{**CUSTOM, "format": LARK}, {**NAMESPACE, "tools": [{**CUSTOM, "format": LARK}]}]
    response = fake.post(PATH, {"input": "hi", "tools": tools})
    assert response.status_code == 200, response.text
    listed = response.headers["x-hardpoint-ignored-fields"]
    assert listed == "tools[].format, tools[].tools[].format"
    for tool in fake.engine.asked[-1][2]["tools"]:
        assert tool["function"]["description"].endswith(LARK["definition"])
    assert names_of(fake) == ["patch", "mcp__sky__patch"]


@pytest.mark.parametrize("name", ["patch", "other"])
def test_a_custom_tool_can_be_required(fake, name):
    body = {"input": "hi", "tools": [CUSTOM], "tool_choice": {"type": "custom", "name": name}}
    response = fake.post(PATH, body)
    if name == "patch":
        assert fake.engine.asked[-1][2]["tool_choice"] == {"name": "patch"}
        assert response.json()["tool_choice"] == {"type": "custom", "name": "patch"}
    else:
        assert response.json()["error"]["param"] == "tool_choice.name"


def test_a_call_of_a_custom_tool_and_its_result_come_back(fake):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'say "x"\n'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    response = fake.post(PATH, {"input": items, "tools": [CUSTOM]})
    assert response.status_code == 200, response.text
    _, called, result = fake.engine.asked[-1][0]
    (function,) = [tool_call["function"] for tool_call in called["tool_calls"]]
    assert function["name"] == "patch"
    assert json.loads(function["arguments"]) == {"input": 'say "x"\n'}
    assert (result["role"], result["name"], result["content"]) == ("tool", "patch", "done")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (['{"input": "a \\"b', '\\" \\u20ac"}'], 'a "b" \u20ac'),
        (['{"patch": ', '"a"}'], '{"patch": "a"}'),
    ],
)
@pytest.mark.parametrize("namespace", [None, "sky"])
def test_a_call_of_a_custom_tool_has_its_text(arguments, text, namespace):
    name = "sky__patch" if namespace else "patch"
    first, second = arguments
    deltas = (
        {"tool_calls": [call(0, "call_1", name, first)]},
        {"tool_calls": [call(0, None, None, second)]},
        {"finish_reason": "tool_calls"},
    )
    tools = [{"type": "namespace", "name": "sky", "tools": [CUSTOM]}] if namespace else [CUSTOM]
    body = {"input": "hi", "tools": tools, "stream": True}
    with running(DeltaEngine(deltas=deltas, config=configured())) as server:
        events = typed_events(server, PATH, body)
    by_type = {event["type"]: event for event in events}
    assert by_type["response.output_item.added"]["item"]["input"] == ""
    assert by_type["response.custom_tool_call_input.delta"]["delta"] == text
    assert by_type["response.custom_tool_call_input.done"]["input"] == text
    (item,) = by_type["response.completed"]["response"]["output"]
    assert item == by_type["response.output_item.done"]["item"]
    assert item["id"].startswith("ctc_")
    shown = {name: item.get(name) for name in ("type", "call_id", "name", "input", "namespace")}
    assert shown == {
        "type": "custom_tool_call",
        "call_id": "call_1",
        "name": "patch",
        "input": text,
        "namespace": namespace,
    }
    assert not [event for event in by_type if "function_call" in event]


def test_a_whole_answer_has_the_call_of_a_custom_tool():
    begun = {"tool_calls": [call(0, "call_1", "patch", '{"input": "a"}')]}
    engine = DeltaEngine(deltas=(begun, {"finish_reason": "tool_calls"}), config=configured())
    with running(engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        response = client.responses.create(model="smollm2", input="hi", tools=[CUSTOM])
    (item,) = response.output
    assert isinstance(item, ResponseCustomToolCall)
    assert (item.name, item.input) == ("patch", "a")


def test_a_broken_call_of_a_custom_tool_is_not_in_the_output():
    begun = {"tool_calls": [call(0, "call_1", "patch", '{"input": "a')]}
    engine = DeltaEngine(deltas=(begun, {"finish_reason": "length"}), config=configured())
    with running(engine) as server:
        events = typed_events(server, PATH, {"input": "hi", "tools": [CUSTOM], "stream": True})
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (items[0]["type"], items[0]["status"]) == ("custom_tool_call", "incomplete")
    assert "custom_tool_call" not in [item["type"] for item in events[-1]["response"]["output"]]
    assert not [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
