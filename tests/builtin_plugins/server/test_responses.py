"""`/v1/responses`, by plain requests and by OpenAI's client."""

import asyncio
import json
import typing

import jsonschema
import msgspec
import openai
import pydantic
import pytest
from openai.types import responses as sdk
from openai.types.responses import response_create_params, response_input_item_param
from support.delta_engine import DeltaEngine, answering, call, typed_events
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.builtin_plugins.server.dialects import items
from hardpoint.builtin_plugins.server.dialects.chat.logprobs import TokenLogprob
from hardpoint.builtin_plugins.server.dialects.responses import events as responses_events
from hardpoint.builtin_plugins.server.dialects.responses import input as responses_input
from hardpoint.builtin_plugins.server.dialects.responses.custom_tools import CustomTool
from hardpoint.builtin_plugins.server.dialects.responses.request import (
    FunctionTool,
    ResponsesRequest,
)
from hardpoint.errors import EngineDeadError, OverloadedError
from hardpoint.plugins import RequestError
from hardpoint.plugins.params import RequestOutputKind
from hardpoint.plugins.server import Transform

ENDED = "the engine is being restarted; send the request again"
"""The message to clients about an engine that died; the log has the details."""

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
CALLED = (
    {"reasoning": "Look ", "tokens": ["Look "]},
    {"reasoning": "it up.", "content": "One", "tokens": ["it up.", "One"]},
    {"content": " moment.", "tokens": [" moment."]},
    {"tool_calls": [call(0, "call_1", "weather")]},
    {"tool_calls": [call(0, arguments='{"place":')]},
    {"tool_calls": [call(0, arguments='"Rome"}'), call(1, "call_2", "weather", "{}")]},
    {"finish_reason": "tool_calls"},
)
"""An answer of all kinds of items, some of which share a delta."""
TWICE = ({"content": "A"}, {"tool_calls": [call(0, "call_1", "weather", "{}")]})
"""The beginning of an answer that goes on after a call."""
ENDS = {"finish_reason": "tool_calls"}
BROKEN = (
    {"content": "Wait."},
    {"tool_calls": [call(0, "call_1", "weather")]},
    {"tool_calls": [call(0, arguments='{"place":')]},
)
"""The beginning of an answer whose call breaks off."""
REST, VOID = {"tool_calls": [call(0, arguments='"Rome"}')]}, {"void_calls": (0,)}
"""The rest of the arguments, and the mark of a call that is void all the same."""


