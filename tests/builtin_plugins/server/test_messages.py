"""`/v1/messages` and `/v1/messages/count_tokens`, by plain requests and by Anthropic's client."""

import json
import typing

import anthropic
import msgspec
import pytest
from anthropic import types as sdk
from anthropic.types import message_create_params
from support.async_requests import config
from support.delta_engine import DeltaEngine, answering, call, typed_events, typed_events_of
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_server import running

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.server.dialects import messages_input
from hardpoint.builtin_plugins.server.dialects.messages import (
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
)
from hardpoint.builtin_plugins.server.errors import AnswerError, error_body
from hardpoint.errors import EngineDeadError, OverloadedError
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Authenticator, Client
from hardpoint.testing import write_scripted_model

ENDED = "the engine is being restarted; send the request again"
"""The message to clients about an engine that died; the log has the details."""

PATH = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
CALLED = (
    {"reasoning": "Look "},
    {"reasoning": "it up.", "content": "One"},
    {"content": " moment."},
    {"tool_calls": [call(0, "call_1", "weather")]},
    {"tool_calls": [call(0, arguments='{"place":')]},
    {"tool_calls": [call(0, arguments='"Rome"}'), call(1, "call_2", "weather", "{}")]},
    {"finish_reason": "tool_calls"},
)
"""An answer of all kinds of blocks, some of which share a delta."""
REST, VOID = {"tool_calls": [call(0, arguments='"Rome"}')]}, {"void_calls": (0,)}
"""The rest of the arguments, and the mark of a call that is void all the same."""
MORE = (
    {"content": "A"},
    {"tool_calls": [call(0, "call_1", "weather", "{}")]},
    {"content": "So.", "tool_calls": [call(1, "call_2", "weather", "{}", 2)]},
    {"finish_reason": "tool_calls"},
)
"""Text before, between and after calls."""


@pytest.fixture(scope="module")
def server():
    with running(DeltaEngine(config=configured())) as running_server:
        yield running_server


def client_of(server, **kwargs):
    return anthropic.Anthropic(base_url=server.url, max_retries=0, **({"api_key": "none"} | kwargs))


def body(**fields):
    return {"messages": HI, "max_tokens": 100, **fields}


