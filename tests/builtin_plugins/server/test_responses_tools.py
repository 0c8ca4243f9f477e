"""Tools of `/v1/responses` that other servers have: hosted tools and namespaces."""

import pytest
from support.delta_engine import DeltaEngine, call, typed_events
from support.fake_engine import FakeEngine, configured
from support.http_server import running

PATH = "/v1/responses"
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "mcp__sky__", "description": "x", "tools": [FUNCTION]}
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