@pytest.fixture(scope="module")
def server():
    with running(DeltaEngine(config=configured())) as running_server:
        yield running_server


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def asked_of(server, **fields):
    """Return messages, parameters and other arguments that a request makes."""
    answer = server.post(PATH, {"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return server.engine.asked[-1]


def refusal(server, path=PATH, **fields):
    answer = server.post(path, {"input": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def check_stream(events):
    """Check that a stream is well formed; return its last response."""
    types = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types[:2] == ["response.created", "response.in_progress"]
    if types[-1] == "error":
        types.pop()
    assert types[-1] in ("response.completed", "response.incomplete", "response.failed")
    items, done = {}, []
    for event in events[2 : len(types) - 1]:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert index == len(items) == len(done), "an item begins before the last one is done"
            assert event["item"]["status"] == "in_progress"
            items[index] = {"id": event["item"]["id"], "text": "", "parts": 0, "ended": 0}
            continue
        item = items[index]
        half = kind == "output_item.done" and event["item"]["type"] == "function_call"
        half = half and event["item"]["status"] == "incomplete"
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["parts"] += 1
        elif kind.endswith(".delta"):
            assert event["delta"]
            assert not item["ended"]
            item["text"] += event["delta"]
        elif kind == "content_part.done":
            item["parts"] -= 1
            assert event["part"]["text"] == item["text"]
        elif kind == "output_item.done":
            assert item["parts"] == 0
            assert item["ended"] == (0 if half else 1), "half arguments are never done"
            assert event["item"]["id"] == item["id"]
            done.append(event["item"])
        else:
            assert kind.endswith(".done")
            item["ended"] += 1
            assert event["arguments" if "arguments" in kind else "text"] == item["text"]
    response = events[len(types) - 1]["response"]
    whole = [i for i in done if (i["type"], i["status"]) != ("function_call", "incomplete")]
    assert response["output"] == whole, "half calls are no part of the output"
    assert len(done) == len(items)
    return response


def streamed(server, **attributes):
    """Return the events of an answer of an engine with these attributes."""
    with answering(server, **attributes):
        return typed_events(server, PATH, {"input": "Hi", "stream": True})


def without_ids(items):
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


# Answers


def test_answers_whole(server):
    answer = server.post(PATH, {"input": "Hi", "metadata": {"run": "7"}, "store": True}).json()
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    (message,) = answer["output"]
    assert message["content"] == [
        {"type": "output_text", "text": "Hello there , friend", "annotations": [], "logprobs": []}
    ]
    assert answer["id"].startswith("resp_")
    assert message["id"].startswith("msg_")
    assert answer["metadata"] == {"run": "7"}
    assert answer["store"] is False
    assert answer["error"] is answer["incomplete_details"] is None
    assert answer["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({str(n): "" for n in range(17)}, "metadata: expected a table of length <= 16"),
        ({"k" * 65: ""}, "metadata: expected a string of length <= 64"),
        ({"k": "x" * 513}, "metadata.k: expected a string of length <= 512"),
    ],
)
def test_metadata_are_few_and_short(server, metadata, message):
    answer = server.post(PATH, {"input": "Hi", "metadata": metadata})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "deltas",
    [
        CALLED,
        ({"reasoning": "Only thoughts"}, {"finish_reason": "length"}),
        ({"content": "Half a"}, {"finish_reason": "length"}),
        ({"finish_reason": "stop"},),
        ({"content": "All at once", "finish_reason": "stop"},),
        (*TWICE, {"content": "<call>{", "finish_reason": "length"}),
        (*TWICE, {"content": "So.", "tool_calls": [call(1, "b", "weather", "{}", 2)]}, ENDS),
        ({"tool_calls": [call(0, "call_1", "weather", '{"pl')], "finish_reason": "length"},),
    ],
    ids=[
        "all",
        "reasoning",
        "length",
        "empty",
        "once",
        "cut second call",
        "text around a call",
        "cut call",
    ],
)
def test_a_stream_holds_what_a_whole_answer_does(server, deltas):
    with answering(server, deltas=deltas, num_cached=3):
        whole = server.post(PATH, {"input": "Hi", "tools": [TOOL]}).json()
        body = {"input": "Hi", "tools": [TOOL], "stream": True}
        last = check_stream(typed_events(server, PATH, body))
    assert without_ids(last["output"]) == without_ids(whole["output"])
    for name in ("status", "incomplete_details", "usage", "tools", "text", "temperature"):
        assert last[name] == whole[name]
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 3


def test_items_come_in_the_order_of_the_answer(server):
    events = streamed(server, deltas=CALLED)
    response = check_stream(events)
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Look it up."}]
    assert response["output"][1]["content"][0]["text"] == "One moment."
    assert response["output"][2]["arguments"] == '{"place":"Rome"}'
    assert response["output"][2]["call_id"] == "call_1"
    # The fake tokenizer has more tokens than the fake engine generates.
    usage = response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"]


def test_half_a_second_call_stands_after_the_first(server):
    with answering(server, deltas=(*TWICE, {"content": "<call>{", "finish_reason": "length"})):
        response = server.post(PATH, {"input": "Hi", "tools": [TOOL]}).json()
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("message", "completed"),
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]
    assert response["output"][2]["content"][0]["text"] == "<call>{"
    assert response["status"] == "incomplete"


def test_length_makes_a_response_incomplete(server):
    deltas = ({"content": "Half"}, {"finish_reason": "length", "warning": "no end"})
    response = check_stream(streamed(server, deltas=deltas))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["warning"] == "no end"


def test_an_answer_without_text_has_an_empty_one(server):
    deltas = ({"finish_reason": "stop"},)
    response = check_stream(streamed(server, deltas=deltas))
    assert response["output"][0]["content"][0]["text"] == ""


def test_text_after_a_call_is_an_item_of_its_own(server):
    deltas = (
        {"tool_calls": [call(0, "a", "weather", "{}")]},
        {"content": "Done", "reasoning": "Hm"},
        {"content": "!", "finish_reason": "tool_calls"},
    )
    response = check_stream(streamed(server, deltas=deltas))
    types = [item["type"] for item in response["output"]]
    assert types == ["function_call", "reasoning", "message"]


def test_an_error_inside_a_stream_ends_the_items_and_fails_the_response(server):
    error = EngineDeadError(ENDED)
    events = streamed(server, reasoning="Let me think", error=error, fails_after=2)
    response = check_stream(events)
    assert events[-2]["type"] == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": ENDED}
    assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "error"
    assert events[-1]["message"] == events[-1]["error"]["message"] == ENDED


def test_a_completion_that_ends_with_an_error_fails_the_response(server):
    deltas = ({"content": "Half"}, {"finish_reason": "error", "error": "plugin 'x': it raised"})
    response = check_stream(streamed(server, deltas=deltas))
    assert response["error"]["message"] == "plugin 'x': it raised"


def lagging(tokens, *parts):
    """Return deltas of a token each, with these fields."""
    return [{**part, "tokens": [token]} for token, part in zip(tokens, parts, strict=True)]


def texts_of(texts):
    return [{"content": text} if text else {} for text in texts]


ARGUMENTS = '{"a": 1}'
CALL_THEN_TEXT = (
    {"tool_calls": [call(0, "call_1", "weather")], "tokens": ["<call>"]},
    {"tool_calls": [call(0, arguments='{"a": ')], "tokens": ['{"a": ', "1}"]},
    {"tool_calls": [call(0, arguments="1}")], "tokens": ["</call>", "a", "b"]},
    {"content": "a", "tokens": ["c"]},
    {"content": "bc", "tokens": [".."]},
)


@pytest.mark.parametrize(
    ("deltas", "tokens"),
    [
        pytest.param(
            (
                {"reasoning": "Hello", "tokens": ["Hello"]},
                {"tokens": ["</think>"]},
                {"content": "Hello ", "tokens": ["Hello", " "]},
                {"content": "you", "tokens": ["you"]},
            ),
            ["Hello", " ", "you"],
            id="after reasoning",
        ),
        pytest.param(
            lagging("abcdefEND", *texts_of(["", "", *"abcdef", ""])),
            [*"abcdef"],
            id="held back for a stop string",
        ),
        pytest.param(
            lagging(["fooE", "x", "y"], *texts_of(["foo", "Ex", "y"])),
            ["fooE", "x", "y"],
            id="a part of a token is held back",
        ),
        pytest.param(
            lagging(["a", "<", "to", "b", "."], *texts_of(["a", "", "", "<tob", "."])),
            ["a", "<", "to", "b", "."],
            id="held back for a marker",
        ),
        pytest.param(
            lagging(
                ["so", "</think>", "h", "i", "!"],
                {"reasoning": "so"},
                *texts_of(["", "", "h", "i!"]),
            ),
            ["h", "i", "!"],
            id="letters of a marker",
        ),
        pytest.param(
            [
                {"reasoning": "so", "tokens": ["so", "</think>", "a", "b"]},
                {"content": "a", "tokens": ["c"]},
                {"content": "bc", "tokens": ["<end>"]},
            ],
            ["a", "b", "c"],
            id="held back since reasoning",
        ),
        pytest.param(CALL_THEN_TEXT, ["a", "b", "c"], id="held back since a call"),
        pytest.param(
            lagging(["\xc3", "\xa9", "x", "y", "."], *texts_of(["", "", "", "é", "xy"])),
            ["\xc3", "\xa9", "x", "y", "."],
            id="parts of characters",
        ),
        pytest.param(
            lagging(["a", "<hidden>", "b", "."], *texts_of(["a", "", "b", ""])),
            ["a", "<hidden>", "b", "."],
            id="a token without a text",
        ),
        pytest.param(lagging(["<end>"], {}), ["<end>"], id="no text"),
    ],
)
def test_log_probabilities_are_those_of_the_text(server, deltas, tokens):
    deltas = (*deltas, {"finish_reason": "stop", "tokens": ()})
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    with answering(server, deltas=deltas):
        whole = server.post(PATH, {"input": "Hi", **fields}).json()
        events = typed_events(server, PATH, {"input": "Hi", "stream": True, **fields})
    last = check_stream(events)
    assert without_ids(last["output"]) == without_ids(whole["output"])
    logprobs = whole["output"][-1]["content"][0]["logprobs"]
    assert [position["token"] for position in logprobs] == tokens
    for position in logprobs:
        token = position["token"]
        (top,) = position["top_logprobs"]
        assert top == {"token": token, "logprob": -0.5, "bytes": [*token.encode()]}


@pytest.mark.parametrize(
    ("end", "status"),
    [
        # As the engine gives them: the text of a call that is void is content.
        (
            ({"content": '<call>{"place":oops'}, {"content": " So.", "finish_reason": "stop"}),
            "completed",
        ),
        (({"content": '<call>{"place":', "finish_reason": "length"},), "incomplete"),
        ((REST, {"content": "oops", **VOID}, {**VOID, "finish_reason": "stop"}), "completed"),
        (({**REST, "content": "oops", **VOID, "finish_reason": "length"},), "incomplete"),
        (({"reasoning": "Hm"}, {"content": "So.", "finish_reason": "stop"}), "completed"),
        (({"finish_reason": "length"},), "incomplete"),
    ],
    ids=["malformed", "cut", "void", "void and cut", "reasoning", "no text"],
)
def test_a_broken_call_is_never_completed(server, end, status):
    events = streamed(server, deltas=(*BROKEN, *end))
    response = check_stream(events)
    assert response["status"] == status
    calls = [e["item"] for e in events if e.get("item", {}).get("type") == "function_call"]
    assert [item["status"] for item in calls] == ["in_progress", "incomplete"]
    assert "response.function_call_arguments.done" not in [event["type"] for event in events]
    assert "function_call" not in [item["type"] for item in response["output"]]


def test_a_call_after_a_broken_one_is_completed(server):
    after = call(1, "call_2", "weather", '{"place": "Rome"}')
    deltas = (*BROKEN, {"content": "oops"}, {"tool_calls": [after], "finish_reason": "tool_calls"})
    events = streamed(server, deltas=deltas)
    *_, last = check_stream(events)["output"]
    assert (last["call_id"], last["status"]) == ("call_2", "completed")
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]