def asked_of(server, **fields):
    """Return messages, parameters and other arguments that a request makes."""
    answer = server.post(PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    return server.engine.asked[-1]


def refusal(server, path=PATH, **fields):
    answer = server.post(path, body(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    return answer.json()["error"]["message"]


def check_stream(events):
    """Check that a stream is well formed; return the blocks and the last delta of the message."""
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["content"] == []
    blocks, is_open = [], False
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                add_delta(blocks[-1], event["delta"])
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(blocks[-1].pop("json", "{}"))
                is_open = False
            case _:
                assert not is_open
    if events[-1]["type"] == "error":
        return blocks, None
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return blocks, events[-2]


def add_delta(block, delta):
    match delta["type"]:
        case "text_delta":
            assert delta["text"]
            block["text"] += delta["text"]
        case "thinking_delta":
            assert delta["thinking"]
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            assert block["type"] == "tool_use"
            block["json"] = block.get("json", "") + delta["partial_json"]
        case _:
            assert delta == {"type": "signature_delta", "signature": ""}
            assert block["type"] == "thinking"


# Answers


def test_answers_whole(server):
    answer = server.post(PATH, body()).json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": server.service.names[0],
        "content": [{"type": "text", "text": "Hello there , friend"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 9,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    }


@pytest.mark.parametrize(
    ("deltas", "reason"),
    [
        (CALLED, "tool_use"),
        (({"reasoning": "Only thoughts"}, {"finish_reason": "length"}), "max_tokens"),
        (({"content": "Half a"}, {"finish_reason": "length", "warning": "cut"}), "max_tokens"),
        (({"finish_reason": "stop"},), "end_turn"),
        (({"content": "At once", "finish_reason": "stop"},), "end_turn"),
        (MORE, "tool_use"),
        (({"content": "A", "finish_reason": "stop", "stop_reason": "B"},), "stop_sequence"),
        (({"content": "A", "finish_reason": "stop", "stop_reason": 7},), "end_turn"),
        (({"content": "A", "finish_reason": "timeout"},), "timeout"),
    ],
    ids=[
        "all",
        "thinking",
        "length",
        "empty",
        "once",
        "text around a call",
        "stop",
        "stop token",
        "timeout",
    ],
)
def test_a_stream_holds_what_a_whole_answer_does(server, deltas, reason):
    with answering(server, deltas=deltas, num_cached=3):
        fields = body(tools=[TOOL], max_tokens=len(deltas))
        whole = server.post(PATH, fields).json()
        events = typed_events(server, PATH, {**fields, "stream": True})
    blocks, last = check_stream(events)
    assert blocks == whole["content"]
    assert whole["stop_reason"] == reason
    assert last["delta"]["stop_reason"] == reason
    assert last["delta"]["stop_sequence"] == whole["stop_sequence"]
    assert last["delta"].get("warning") == whole.get("warning")
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["input_tokens"] == 6
    assert whole["usage"]["cache_read_input_tokens"] == 3
    assert events[0]["message"]["usage"]["input_tokens"] == 6


def test_blocks_come_in_the_order_of_the_answer(server):
    with answering(server, deltas=CALLED):
        answer = server.post(PATH, body(tools=[TOOL])).json()
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Look it up.", "signature": ""},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"place": "Rome"}},
        {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
    ]
    # The fake tokenizer has more tokens than the fake engine generates.
    usage = answer["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": usage["output_tokens"]}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        # As the engine gives them: the text of a call that is void is content.
        (({"content": '<call>{"place":oops'}, {"finish_reason": "stop"}), "end_turn"),
        (({"content": '<call>{"place":', "finish_reason": "length"},), "max_tokens"),
        ((REST, {"content": "oops", **VOID}, {**VOID, "finish_reason": "stop"}), "end_turn"),
        (({**REST, "content": "oops", **VOID, "finish_reason": "length"},), "max_tokens"),
        (({"finish_reason": "length"},), "max_tokens"),
        (({"reasoning": "Hm", "finish_reason": "stop"},), "end_turn"),
    ],
    ids=["malformed", "cut", "void", "void and cut", "no text", "thinking"],
)
def test_half_a_call_is_no_block(server, end, reason):
    deltas = (
        {"content": "Wait."},
        {"tool_calls": [call(0, "call_1", "weather")]},
        {"tool_calls": [call(0, arguments='{"place":')]},
        *end,
    )
    with answering(server, deltas=deltas):
        fields = body(tools=[TOOL], max_tokens=len(deltas))
        whole = server.post(PATH, fields).json()
        blocks, last = check_stream(typed_events(server, PATH, {**fields, "stream": True}))
    assert "tool_use" not in [block["type"] for block in [*blocks, *whole["content"]]]
    assert last["delta"]["stop_reason"] == whole["stop_reason"] == reason
    joined = "".join(block.get("text", "") for block in whole["content"])
    assert "".join(block.get("text", "") for block in blocks) == joined
    assert joined.startswith("Wait.")


def test_the_rest_of_a_call_comes_before_the_text_after_it(server):
    """Outputs that a slow reader gets together are one output."""
    deltas = (
        {"tool_calls": [call(0, "call_1", "weather", '{"place":')]},
        {
            "content": "Done",
            "tool_calls": [call(0, arguments='"Rome"}'), call(1, "b", "c", "{}", 4)],
        },
        {"finish_reason": "tool_calls"},
    )
    with answering(server, deltas=deltas):
        blocks, _ = check_stream(typed_events(server, PATH, body(stream=True)))
    assert [block.get("input", block.get("text")) for block in blocks] == [
        {"place": "Rome"},
        "Done",
        {},
    ]


def test_an_error_ends_a_stream_without_the_call_that_was_held_back(server):
    deltas = ({"tool_calls": [call(0, "call_1", "weather", "{}")]}, {"content": "x"})
    with answering(server, deltas=deltas, error=EngineDeadError(ENDED), fails_after=1):
        blocks, last = check_stream(typed_events(server, PATH, body(stream=True)))
    assert blocks == []
    assert last is None


def test_a_full_context_is_distinguished_from_max_tokens(server):
    deltas = ({"content": "Half", "finish_reason": "length"},)
    with answering(server, deltas=deltas):
        answer = server.post(PATH, body(max_tokens=2)).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"


def test_an_error_inside_a_stream_ends_the_block(server):
    error = EngineDeadError(ENDED)
    with answering(server, error=error, fails_after=2):
        events = typed_events(server, PATH, body(stream=True))
    blocks, last = check_stream(events)
    assert last is None
    assert [block["text"] for block in blocks] == ["Hello there"]
    assert events[-1]["error"] == {"type": "overloaded_error", "message": ENDED}


def test_a_stream_that_waits_sends_pings():
    engine = HeldEngine(text="Hello", config=configured(heartbeat_seconds=0.1))
    with running(engine) as server:
        _, text = server.held_stream(PATH, body(stream=True), '{"type":"ping"}')
    events = typed_events_of(text)
    assert events[0] == {"type": "ping"}
    blocks, _ = check_stream([event for event in events if event["type"] != "ping"])
    assert blocks == [{"type": "text", "text": "Hello"}]


# Requests


def test_blocks_become_a_conversation(server):
    cached = {"type": "ephemeral"}
    messages, _, extras = asked_of(
        server,
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": cached},
            {"type": "text", "text": "Be kind."},
        ],
        tools=[{**TOOL, "type": "custom", "cache_control": cached}],
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "user", "content": [{"type": "text", "text": "Now."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"place": "Rom"}},
                    {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "Sun"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "No place."}],
                    },
                    {"type": "text", "text": "So?", "cache_control": cached},
                ],
            },
        ],
    )
    calls = [
        ("c1", {"name": "weather", "arguments": '{"place":"Rom"}'}),
        ("c2", {"name": "weather", "arguments": "{}"}),
    ]
    assert messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Weather?\nNow."},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning": "I look.",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": id_, "type": "function", "function": f} for id_, f in calls],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "Sun"},
        {"role": "tool", "tool_call_id": "c2", "name": "weather", "content": "No place."},
        {"role": "user", "content": "So?"},
    ]
    function = {
        "name": "weather",
        "description": TOOL["description"],
        "parameters": TOOL["input_schema"],
    }
    assert extras["tools"] == [{"type": "function", "function": function}]
    assert extras["continue_final_message"] is False


