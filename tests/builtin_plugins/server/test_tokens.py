"""Routes of tokens: generate, tokenize, detokenize."""

import asyncio
import threading
from itertools import chain

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import LENGTH, WEATHER, user
from support.waiting import PATIENCE_S, wait_until

GENERATE = "/inference/v1/generate"


def tokens_of(server, text, **fields):
    return server.post("/tokenize", {"prompt": text, **fields}).json()["tokens"]


def generate(server, text="say abc", sampling=None, **fields):
    body = {"token_ids": tokens_of(server, text), **fields}
    body["sampling_params"] = {"temperature": 0, **(sampling or {})}
    response = server.post(GENERATE, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_come_back_as_tokens(server):
    answer = generate(server, sampling={"max_tokens": 20}, request_id="mine")
    assert answer["request_id"] == "mine"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][:-1] == tokens_of(server, " abc abc abc")
    assert answer["usage"]["prompt_tokens"] == 7
    text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
    assert text == " abc abc abc<eos>"


def test_streamed_tokens_are_the_same(server):
    sampling = {"n": 2, "max_tokens": 6, "logprobs": 1, "prompt_logprobs": 0, "seed": 1}
    sampling |= {"temperature": 1, "ignore_eos": True}
    whole = generate(server, "x y", sampling)
    body = {"token_ids": tokens_of(server, "x y"), "sampling_params": sampling, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(GENERATE, {**body, "stream_options": options})
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert list(chain.from_iterable(part["token_ids"] for part in parts)) == choice["token_ids"]
        entries = list(chain.from_iterable(part["logprobs"]["content"] for part in parts))
        assert entries == choice["logprobs"]["content"]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert [entry["token"] for entry in entries] == names
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["length"]
    assert [e["prompt_logprobs"] for e in events if "prompt_logprobs" in e] == [
        whole["prompt_logprobs"]
    ]
    assert events[-1]["usage"] == whole["usage"]
    assert all("usage" in event for event in events)


SAMPLED = {"temperature": 1, "max_tokens": 8, "ignore_eos": True, "n": 2, "logprobs": 0}


def test_another_server_goes_on_after_the_tokens_of_a_stream_with_its_seed(server):
    body = {"token_ids": tokens_of(server, "x y"), "sampling_params": SAMPLED}
    events = server.events(GENERATE, {**body, "stream": True})
    assert [("seed" in event) for event in events] == [True] + [False] * (len(events) - 1)
    sampling = SAMPLED | {"seed": events[0]["seed"]}
    whole = generate(server, "x y", sampling)
    assert whole["seed"] == events[0]["seed"]
    expected = [choice["token_ids"] for choice in whole["choices"]]
    for count in range(8):
        given = [expected[0][:count], None if count > 5 else expected[1][:2]]
        more = {**body, "sampling_params": sampling, "output_token_ids": given}
        events = server.events(GENERATE, {**more, "stream": True})
        streamed = {0: given[0], 1: given[1] or expected[1]}
        for choice in (choice for event in events for choice in event["choices"]):
            assert choice["index"] == 0 or given[1] is not None
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            streamed[choice["index"]] = streamed[choice["index"]] + choice["token_ids"]
        assert streamed == {0: expected[0], 1: expected[1]}
        answer = server.post(GENERATE, more).json()
        for choice in answer["choices"]:
            assert choice["token_ids"] == expected[choice["index"]]


@pytest.mark.parametrize(
    ("given", "sampling", "param", "message"),
    [
        ([[5000], None], {}, "output_token_ids[0][0]", "expected a token id from 0 to "),
        ([[1]], {}, "output_token_ids", "for each of n (2) completions, got 1"),
        ([[1] * 8, None], {}, "output_token_ids[0]", "fewer than max_tokens, 8, because one has t"),
        ([None, [9]], {"stop_token_ids": [9]}, "output_token_ids[1][0]", "no token that ends the"),
        ([[-1], None], {}, "output_token_ids[0][0]", "expected "),
        (
            [[5, 70], None],
            {"structured_outputs": {"regex": "[a-z]{9}"}, "ignore_eos": False},
            "output_token_ids[0]",
            "expected a token that the grammar allows, got 5",
        ),
    ],
)
def test_tokens_that_cannot_be_gone_on_with(server, given, sampling, param, message):
    body = {"token_ids": [1, 2], "sampling_params": SAMPLED | sampling, "output_token_ids": given}
    response = server.post(GENERATE, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_log_probabilities_of_tokens_that_a_request_names(server):
    sampling = {"max_tokens": 2, "ignore_eos": True, "logprob_token_ids": [200, 97]}
    (choice,) = generate(server, sampling=sampling)["choices"]
    for position in choice["logprobs"]["content"]:
        assert {top["token"] for top in position["top_logprobs"]} == {"token_id:200", "token_id:97"}
    wrong = {"token_ids": [1], "sampling_params": {"logprob_token_ids": [5000]}}
    error = server.post(GENERATE, wrong).json()["error"]
    assert error["param"] == "sampling_params.logprob_token_ids[0]"
    assert "expected a token id below " in error["message"]


def test_stop_strings_and_grammars_work_on_tokens(server):
    answer = generate(server, sampling={"stop": ["bc"], "max_tokens": 20})
    assert answer["choices"][0]["stop_reason"] == "bc"
    answer = generate(server, sampling={"structured_outputs": {"choice": ["red"]}})
    assert answer["choices"][0]["token_ids"][:3] == tokens_of(server, "red")
    answer = generate(server, sampling={"detokenize": False, "max_tokens": 1})
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stream_may_begin_with_progress():
    with running(FakeEngine(config=configured())) as server:
        options = {"stream": True, "stream_options": {"include_progress": True}}
        events = server.events(GENERATE, {"token_ids": [5], **options})
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_text_to_tokens_and_back(server):
    answer = server.post("/tokenize", {"prompt": "hi 😀", "return_token_strs": True}).json()
    assert (answer["count"], answer["max_model_len"]) == (7, LENGTH)
    assert answer["token_strs"][:3] == ["h", "i", " "]
    back = server.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "hi 😀"}
    assert server.post("/tokenize", {"prompt": "hi"}).json()["token_strs"] is None
    tokens = tokens_of(server, "a<think>")
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "a<think>"
    skipped = server.post("/detokenize", {"tokens": tokens, "skip_special_tokens": True}).json()
    assert skipped["prompt"] == "a"
    assert tokens_of(server, "hi", add_special_tokens=False) == tokens_of(server, "hi")


def test_conversations_to_tokens(server):
    def prompt_of(**fields):
        answer = server.post("/tokenize", {"messages": user("hi"), **fields}).json()
        return server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]

    assert prompt_of() == "user: hi\nassistant: "
    assert prompt_of(add_generation_prompt=False) == "user: hi\n"
    assert prompt_of(tools=[WEATHER]).startswith('tools: [{"type": "function"')
    assert prompt_of(add_special_tokens=True) == "user: hi\nassistant: "
    answered = [*user("go on"), {"role": "assistant", "content": "one"}]
    assert prompt_of(messages=answered, continue_final_message=True).endswith("assistant: one")


