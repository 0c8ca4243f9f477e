"""Chat completions: every field, answered by a real engine on the scripted model."""

import dataclasses
import json
from itertools import chain

import pytest
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_server import running
from support.scripted_server import LENGTH, WEATHER, user
from support.waiting import wait_until

CHAT = "/v1/chat/completions"
USAGE = {"include_usage": True}
NAME = WEATHER["function"]["name"]


def ask(server, text="fox", **fields):
    response = server.post(CHAT, {"messages": user(text), "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, text="fox", **fields):
    events = server.events(
        CHAT, {"messages": user(text), "temperature": 0, "stream": True, **fields}
    )
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert all("finish_reason" in choice for choice in event["choices"])
    return events


def tokens_of(server, text):
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def refused(server, status=400, **fields):
    response = server.post(CHAT, {"messages": user("hi"), **fields})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def joined(events, index=0, field="content"):
    """Return a field of a choice's deltas, joined."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(choice["delta"].get(field) or "" for choice in choices)


def finish_reasons(events):
    choices = [choice for event in events for choice in event["choices"]]
    return {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"] is not None}


def test_several_completions_streamed_and_whole_are_the_same(server):
    fields = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    whole = ask(server, "anything", **fields)
    events = stream(server, "anything", **fields, stream_options=USAGE)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert [joined(events, index) for index in range(3)] == texts
    assert finish_reasons(events) == dict.fromkeys(range(3), "length")
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    usage = whole["usage"]
    assert usage["completion_tokens"] == 18
    assert events[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][name] == usage[name]
    roles = [event["choices"][0]["delta"].get("role") for event in events[:-1]]
    assert roles == ["assistant"] * 3 + [None] * (len(roles) - 3)
    assert [event["choices"][0]["index"] for event in events[:3]] == [0, 1, 2]


def test_usage_so_far_is_in_every_chunk(server):
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = stream(server, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 0, "the first chunk has a role, and no token"
    totals = [event["usage"]["total_tokens"] - event["usage"]["prompt_tokens"] for event in events]
    assert totals == counts
    assert counts[-1] == len("the quick brown fox jumps") + 1  # and its end


def test_usage_so_far_needs_the_usage(server):
    events = stream(server, stream_options={"continuous_usage_stats": True})
    assert not [event for event in events if event.get("usage")]


def test_fields_about_the_prompt_are_null_unless_asked_for(server):
    answer = ask(server, "say abc")
    assert answer["prompt_logprobs"] is None
    assert answer["prompt_token_ids"] is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_log_probabilities(server, count):
    fields = {"logprobs": True, "top_logprobs": count, "temperature": 2, "seed": 1}
    fields |= {
        "max_tokens": 8,
        "ignore_eos": True,
        "allowed_token_ids": tokens_of(server, "abcdefghijklmnopqrstuvwxyz"),
    }
    whole = ask(server, "anything", **fields)["choices"][0]
    positions = whole["logprobs"]["content"]
    assert len(positions) == 8
    content = b"".join(bytes(position["bytes"]) for position in positions)
    assert content.decode() == whole["message"]["content"]
    outside = 0
    for position in positions:
        top = position["top_logprobs"]
        if not count:
            assert top == []
            continue
        assert len(top) == count
        outside += {name: position[name] for name in ("token", "logprob", "bytes")} not in top
        ranked = [entry["logprob"] for entry in top]
        assert ranked == sorted(ranked, reverse=True)
    assert not count or outside, "the chosen token was always among the likeliest"
    events = stream(server, "anything", **fields)
    streamed = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == positions


def test_log_probabilities_have_the_bytes_of_parts_of_characters(server):
    chosen = tokens_of(server, "é")
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3, "allowed_token_ids": chosen}
    positions = ask(server, "anything", **fields)["choices"][0]["logprobs"]["content"]
    assert len(chosen) == 2, "a token is a byte"
    assert {byte for entry in positions for byte in entry["bytes"]} <= set("é".encode())
    assert all(len(top["bytes"]) == 1 for entry in positions for top in entry["top_logprobs"])
    events = stream(server, "anything", **fields)
    streamed = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == positions


def test_log_probabilities_may_name_tokens_by_id(server):
    fields = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    choice = ask(server, **fields)["choices"][0]
    positions = choice["logprobs"]["content"]
    ids = [f"token_id:{token}" for token in tokens_of(server, "the quick brown fox jumps")]
    assert [position["token"] for position in positions][:-1] == ids
    assert all(top["token"].startswith("token_id:") for p in positions for top in p["top_logprobs"])
    streamed = [c["logprobs"] for e in stream(server, **fields) for c in e["choices"]]
    assert [p for part in filter(None, streamed) for p in part["content"]] == positions


@pytest.mark.parametrize("likeliest", [{}, {"logprobs": True, "top_logprobs": 1}])
def test_log_probabilities_of_tokens_that_a_request_names(server, likeliest):
    fields = {"logprob_token_ids": [200, 97], "return_tokens_as_token_ids": True, **likeliest}
    choice = ask(server, **fields)["choices"][0]
    positions = choice["logprobs"]["content"]
    for position in positions:  # the reply of the script is the likeliest
        top = [entry["token"] for entry in position["top_logprobs"]]
        shown = {"token_id:200", "token_id:97"}
        assert set(top) == (shown | {position["token"]} if likeliest else shown)
    streamed = [c["logprobs"] for e in stream(server, **fields) for c in e["choices"]]
    assert [p for part in filter(None, streamed) for p in part["content"]] == positions


def test_the_end_of_a_long_prompt_is_kept(server):
    long = "x" * LENGTH + "fox"
    message = refused(server, messages=user(long))[1]
    assert "the prompt is too long" in message
    whole = tokens_of(server, f"user: {long}\nassistant: ")
    for last, count in ((9, 9), (-1, LENGTH - 5)):
        fields = {"truncate_prompt_tokens": last, "return_token_ids": True, "max_tokens": 5}
        assert ask(server, long, **fields)["prompt_token_ids"] == whole[-count:]
    param, message = refused(server, messages=user(long), truncate_prompt_tokens=0)
    assert (param, message) == (
        "truncate_prompt_tokens",
        "truncate_prompt_tokens: expected at least 1, or -1 to leave room for max_tokens, got 0",
    )


def test_what_belongs_to_the_prompt_comes_once(server):
    fields = {"prompt_logprobs": 1, "return_token_ids": True, "n": 2, "max_tokens": 3}
    whole = ask(server, **fields)
    events = stream(server, **fields)
    assert whole["prompt_token_ids"] == tokens_of(server, "user: fox\nassistant: ")
    assert len(whole["prompt_logprobs"]) == len(whole["prompt_token_ids"])
    assert whole["prompt_logprobs"][0] is None
    assert all(
        position[str(token)]["logprob"] <= 0
        for position, token in zip(
            whole["prompt_logprobs"][1:], whole["prompt_token_ids"][1:], strict=True
        )
    )
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert [event[name] for event in events if name in event] == [whole[name]]
    for index in range(2):
        ids = [c.get("token_ids", []) for e in events for c in e["choices"] if c["index"] == index]
        assert (
            list(chain.from_iterable(ids))
            == whole["choices"][index]["token_ids"]
            == tokens_of(server, "the")
        )


def test_stop_strings(server):
    choice = ask(server, stop=["brown", "zebra"])["choices"][0]
    assert choice["message"]["content"] == "the quick "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "brown")
    choice = ask(server, stop="brown", include_stop_str_in_output=True)["choices"][0]
    assert choice["message"]["content"] == "the quick brown"
    events = stream(server, stop="brown")
    assert joined(events) == "the quick "
    assert events[-1]["choices"][0]["stop_reason"] == "brown"
    choice = ask(server, stop_token_ids=tokens_of(server, "q"))["choices"][0]
    assert [choice["stop_reason"]] == tokens_of(server, "q")


def test_which_tokens_may_be_chosen(server):
    forced = {"max_tokens": 3, "ignore_eos": True}
    (x,), (t,) = tokens_of(server, "x"), tokens_of(server, "t")
    content = ask(server, logit_bias={str(x): 100, str(t): -100}, **forced)
    assert content["choices"][0]["message"]["content"][0] == "x"
    content = ask(server, allowed_token_ids=tokens_of(server, "y"), **forced)["choices"][0][
        "message"
    ]["content"]
    assert content == "yyy"
    content = ask(server, bad_words=["quick"])["choices"][0]["message"]["content"]
    assert content.startswith("the quic")
    assert "quick" not in content
    content = ask(server, "hi", min_tokens=9, max_tokens=9)["choices"][0]
    assert content["finish_reason"] == "length"
    first = ask(server, "x", temperature=1, seed=3, max_tokens=9)["choices"][0]["message"]
    assert ask(server, "x", temperature=1, seed=3, max_tokens=9)["choices"][0]["message"] == first


def test_an_answer_of_a_schema(server):
    schema = {"type": "object", "properties": {"is": {"type": "boolean"}}, "required": ["is"]}
    schema["additionalProperties"] = False
    answer_format = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }
    choice = ask(server, response_format=answer_format, structured_outputs=None)["choices"][0]
    assert json.loads(choice["message"]["content"])["is"] in (True, False)
    for fields in (
        {"guided_choice": ["red", "blue"]},
        {"structured_outputs": {"choice": ["red", "blue"], "regex": None}},
        {"guided_regex": "red|blue"},
        {"guided_grammar": 'start: "red" | "blue"'},
        {"guided_json": {"enum": ["red", "blue"]}},
    ):
        content = ask(server, **fields)["choices"][0]["message"]["content"]
        assert content.strip('"') in ("red", "blue")


def test_an_answer_has_the_name_of_the_model_that_was_asked(server):
    assert ask(server, model="other")["model"] == "other"
    assert ask(server)["model"] == "scripted"


def test_null_is_absent_at_every_depth(server):
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": None}}
    messages = [{"role": "user", "content": "hi", "name": None, "tool_calls": None}]
    answer = ask(
        server,
        messages=messages,
        tools=[tool],
        n=None,
        stop=None,
        logprobs=None,
        stream_options=None,
        max_tokens=None,
        repetition_detection=None,
    )
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert joined(stream(server, stream_options={"include_usage": None})).startswith("the quick")


@pytest.mark.parametrize(
    "choice",
    [
        None,
        "auto",
        {
            "type": "allowed_tools",
            "allowed_tools": {"tools": [{"type": "function", "function": {"name": "get_weather"}}]},
        },
    ],
)
def test_a_tool_is_called(server, choice):
    choice_fields = {} if choice is None else {"tool_choice": choice}
    whole = ask(server, "weather", tools=[WEATHER], **choice_fields)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls"
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert whole["message"]["content"].strip() == "I look."
    events = stream(server, "weather", tools=[WEATHER], **choice_fields)
    parts = [
        c["delta"]["tool_calls"] for e in events for c in e["choices"] if "tool_calls" in c["delta"]
    ]
    assert all(parts)
    parts = list(chain.from_iterable(parts))
    assert parts[0]["function"]["name"] == "get_weather"
    assert parts[0]["type"] == "function"
    assert all("id" not in part and "name" not in part["function"] for part in parts[1:])
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert json.loads(arguments) == {"city": "Paris"}
    assert finish_reasons(events) == {0: "tool_calls"}
    assert joined(events).strip() == "I look."


def test_calls_without_content_have_null(server):
    message = ask(server, "twice", tools=[WEATHER])["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "get_weather"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "get_weather"}}],
            },
        },
    ],
)
def test_a_call_is_forced(server, choice):
    fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    choice = ask(server, "anything", **fields)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("text", "choice", "calls"),
    [
        ("anything", {"tool_choice": "required"}, True),
        ("anything", {"tool_choice": {"type": "function", "function": {"name": NAME}}}, True),
        ("twice", {}, True),
        ("hi", {}, False),
    ],
    ids=["required", "named", "free, calls", "free, answers"],
)
def test_a_form_is_of_the_text_and_not_of_calls(server, text, choice, calls):
    """Clients such as instructor's send both."""
    schema = {"type": "object", "properties": {"is": {"type": "boolean"}}, "required": ["is"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"tools": [WEATHER], "response_format": form, "parallel_tool_calls": False, **choice}
    message = ask(server, text, **fields, max_tokens=300)["choices"][0]["message"]
    if calls:
        assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"]
        assert message["content"] is None
    else:
        assert json.loads(message["content"])["is"] in (True, False)


def test_no_tools_are_shown_and_none_are_called(server):
    message = ask(server, "hi", tools=[WEATHER], tool_choice="none")["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello", "refusal": None}
    message = ask(server, "hi", tools=[])["choices"][0]["message"]
    assert "tool_calls" not in message


def test_reasoning_has_both_names_in_one_delta(server):
    answer = ask(server, "think")
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "so it is"
    assert message["content"] == "yes"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("so it is")
    events = stream(server, "think")
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert joined(events, field="reasoning") == "so it is"
    assert joined(events) == "yes"
    hidden = ask(server, "think", include_reasoning=False)["choices"][0]["message"]
    assert "reasoning" not in hidden
    assert joined(stream(server, "think", include_reasoning=False), field="reasoning") == ""


def test_reasoning_without_an_end_is_reported(server):
    choice = ask(server, "dream")["choices"][0]
    assert choice["message"]["content"] == ""
    assert "reasoning" in choice["warning"]
    events = stream(server, "dream")
    assert "reasoning" in events[-1]["choices"][0]["warning"]


def test_a_budget_ends_reasoning(server):
    choice = ask(server, "think", thinking_token_budget=2, max_tokens=5)["choices"][0]
    assert choice["message"]["reasoning"] == "so"


def test_why_an_answer_ends(server):
    assert ask(server, "hi")["choices"][0]["finish_reason"] == "stop"
    assert ask(server, "hi", max_tokens=2)["choices"][0]["finish_reason"] == "length"
    limited = ask(server, "hi", max_completion_tokens=2, max_tokens=4)
    assert limited["usage"]["completion_tokens"] == 2
    repeating = {"allowed_token_ids": [97], "ignore_eos": True, "max_tokens": 50}
    choice = ask(server, "x", repetition_detection={"max_pattern": 2}, **repeating)["choices"][0]
    assert choice["finish_reason"] == "repetition"
    slow = {"ignore_eos": True, "max_tokens": LENGTH - 50, "timeout": 0.02}
    assert ask(server, "x", **slow)["choices"][0]["finish_reason"] == "timeout"
    assert finish_reasons(stream(server, "x", **slow)) == {0: "timeout"}


def test_an_answer_is_continued(server):
    messages = [*user("go on"), {"role": "assistant", "content": "one"}]
    fields = {"messages": messages, "continue_final_message": True}
    assert ask(server, **fields)["choices"][0]["message"]["content"] == " two three"
    assert ask(server, echo=True, **fields)["choices"][0]["message"]["content"] == "one two three"
    assert joined(stream(server, echo=True, **fields)) == "one two three"


def test_an_answer_can_be_sent_back(server):
    message = ask(server, "weather", tools=[WEATHER])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    back = {**message, "annotations": [], "parsed": None, "reasoning_content": "because"}
    ask(server, messages=[*user("weather"), back, result], tools=[WEATHER], max_tokens=2)


def test_the_id_is_the_asked_one_and_the_same_everywhere(server):
    assert ask(server, "hi", request_id="mine")["id"] == "chatcmpl-mine"
    ids = {event["id"] for event in stream(server, "hi")}
    assert len(ids) == 1


def test_unknown_fields_are_left_out_where_the_operator_allows_it(caplog):
    with running(FakeEngine(config=configured(unknown_fields="warn"))) as server:
        fields = {"wherefore": 1, "stream_options": {"x": 1}, "stream": True}
        events = server.events(
            CHAT, {"messages": [{"role": "user", "content": "x", "a": 1}], **fields}
        )
        assert joined(events) == "Hello there , friend"
        assert server.post(CHAT, {"messages": user("x"), "n": "two", "b": 1}).status_code == 400
    assert "wherefore" in caplog.text
    assert "messages[0].a" in caplog.text


class Live:
    num_prompt_tokens, num_cached_tokens = 100, 16

    def __init__(self, computed, external_id="chatcmpl-other"):
        self.num_computed_tokens, self.external_id = computed, external_id


@dataclasses.dataclass
class Computing(HeldEngine):
    """Half computes the prompts of the completions that it is asked about.

    Attributes:
        polls: how often it is asked before it answers.
    """

    polls: int = 2

    async def live_requests(self, external_ids=None):
        assert all(i.startswith("chatcmpl-p-") and len(i) > 12 for i in external_ids)
        self.polls -= 1
        if self.polls == 0:
            self.go_on.set()
        return [Live(computed, i) for i in external_ids for computed in (32, 16)]


def test_progress_of_the_prompt_comes_before_the_answer():
    engine = Computing(text="one", config=configured())
    fields = {"stream": True, "request_id": "p"}
    with running(engine) as server:
        for options in ({"return_progress": True}, {"stream_options": {"include_progress": True}}):
            engine.polls = 2
            engine.go_on.clear()
            events = server.events(CHAT, {"messages": user("x"), **fields, **options})
            progress = events[0].pop("prompt_progress")
            assert progress.pop("time_ms") >= 200
            assert progress == {"total": 100, "cached": 16, "cache": 16, "processed": 32}
            assert events[0]["choices"] == []
            assert not any("prompt_progress" in event for event in events[1:]), "it did not change"
            assert joined(events[1:]) == "one"
        assert not any(
            "prompt_progress" in event
            for event in server.events(CHAT, {"messages": user("x"), **fields})
        )


def test_a_client_that_leaves_before_the_answer_ends_the_request():
    engine = Computing(polls=0, config=configured())
    body = {"messages": user("x"), "stream": True, "return_progress": True, "request_id": "p"}
    with running(engine) as server:
        with server.client.stream("POST", CHAT, json=body) as response:
            next(response.iter_raw())
        wait_until(lambda: engine.aborted)
        assert (engine.aborted, engine.open) == (1, 0)


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_tool_calls(server, parallel):
    fields = {"tools": [WEATHER], "max_tokens": 200, "parallel_tool_calls": parallel}
    whole = ask(server, "twice", **fields)["choices"][0]
    assert len(whole["message"]["tool_calls"]) == 1 + parallel
    assert whole["finish_reason"] == "tool_calls"
    events = stream(server, "twice", **fields)
    parts = [c["delta"].get("tool_calls") or [] for e in events for c in e["choices"]]
    assert {call["index"] for part in parts for call in part} == set(range(1 + parallel))


REFUSAL = {"type": "refusal", "refusal": "e"}


@pytest.mark.parametrize("last", [{"type": "text", "text": "e"}, REFUSAL])
def test_echo_of_content_in_parts(server, last):
    parts = [{"type": "text", "text": "on"}, last]
    fields = {
        "messages": [*user("go on"), {"role": "assistant", "content": parts}],
        "continue_final_message": True,
        "echo": True,
        "max_tokens": 3,
    }
    whole = ask(server, **fields)["choices"][0]["message"]["content"]
    assert whole.startswith("on\ne")
    assert joined(stream(server, **fields)) == whole


@pytest.fixture(scope="module")
def fake():
    with running(FakeEngine(config=configured(unknown_fields="error"))) as running_server:
        yield running_server


@pytest.mark.parametrize(
    ("path", "body"),
    [
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
    ],
)
def test_the_headers_of_a_trace_reach_the_engine(fake, path, body):
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "acme=1"}
    assert fake.post(path, body, headers={**trace, "x-other": "1"}).status_code == 200
    assert fake.engine.asked[-1][2]["trace_headers"] == trace
    assert fake.post(path, body).status_code == 200
    assert "trace_headers" not in fake.engine.asked[-1][2]


def test_a_template_of_the_model_is_chosen_by_its_name(server):
    plain, named = ask(server), ask(server, chat_template="default")
    assert named["choices"] == plain["choices"]
    bodies = ({"messages": user("fox")}, {"messages": user("fox"), "chat_template": "default"})
    first, second = (server.post("/tokenize", body).json() for body in bodies)
    assert first == second
    param, message = refused(server, chat_template="rag")
    assert param == "chat_template"
    assert "expected the name of a template of the model (default), got 'rag'" in message