def test_the_assistants_last_message_is_continued(server):
    _, _, extras = asked_of(server, messages=[*HI, {"role": "assistant", "content": "One"}])
    assert extras["continue_final_message"] is True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reasons", [False, True])
def test_the_budget_of_thinking_is_for_models_that_think(tmp_path, reasons, stream):
    """By default the engine finds the parser that the chat template shows, if it shows one."""
    folder = write_scripted_model(tmp_path, max_position_embeddings=1 << 12)
    if reasons:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        settings["chat_template"] += "<think>{{ '</think>' }}"
        path.write_text(json.dumps(settings))
    llm = AsyncLLM(config=config(folder, server={"heartbeat_seconds": 0}))
    assert llm.config.reasoning.parser == "auto"
    budgets = []
    with running(Recording(llm, budgets)) as server:
        fields = body(thinking={"type": "enabled", "budget_tokens": 3}, max_tokens=6, stream=stream)
        answer = server.post(PATH, fields)
        engine_field = server.post(PATH, body(thinking_token_budget=3, max_tokens=6))
    llm.close()
    assert answer.status_code == 200, answer.text
    assert '"stop_reason":"' in answer.text
    if reasons:
        assert budgets == [3, 3]
        assert engine_field.status_code == 200, engine_field.text
    else:
        assert budgets == [3, None, 3]
        assert engine_field.status_code == 400
        assert engine_field.json()["error"]["message"].startswith(
            "thinking_token_budget: a budget of 3"
        )


class Recording:
    """An engine, with the budgets that it was given."""

    def __init__(self, engine, budgets):
        self._engine, self._given = engine, budgets

    def chat(self, *args, sampling_params, **extras):
        self._given.append(sampling_params.thinking_token_budget)
        return self._engine.chat(*args, sampling_params=sampling_params, **extras)

    def __getattr__(self, name):
        return getattr(self._engine, name)