def test_a_call_that_is_not_finished_when_the_engine_fails_is_incomplete(server):
    deltas = ({"tool_calls": [call(0, "call_1", "weather", "{}")]}, {"content": "x"})
    events = streamed(server, deltas=deltas, error=EngineDeadError(ENDED), fails_after=1)
    check_stream(events)
    (item,) = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert item["status"] == "incomplete"


def test_the_rest_of_a_call_comes_before_the_text_after_it(server):
    """Outputs that a slow reader gets together are one output."""
    rest = {"content": "Done", "tool_calls": [call(0, arguments='"Rome"}')]}
    response = check_stream(streamed(server, deltas=(*BROKEN, rest, {"finish_reason": "stop"})))
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "message"]
    assert response["output"][1]["arguments"] == '{"place":"Rome"}'


def test_large_events_at_the_end_leave_other_requests_their_turn(monkeypatch):
    monkeypatch.setattr(items, "_LARGE", 1000)
    words = [f"word{i} " for i in range(100)]
    engine = DeltaEngine(
        deltas=(
            *({"content": w, "tokens": [w]} for w in words),
            {"finish_reason": "stop", "tokens": ()},
        )
    )
    encoded = []
    encode = msgspec.json.Encoder().encode

    class Counting:
        def encode(self, value):
            encoded.extend(positions_in(value))
            return encode(value)

    monkeypatch.setattr(responses_events.msgspec.json, "Encoder", Counting)

    async def read():
        turns, seen = 0, []

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        response = responses_events.ResponseObject(
            id="r",
            created_at=0,
            model="m",
            parallel_tool_calls=True,
            reasoning={},
            temperature=1.0,
            text={},
            tool_choice="auto",
            tools=[],
            top_p=1.0,
        )
        stream = responses_events.ResponseAnswer(engine.tokenizer, response, 1)
        params = engine.model.default_sampling_params()
        params = msgspec.structs.replace(params, logprobs=1, output_kind=RequestOutputKind.DELTA)
        async for written in stream.events(engine.generate("Hi", params)):
            seen.append((turns, written))
        counting.cancel()
        return seen

    seen = asyncio.run(read())
    types = ("output_text.done", "content_part.done", "output_item.done", "completed")
    last = seen[-4:]
    for (_, written), type_ in zip(last, types, strict=True):
        assert written.startswith(f"event: response.{type_}\n".encode())
        assert written.count(b"event: ") == 1
        assert written.count(b'"token":"word') == 2 * len(words), "each, and the likeliest"
    assert len({turn for turn, _ in last}) == 4, "others had a turn between each two"
    assert len(encoded) == len(words), "each position is encoded once"


