"""OpenAI's Python client: requests are answered, and errors are its own exceptions."""

import json

import msgspec
import openai
import pydantic
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import LENGTH, WEATHER, scripted_server, user
from support.waiting import wait_until

from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.plugins import OverloadedError, RequestError
from hardpoint.plugins.server import Authenticator, Client

ENDED = "the engine is being restarted; send the request again"
"""The message to clients about an engine that died; the log has the details."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("model")) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as opened:
        yield opened


def client_of(server, **options):
    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


GREEDY = {"model": "scripted", "temperature": 0}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["scripted", "other"]
    assert client.models.retrieve("other").id == "other"


def test_chat(client):
    answer = client.chat.completions.create(messages=user("fox"), **GREEDY)
    assert answer.choices[0].message.content == "the quick brown fox jumps"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_streamed_chat(client):
    options = {"include_usage": True}
    with client.chat.completions.create(
        messages=user("fox"), stream=True, stream_options=options, **GREEDY
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "the quick brown fox jumps"
    assert chunks[-1].usage.completion_tokens == len(text) + 1
    with client.chat.completions.stream(messages=user("fox"), **GREEDY) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


class LaterFirst(FakeEngine):
    """Answers the last completion before the others."""

    def _outputs(self, text, ids, params, request_id):
        whole = self._output(text, ids, params, request_id, [("content", self.text)], last=True)
        for count, completion in enumerate(reversed(whole.outputs), 1):
            finished = count == len(whole.outputs)
            yield msgspec.structs.replace(whole, outputs=[completion], finished=finished)


def test_a_streamed_chat_whose_later_choices_answer_first():
    fields = {"model": "smollm2", "messages": user("x"), "n": 3}
    with (
        running(LaterFirst(text="hello", config=configured())) as server,
        client_of(server) as opened,
        opened.chat.completions.stream(**fields) as stream,
    ):
        choices = stream.get_final_completion().choices
    assert [(choice.index, choice.message.content) for choice in choices] == [
        (index, "hello") for index in range(3)
    ]


def test_completions(client):
    answer = client.completions.create(prompt=["say abc", "emoji"], logprobs=1, echo=True, **GREEDY)
    assert [choice.text for choice in answer.choices] == ["say abc abc abc abc", "emojigo 😀 on"]
    assert len(answer.choices[0].logprobs.tokens) == len("say abc abc abc abc") + 1
    stream = client.completions.create(prompt="say abc", stream=True, n=2, **GREEDY)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert set(texts.values()) == {" abc abc abc"}


def test_log_probabilities(client):
    answer = client.chat.completions.create(
        messages=user("hi"), logprobs=True, top_logprobs=2, **GREEDY
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens[:5]) == "hello"
    assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)


def test_tools_and_the_way_back(client):
    messages = user("weather")
    answer = client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    back = [*messages, answer.choices[0].message, result]
    client.chat.completions.create(messages=back, tools=[WEATHER], max_tokens=2, **GREEDY)
    with client.chat.completions.stream(messages=messages, tools=[WEATHER], **GREEDY) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert json.loads(streamed.function.arguments) == {"city": "Paris"}
    assert streamed.function.name == "get_weather"


class Verdict(pydantic.BaseModel):
    right: bool


def test_a_parsed_answer_and_the_way_back(client):
    answer = client.chat.completions.parse(messages=user("x"), response_format=Verdict, **GREEDY)
    message = answer.choices[0].message
    assert message.parsed.right in (True, False)
    client.chat.completions.create(
        messages=[*user("x"), message, *user("y")], max_tokens=2, **GREEDY
    )


def test_reasoning_and_what_is_not_openais(client):
    answer = client.chat.completions.create(
        messages=user("think"), extra_body={"top_k": 1, "min_tokens": 0}, **GREEDY
    )
    assert answer.choices[0].message.reasoning_content == "so it is"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


def test_errors_of_a_real_server(client):
    with pytest.raises(openai.BadRequestError, match="temperature: expected") as caught:
        client.chat.completions.create(messages=user("x"), model="scripted", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="model: expected") as caught:
        client.chat.completions.create(messages=user("x"), model="gpt-5")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="model: expected"):
        client.embeddings.create(input="x", model="gpt-5")
    with pytest.raises(openai.NotFoundError, match="there is no route"):
        client.images.generate(prompt="x")


class Key:
    async def authenticate(self, headers, path):
        return Client(name="me") if headers.get("authorization") == "Bearer right" else None


@pytest.mark.parametrize(
    ("error", "expected", "attempts"),
    [
        (RequestError("top_k: expected more"), openai.BadRequestError, 1),
        (OverloadedError("too many wait"), openai.RateLimitError, 2),
        (EngineDeadError(ENDED), openai.InternalServerError, 2),
        (PluginFaultError("plugin 'x' failed"), openai.InternalServerError, 1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_its_exceptions_and_retries_are_honoured(
    error, expected, attempts, stream, monkeypatch
):
    waits = []
    monkeypatch.setattr(openai.OpenAI, "_sleep_for_retry", lambda _, **at: waits.append(at))
    engine = FakeEngine(error=error, config=configured())
    with (
        running(engine) as server,
        client_of(server, max_retries=1) as client,
        pytest.raises(expected, match=str(error)),
    ):
        client.chat.completions.create(
            messages=user("x"), model=server.service.names[0], stream=stream
        )
    assert len(engine.asked) == attempts
    assert len(waits) == attempts - 1


def test_a_retry_waits_as_long_as_the_server_asks():
    engine = FakeEngine(error=OverloadedError("too many wait"), config=configured())
    with (
        running(engine) as server,
        client_of(server) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.chat.completions.create(messages=user("x"), model=server.service.names[0])
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.response.headers["x-request-id"] == caught.value.request_id


def test_a_wrong_key_is_its_exception():
    extensions = (("keys", Authenticator(authenticate=Key().authenticate)),)
    engine = FakeEngine(config=configured(), extensions=extensions)
    with running(engine) as server:
        with client_of(server) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(server, api_key="right") as client:
            assert client.models.list().data


def test_an_error_inside_a_stream_is_its_exception():
    engine = FakeEngine(error=EngineDeadError(ENDED), fails_after=2, config=configured())
    with running(engine) as server, client_of(server) as client:
        stream = client.chat.completions.create(
            messages=user("x"), model=server.service.names[0], stream=True
        )
        with pytest.raises(openai.APIError, match=ENDED):
            list(stream)


def test_a_closed_stream_frees_its_request(server, client):
    stream = client.chat.completions.create(
        messages=user("x"),
        stream=True,
        max_tokens=LENGTH - 50,
        extra_body={"ignore_eos": True},
        **GREEDY,
    )
    next(iter(stream))
    stream.close()
    wait_until(
        lambda: not server.call(server.engine.engines.live_requests), what="the end of the request"
    )