@pytest.mark.parametrize("begun", [False, True])
def test_other_errors_of_a_request_with_a_budget_are_its_own(server, begun):
    error = RequestError("thinking_token_budget: no") if begun else RequestError("top_k: no")
    fields = body(thinking={"type": "enabled", "budget_tokens": 3}, stream=True)
    with answering(server, error=error, fails_after=int(begun)):
        answer = server.post(PATH, fields)
    assert "thinking_token_budget: no" in answer.text if begun else answer.status_code == 400
    assert server.engine.asked[-1][1].thinking_token_budget == 3


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize("before", [[], HI], ids=["alone", "later"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_a_message_without_blocks_is_refused(server, path, before, role):
    fields = {"messages": [*before, {"role": role, "content": []}]}
    answer = server.post(path, fields if "count" in path else {**fields, "max_tokens": 2})
    assert answer.status_code == 400, answer.text
    fragment = f"messages[{len(before)}].content: expected at least one block"
    assert answer.json()["error"]["message"] == fragment


def test_a_system_message_may_be_the_last(server):
    messages, _, _ = asked_of(server, messages=[*HI, {"role": "system", "content": "Be brief."}])
    assert messages == [*HI, {"role": "system", "content": "Be brief."}]
    for alone in ({"system": "Be kind."}, {}):
        system = [{"role": "system", "content": "Be brief."}]
        words = "messages: expected at least one message of the user"
        assert refusal(server, messages=system, **alone) == words


def test_an_empty_answer_may_be_sent_back(server):
    messages, _, _ = asked_of(server, messages=[*HI, {"role": "assistant", "content": []}, *HI])
    assert [message["content"] for message in messages] == ["Hi", "", "Hi"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (message_create_params.MessageCreateParamsStreaming, MessagesRequest),
        (sdk.MessageCountTokensParams, CountTokensRequest),
        *((block, messages_input.InputMessage) for block in typing.get_args(sdk.MessageParam)),
        (sdk.TextBlockParam, messages_input.TextBlock),
        (sdk.ThinkingBlockParam, messages_input.ThinkingBlock),
        (sdk.RedactedThinkingBlockParam, messages_input.RedactedThinkingBlock),
        (sdk.ToolUseBlockParam, messages_input.ToolUseBlock),
        (sdk.ToolResultBlockParam, messages_input.ToolResultBlock),
        (sdk.ToolParam, messages_input.ToolDefinition),
        (sdk.ToolChoiceAutoParam, messages_input.AutoChoice),
        (sdk.ToolChoiceAnyParam, messages_input.AnyChoice),
        (sdk.ToolChoiceToolParam, messages_input.ToolChoice),
        (sdk.ToolChoiceNoneParam, messages_input.NoneChoice),
        (sdk.ThinkingConfigEnabledParam, messages_input.EnabledThinking),
        (sdk.ThinkingConfigAdaptiveParam, messages_input.AdaptiveThinking),
        (sdk.ThinkingConfigDisabledParam, messages_input.DisabledThinking),
        (sdk.OutputConfigParam, OutputConfig),
    ],
    ids=lambda type_: type_.__name__,
)
def test_every_field_of_anthropics_client_is_known(theirs, ours):
    known = {field.encode_name for field in msgspec.structs.fields(ours)} | {"type"}
    known |= {*getattr(ours, "ignored", ()), *getattr(ours, "refused", ())}
    assert set(typing.get_type_hints(theirs)) - known == set()


def test_errors_of_the_engine_name_the_fields_of_the_route(server):
    error = RequestError("tools[0].function.parameters.type: expected object")
    with answering(server, error=error):
        assert refusal(server) == "tools[0].input_schema.type: expected object"


# Tokens


def test_tokens_are_counted(server):
    counted = server.post(f"{PATH}/count_tokens", {"messages": HI, "system": "Be brief."})
    assert counted.json() == {"input_tokens": len("<system>Be brief.<user>Hi") + 1}
    answer = server.post(PATH, body(system="Be brief.")).json()
    assert answer["usage"]["input_tokens"] == counted.json()["input_tokens"]


# Errors


@pytest.mark.parametrize(
    ("send", "status", "kind"),
    [
        ({"content": "{"}, 400, "invalid_request_error"),
        ({"json": body(model="other")}, 404, "not_found_error"),
        ({"content": "x", "headers": {"content-type": "text/plain"}}, 415, "invalid_request_error"),
        ({"json": {}, "headers": {"host": "elsewhere.example"}}, 403, "permission_error"),
    ],
)
def test_errors_have_the_shape_of_the_family(server, send, status, kind):
    headers = {"content-type": "application/json"} | send.get("headers", {})
    answer = server.client.post(PATH, **{**send, "headers": headers})
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [(413, "request_too_large"), (408, "timeout_error"), (500, "api_error"), (405, None)],
)
def test_each_status_has_a_type(status, kind):
    error = json.loads(error_body(AnswerError(status, "why"), f"{PATH}/count_tokens"))
    assert error["error"] == {"type": kind or "invalid_request_error", "message": "why"}


