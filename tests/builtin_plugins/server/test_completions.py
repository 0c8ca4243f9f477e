"""Completions of prompts: every form of prompt, echo, log-probabilities, several at once."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_server import running

from hardpoint import RequestError
from hardpoint.plugins import CompletionOutput, Logprob, RequestOutput

PATH = "/v1/completions"


def ask(server, prompt="say abc", **fields):
    response = server.post(PATH, {"prompt": prompt, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, prompt="say abc", **fields):
    events = server.events(PATH, {"prompt": prompt, "temperature": 0, "stream": True, **fields})
    assert all("finish_reason" in choice for event in events for choice in event["choices"])
    return events


def choices_of(events, index):
    return [c for event in events for c in event["choices"] if c["index"] == index]


END = 256
"""The token that ends texts of the scripted model."""


def tokens_of(server, text):
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_every_form_of_prompt(server):
    ids = tokens_of(server, "say abc")
    for prompt in ("say abc", ids):
        answer = ask(server, prompt)
        assert [choice["text"] for choice in answer["choices"]] == [" abc abc abc"]
        assert answer["usage"]["prompt_tokens"] == 7
    for prompts in (["say abc", "emoji"], [ids, tokens_of(server, "emoji")]):
        answer = ask(server, prompts)
        assert [c["text"] for c in answer["choices"]] == [" abc abc abc", "go 😀 on"]
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == 12
        assert answer["usage"]["completion_tokens"] == 13 + 11
    assert ask(server, max_tokens=4, add_special_tokens=False, echo=True)["choices"][0]["text"] == (
        "say abc abc"
    )


def test_fields_about_the_prompt_are_null_unless_asked_for(server):
    (choice,) = ask(server, "say abc")["choices"]
    assert choice["prompt_logprobs"] is None
    assert choice["prompt_token_ids"] is None


def test_an_echo_of_token_ids_has_their_special_tokens(server):
    ids = [END, *tokens_of(server, "say abc")]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text.removesuffix("say abc")
    (choice,) = ask(server, ids, echo=True, max_tokens=1)["choices"]
    assert choice["text"].startswith(text)


def test_several_prompts_and_completions_streamed_and_whole_are_the_same(server):
    fields = {"n": 2, "temperature": 1, "seed": 9, "max_tokens": 5, "ignore_eos": True}
    fields |= {"echo": True, "logprobs": 1, "return_token_ids": True}
    prompts = ["one", "two!", "three"]
    whole = ask(server, prompts, **fields)
    events = stream(server, prompts, **fields, stream_options={"include_usage": True})
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    for choice in whole["choices"]:
        index = choice["index"]
        parts = choices_of(events, index)
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert choice["text"].startswith(prompts[index // 2])
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = list(chain.from_iterable(part["logprobs"][column] for part in parts))
            assert streamed == choice["logprobs"][column]
        assert list(chain.from_iterable(part["token_ids"] for part in parts)) == choice["token_ids"]
        prompt_ids = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
        assert prompt_ids == [tokens_of(server, prompts[index // 2])]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["length"]
    last = events[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 30
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == 12


def test_log_probabilities_have_the_chosen_token(server):
    letters = tokens_of(server, "abcdefghijklmnopqrstuvwxyz")
    fields = {"temperature": 2, "seed": 2, "max_tokens": 8, "allowed_token_ids": letters}
    for count in (0, 2):
        answer = ask(server, "x", logprobs=count, ignore_eos=True, **fields)["choices"][0]
        columns = answer["logprobs"]
        assert "".join(columns["tokens"]) == answer["text"]
        assert columns["text_offset"] == list(range(8))
        for token, logprob, top in zip(
            columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
        ):
            assert top[token] == logprob
            assert 1 <= len(top) <= count + 1


@pytest.mark.parametrize("count", [None, 0, 2])
def test_log_probabilities_of_tokens_that_a_request_names(server, count):
    ids = [97, 200, 256]
    fields = {"temperature": 1, "seed": 2, "max_tokens": 4, "ignore_eos": True}
    fields |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
    whole = ask(server, "x", logprobs=20, **fields)["choices"][0]
    fields |= {"logprobs": count, "logprob_token_ids": ids}
    choice = ask(server, "x", **fields)["choices"][0]
    assert choice["token_ids"] == whole["token_ids"]
    tops = choice["logprobs"]["top_logprobs"]
    for token, top, likeliest in zip(
        choice["token_ids"], tops, whole["logprobs"]["top_logprobs"], strict=True
    ):
        likely = sorted(likeliest, key=likeliest.get, reverse=True)[: count or 0]
        assert set(top) == {*likely, *(f"token_id:{i}" for i in (token, *ids))}
        assert all(likeliest[name] == value for name, value in top.items() if name in likeliest)
    parts = choices_of(stream(server, "x", **fields), 0)
    assert [top for part in parts for top in part["logprobs"]["top_logprobs"]] == tops


def test_the_prompt_alone_is_computed(server):
    fields = {"max_tokens": 0, "echo": True, "logprobs": 2}
    answer = ask(server, **fields)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("say abc", "length")
    columns = choice["logprobs"]
    assert columns["tokens"] == list("say abc")
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in columns["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    (event, usage) = stream(server, **fields, stream_options={"include_usage": True})
    about_prompt = {"prompt_logprobs": None, "prompt_token_ids": None}  # of a whole answer alone
    assert [{**event_choice, **about_prompt} for event_choice in event["choices"]] == answer[
        "choices"
    ]
    assert usage["usage"] == answer["usage"]


def test_log_probabilities_of_the_prompt(server):
    choice = ask(server, prompt_logprobs=1, max_tokens=1)["choices"][0]
    positions = choice["prompt_logprobs"]
    ids = tokens_of(server, "say abc")
    assert positions[0] is None
    assert all(str(token) in place for token, place in zip(ids[1:], positions[1:], strict=True))
    first, *others = stream(server, prompt_logprobs=1, max_tokens=3)
    assert first["choices"][0]["prompt_logprobs"] == positions
    assert not any("prompt_logprobs" in event["choices"][0] for event in others)


def test_stops(server):
    choice = ask(server, "emoji", stop="😀")["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("go ", "😀")
    choice = ask(server, "emoji", stop=["😀"], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "go 😀"
    assert ask(server)["choices"][0]["finish_reason"] == "stop"
    assert ask(server, "x", max_tokens=None)["usage"]["completion_tokens"] <= 16


def test_a_grammar_for_a_prompt(server):
    assert ask(server, structured_outputs={"choice": ["red"]})["choices"][0]["text"] == "red"


def test_an_error_of_one_prompt_ends_the_others():
    class Second(HeldEngine):
        def generate(self, prompt, params=None, request_id=None, **extras):
            self.error = RequestError("top_k: no") if prompt["prompt"] == "bad" else None
            return super().generate(prompt, params, request_id, **extras)

        async def _answer(self, prompt, *others):
            if prompt["prompt"] == "bad":
                raise RequestError("top_k: no")
            self.error = None
            async for output in super()._answer(prompt, *others):
                yield output

    engine = Second(config=configured())
    with running(engine) as server:
        for streamed in (False, True):
            answer = server.post(PATH, {"prompt": ["a", "bad", "c"], "stream": streamed})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_k")
    assert engine.open == 0


class Merged(FakeEngine):
    """Yields several tokens of both completions in one output, as for a slow reader."""

    def __post_init__(self):
        super().__post_init__()
        self.tokenizer.special_tokens = {"\x01": 1}  # which is added to prompts

    def _outputs(self, text, ids, params, request_id):
        halves = [("ab", [97, 98]), ("cd", [99, 100])]
        for number, (part, tokens) in enumerate(halves):
            outputs = [
                CompletionOutput(
                    index=index,
                    text=part,
                    content=part,
                    token_ids=tokens,
                    logprobs=[{t: Logprob(-1.0, 1, chr(t))} for t in tokens],
                    finish_reason="length" if number else None,
                )
                for index in range(2)
            ]
            positions = [None, *({t: Logprob(-2.0, 1, chr(t))} for t in ids[1:])]
            yield RequestOutput(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=ids,
                outputs=outputs,
                finished=bool(number),
                # Each completion has brought its own.
                prompt_logprobs=[] if number else positions * 2,
            )


def test_merged_outputs_are_distinguished():
    with running(Merged(config=configured())) as server:
        fields = {"n": 2, "logprobs": 0, "echo": True, "max_tokens": 4, "prompt_logprobs": 0}
        events = stream(server, "xy", **fields, stream_options={"include_usage": True})
        assert events[-1]["usage"]["completion_tokens"] == 8
        for index in range(2):
            first, second = choices_of(events, index)
            assert (first["text"], second["text"]) == ("xyab", "cd")
            assert first["logprobs"]["tokens"][-4:] == ["x", "y", "a", "b"]
            assert len(first["prompt_logprobs"]) == 3
            assert second["logprobs"]["text_offset"] == [4, 5]
            assert (first["finish_reason"], second["finish_reason"]) == (None, "length")
        chat = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True}
        chat |= {"logprobs": True, "max_tokens": 4}
        events = server.events("/v1/chat/completions", chat)
        for index in range(2):
            deltas = [c["delta"].get("content", "") for c in choices_of(events, index)]
            assert "".join(deltas) == "abcd"


def test_tokens_of_one_text_keep_the_likeliest():
    class Alike(FakeEngine):
        def _outputs(self, text, ids, params, request_id):
            (output,) = super()._outputs(text, ids, params, request_id)
            output.outputs[0].logprobs = [
                {
                    1: Logprob(-3.0, 3, "\ufffd"),
                    2: Logprob(-0.5, 1, "\ufffd"),
                    105: Logprob(-1, 2, "i"),
                }
            ]
            output.outputs[0].token_ids = [105]
            yield output

    with running(Alike(config=configured())) as server:
        columns = ask(server, "x", logprobs=3)["choices"][0]["logprobs"]
    assert columns["top_logprobs"] == [{"\ufffd": -0.5, "i": -1.0}]


def test_log_probabilities_may_name_tokens_by_id(server):
    fields = {"logprobs": 2, "echo": True, "max_tokens": 3, "ignore_eos": True}
    names = ask(server, "ab", **fields)["choices"][0]["logprobs"]
    columns = ask(server, "ab", **fields, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in columns["tokens"])
    assert all(len(top) >= 2 for top in columns["top_logprobs"] if top is not None)
    assert columns["text_offset"] == names["text_offset"]
    assert columns["token_logprobs"] == names["token_logprobs"]


class Live:
    num_prompt_tokens, num_cached_tokens, num_computed_tokens = 10, 0, 4

    def __init__(self, external_id):
        self.external_id = external_id


@dataclasses.dataclass
class Computing(HeldEngine):
    """Answers once it has been asked twice for the progress of all streams at once."""

    streams: int = 1
    polls: list = dataclasses.field(default_factory=list)

    async def live_requests(self, external_ids=None):
        self.polls.append(len(external_ids))
        if self.polls.count(self.streams) == 2:
            self.go_on.set()
        return [Live(name) for name in external_ids]


def test_progress_of_all_prompts_is_summed():
    engine = Computing(streams=2, text="one", config=configured())
    with running(engine) as server:
        fields = {"request_id": "p", "stream_options": {"include_progress": True}}
        events = stream(server, ["a", "b"], **fields)
    assert events[0]["prompt_progress"]["total"] == 20
    assert events[0]["prompt_progress"]["processed"] == 8
    assert set(engine.polls) == {2}


@pytest.mark.nightly
def test_the_engine_is_asked_once_for_the_progress_of_all_streams():
    engine = Computing(streams=8, text="one", config=configured())
    with running(engine) as server, ThreadPoolExecutor(8) as pool:
        fields = {"stream_options": {"include_progress": True}}
        answers = list(
            pool.map(lambda i: stream(server, "a", request_id=f"p{i}", **fields), range(8))
        )
        assert all(events[0]["prompt_progress"]["total"] == 10 for events in answers)
        made = len(engine.polls)
        assert engine.polls.count(8) >= 2, "one call is for all streams"
        time.sleep(0.4)
        assert len(engine.polls) == made, "no stream is left"