def positions_in(value):
    """Return the positions with log-probabilities in a value to encode."""
    if isinstance(value, TokenLogprob):
        return [value]
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    parts = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, dict | list)
    return [position for part in parts for position in positions_in(part)] if is_nested else []


def test_transforms_see_each_event():
    def mark(call, event):
        return {**event, "seen": call.path}

    deltas = ({"content": 'data: {"a": 1}', "finish_reason": "stop"},)
    extension = ("marks", Transform(event=mark))
    engine = DeltaEngine(deltas=deltas, config=configured(), extensions=(extension,))
    with running(engine) as server:
        events = typed_events(server, PATH, {"input": "Hi", "stream": True})
    assert check_stream(events)["output"][0]["content"][0]["text"] == 'data: {"a": 1}'
    assert {event["seen"] for event in events} == {PATH}


# Requests


def test_items_become_a_conversation(server):
    messages, _, extras = asked_of(
        server,
        instructions="Be brief.",
        tools=[TOOL],
        input=[
            {"role": "developer", "content": "Answer in English."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "I look."}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "Sun"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "Rain"}],
            },
            {"role": "assistant", "content": "Sun."},
            {"role": "assistant", "content": "Or rain."},
        ],
    )
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "assistant",
    ]
    assert messages[0]["content"] == "Be brief.\n\nAnswer in English."
    assert messages[2]["reasoning"] == messages[2]["reasoning_content"] == "I look."
    assert messages[2]["content"] == "Wait."
    assert [called["id"] for called in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[4] == {
        "role": "tool",
        "tool_call_id": "c2",
        "name": "weather",
        "content": "Rain",
    }
    assert extras["tools"] == [
        {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
    ]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_allowed(server, mode):
    choice = {
        "type": "allowed_tools",
        "mode": mode,
        "tools": [{"type": "function", "name": "weather"}],
    }
    answer = server.post(
        PATH, {"input": "Hi", "tools": [TOOL, {**TOOL, "name": "b"}], "tool_choice": choice}
    ).json()
    assert answer["tool_choice"] == choice
    assert [tool["name"] for tool in answer["tools"]] == ["weather", "b"]
    _, _, extras = server.engine.asked[-1]
    assert [tool["function"]["name"] for tool in extras["tools"]] == ["weather"]
    assert extras["tool_choice"] == mode


def keys_of(type_):
    return set(typing.get_type_hints(type_))


def fields_of(struct):
    return {field.encode_name for field in msgspec.structs.fields(struct)} | {
        struct.__struct_config__.tag_field or "type"
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
        (sdk.FunctionToolParam, FunctionTool),
        (sdk.EasyInputMessageParam, responses_input.MessageItem),
        (response_input_item_param.Message, responses_input.MessageItem),
        (sdk.ResponseOutputMessageParam, responses_input.MessageItem),
        (sdk.ResponseInputTextParam, responses_input.InputText),
        (sdk.ResponseOutputTextParam, responses_input.AssistantText),
        (sdk.ResponseOutputRefusalParam, responses_input.Refusal),
        (sdk.ResponseReasoningItemParam, responses_input.ReasoningItem),
        (sdk.ResponseFunctionToolCallParam, responses_input.FunctionCallItem),
        (response_input_item_param.FunctionCallOutput, responses_input.FunctionOutputItem),
        (sdk.CustomToolParam, CustomTool),
        (sdk.ResponseCustomToolCallParam, responses_input.CustomCallItem),
        (sdk.ResponseCustomToolCallOutputParam, responses_input.CustomOutputItem),
    ],
    ids=lambda type_: type_.__name__,
)
def test_every_field_of_openais_client_is_known(theirs, ours):
    known = fields_of(ours) | {*getattr(ours, "ignored", ()), *getattr(ours, "refused", ())}
    assert keys_of(theirs) - known == set()


def test_every_item_of_openais_client_is_known():
    known = set(responses_input.REFUSED_ITEMS)
    known |= {item.__struct_config__.tag for item in typing.get_args(responses_input.InputItem)}
    items = typing.get_args(response_input_item_param.ResponseInputItemParam)
    hints = [typing.get_type_hints(item)["type"] for item in items]
    types = {name for hint in hints for name in literals(hint)}
    assert "function_call" in types
    assert types - known == set()


def literals(hint):
    """Return the texts of the literals in a type."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return {name for part in typing.get_args(hint) for name in literals(part)}


def test_the_document_lets_messages_be_without_a_type(server):
    document = server.client.get("/openapi.json").json()
    schema = {"$ref": "#/components/schemas/ResponsesRequest", **document}
    item = {"role": "user", "content": "Hi"}
    jsonschema.validate({"input": [item]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"input": [{"role": "user"}]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"input": [{"call_id": "c", "output": "x"}]}, schema)


def test_errors_of_the_engine_name_the_fields_of_the_route(server):
    error = RequestError("tools[0].function.parameters.type: expected object")
    with answering(server, error=error):
        answer = server.post(PATH, {"input": "Hi"}).json()["error"]
    assert answer["param"] == "tools[0].parameters.type"
    assert answer["message"] == "tools[0].parameters.type: expected object"


def test_unknown_fields_may_be_left_out():
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "shade": 1}]}
    with running(FakeEngine(config=configured(unknown_fields="warn"))) as server:
        messages, _, _ = asked_of(server, input=[item], reasoning={"deep": True})
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_no_response_is_stored(server, method):
    answer = server.client.request(method, f"{PATH}/resp_1", json={})
    assert answer.status_code == 404
    assert "no response is stored" in answer.json()["error"]["message"]


# OpenAI's client


def test_client_reads_a_whole_answer(server):
    response = client_of(server).responses.create(model=None, input="Hi")
    assert response.output_text == "Hello there , friend"
    assert response.usage.output_tokens == 4


def test_client_accumulates_a_stream_and_sends_its_items_back(server):
    tools = [{**TOOL, "strict": False}]
    with answering(server, deltas=CALLED):
        client = client_of(server)
        name = server.service.names[0]
        with client.responses.stream(model=name, input="Hi", tools=tools) as stream:
            events = list(stream)
            final = stream.get_final_response()
        texts = [e for e in events if e.type == "response.output_text.delta"]
        assert texts[-1].snapshot == "One moment." == final.output_text
        called = final.output[2]
        assert json.loads(called.arguments) == {"place": "Rome"}
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "Sun"}
            for item in final.output[2:]
        ]
        client.responses.create(
            model=name, input=[{"role": "user", "content": "Hi"}, *final.output, *results]
        )
        messages = server.engine.asked[-1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning"] == "Look it up."
    assert messages[1]["content"] == "One moment."
    assert messages[1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"place":"Rome"}',
    }


def test_client_parses_structured_text(server):
    class City(pydantic.BaseModel):
        name: str

    deltas = ({"content": '{"name":'}, {"content": '"Rome"}', "finish_reason": "stop"})
    with answering(server, deltas=deltas):
        name = server.service.names[0]
        parsed = client_of(server).responses.parse(model=name, input="Hi", text_format=City)
        assert parsed.output_parsed == City(name="Rome")
        structured = server.engine.asked[-1][1].structured
    assert structured.json["properties"]["name"]["type"] == "string"
    assert not structured.lenient


def test_client_reads_an_incomplete_stream(server):
    deltas = ({"content": "Half"}, {"finish_reason": "length"})
    with answering(server, deltas=deltas):
        name = server.service.names[0]
        with client_of(server).responses.create(model=name, input="Hi", stream=True) as stream:
            last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == "Half"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("top_k: expected more"), openai.BadRequestError),
        (OverloadedError("too many requests wait"), openai.RateLimitError),
        (EngineDeadError(ENDED), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_client_raises_its_errors(server, error, expected, stream):
    with (
        answering(server, error=error),
        pytest.raises(expected, match=str(error)),
    ):
        client_of(server).responses.create(model=None, input="Hi", stream=stream)


def test_client_raises_an_error_inside_a_stream(server):
    error = EngineDeadError(ENDED)
    seen = []
    with answering(server, error=error, fails_after=1):
        stream = client_of(server).responses.create(model=None, input="Hi", stream=True)
        with pytest.raises(openai.APIError, match=ENDED):
            seen.extend(event.type for event in stream)
    assert seen[-1] == "response.failed"


def test_client_knows_a_model_that_is_not_there(server):
    with pytest.raises(openai.NotFoundError, match="model: expected"):
        client_of(server).responses.create(model="other", input="Hi")
    with pytest.raises(openai.NotFoundError, match="no response is stored"):
        client_of(server).responses.retrieve("resp_1")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "hi", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
def test_wrong_bodies_of_input_tokens_are_named(server, fields, param):
    response = server.post(f"{PATH}/input_tokens", fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_input_tokens_are_counted_without_a_store(server):
    body = {"input": "say abc", "max_output_tokens": 1}
    counted = server.post(f"{PATH}/input_tokens", body).json()
    assert counted["input_tokens"] == server.post(PATH, body).json()["usage"]["input_tokens"]