def test_errors_of_other_paths_have_openais_shape(server):
    error = server.client.get(f"{PATH}x").json()
    assert list(error) == ["error"]
    assert error["error"]["code"] == "not_found"


# Anthropic's client


def test_client_reads_a_whole_answer(server):
    name = server.service.names[0]
    client = client_of(server)
    message = client.messages.create(model=name, messages=HI, max_tokens=9)
    assert message.content[0].text == "Hello there , friend"
    assert message.stop_reason == "end_turn"
    assert client.messages.count_tokens(model=name, messages=HI).input_tokens == 9


def test_client_accumulates_a_stream_and_sends_its_blocks_back(server):
    with answering(server, deltas=CALLED):
        client, name = client_of(server), server.service.names[0]
        fields = {"model": name, "max_tokens": 100, "tools": [TOOL]}
        with client.messages.stream(**fields, messages=HI) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "One moment."
        assert final.stop_reason == "tool_use"
        assert final.usage.output_tokens == len(CALLED)
        assert [block.type for block in final.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        called = [block for block in final.content if block.type == "tool_use"]
        assert called[0].input == {"place": "Rome"}
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "Sun"} for block in called
        ]
        client.messages.create(
            **fields,
            messages=[
                *HI,
                {"role": "assistant", "content": final.content},
                {"role": "user", "content": results},
            ],
        )
        messages = server.engine.asked[-1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning"] == "Look it up."
    assert messages[1]["content"] == "One moment."
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"place":"Rome"}'


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("top_k: expected more"), anthropic.BadRequestError),
        (OverloadedError("too many requests wait"), anthropic.RateLimitError),
        (EngineDeadError(ENDED), anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_client_raises_its_errors(server, error, expected, stream):
    with answering(server, error=error):
        client, name = client_of(server), server.service.names[0]
        with pytest.raises(expected, match=str(error)):
            client.messages.create(model=name, messages=HI, max_tokens=9, stream=stream)


def test_client_raises_an_error_inside_a_stream(server):
    error = EngineDeadError(ENDED)
    with answering(server, error=error, fails_after=1):
        client, name = client_of(server), server.service.names[0]
        stream = client.messages.create(model=name, messages=HI, max_tokens=9, stream=True)
        with pytest.raises(anthropic.APIStatusError, match=ENDED):
            list(stream)


def test_client_raises_an_error_without_a_key():
    async def authenticate(headers, path):
        keys = (headers.get("x-api-key"), headers.get("authorization"))
        return Client(name="me") if "right" in keys or "Bearer right" in keys else None

    extension = ("keys", Authenticator(authenticate=authenticate))
    with running(FakeEngine(config=configured(), extensions=(extension,))) as server:
        fields = {"model": server.service.names[0], "messages": HI, "max_tokens": 9}
        client_of(server, api_key="right").messages.create(**fields)
        with pytest.raises(anthropic.AuthenticationError) as raised:
            client_of(server, api_key="wrong").messages.create(**fields)
        by_header = server.post(PATH, fields, headers={"x-api-key": "right"})
    assert raised.value.body["error"]["type"] == "authentication_error"
    assert by_header.status_code == 200