class Slow(FakeEngine):
    """Tokenises for a long time."""

    busy = 0

    async def tokenize(self, text, *, add_special_tokens=True):
        self.busy += 1
        try:
            await asyncio.sleep(self.delay)
            return [len(text), add_special_tokens]
        finally:
            self.busy -= 1


def test_tokenising_is_counted_limited_and_ended_with_its_client():
    engine = Slow(delay=3600, config=configured(limits={"requests": 1}))
    with running(engine) as server:
        body = b'{"prompt":"x"}'
        client = server.socket()
        client.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: engine.busy == server.service.load.open == 1)
        for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})):
            assert server.post(path, fields).status_code == 429
        client.close()
        wait_until(lambda: engine.busy == server.service.load.open == 0)
        assert server.post("/detokenize", {"tokens": [65]}).json() == {"prompt": "A"}


def test_a_server_that_ends_waits_for_tokens(tmp_path):
    engine = Slow(delay=0.5, config=configured(admin=f"unix:{tmp_path}/a", drain_seconds=60))
    answers = []
    with running(engine) as server:
        asking = threading.Thread(
            target=lambda: answers.append(server.post("/tokenize", {"prompt": "abc"}))
        )
        asking.start()
        wait_until(lambda: engine.busy)
        assert server.admin.post("/drain", json={}).status_code == 200
        asking.join(PATIENCE_S)
    assert answers[0].json()["tokens"] == [3, True]


def test_tokenize_takes_what_chat_takes(server):
    function = {**WEATHER["function"], "description": None}
    body = {"messages": user("hi"), "reasoning_effort": "low"}
    tools = [{"type": "function", "function": function}]
    response = server.post("/tokenize", {**body, "tools": tools})
    assert response.status_code == 200, response.text
    del function["description"]
    same = server.post("/tokenize", {**body, "tools": [{"type": "function", "function": function}]})
    assert response.json() == same.json()
    without = server.post("/tokenize", body)
    assert without.json()["count"] < same.json()["count"]
