"""OpenAI's and Anthropic's Python clients, and `hardpoint serve` with the demo model."""

import json

import anthropic
import openai
import pytest
from support.scripted_server import user

pytestmark = pytest.mark.nightly

GREEDY = {"model": "smollm2", "temperature": 0}
CLAUDES = {"model": "smollm2", "extra_body": {"temperature": 0}}
QUESTION = user("Name the capital of France.")


@pytest.fixture
def client(demo_url):
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def claude(demo_url):
    with anthropic.Anthropic(base_url=demo_url, api_key="none", max_retries=0) as opened:
        yield opened


def test_every_route_gives_the_same_answer(client, claude):
    chat = client.chat.completions.create(messages=QUESTION, max_tokens=30, **GREEDY)
    text = chat.choices[0].message.content
    assert "Paris" in text
    chunks = client.chat.completions.create(
        messages=QUESTION,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == text
    response = client.responses.create(input=QUESTION, max_output_tokens=30, **GREEDY)
    assert response.output_text == text
    with client.responses.stream(input=QUESTION, max_output_tokens=30, **GREEDY) as stream:
        assert stream.get_final_response().output_text == text
    message = claude.messages.create(messages=QUESTION, max_tokens=30, **CLAUDES)
    assert message.content[0].text == text
    assert message.usage.output_tokens == chat.usage.completion_tokens
    with claude.messages.stream(messages=QUESTION, max_tokens=30, **CLAUDES) as stream:
        assert "".join(stream.text_stream) == text
    counted = claude.messages.count_tokens(messages=QUESTION, model="smollm2")
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_completions_with_log_probabilities(client):
    answer = client.completions.create(
        prompt="The capital of France is", max_tokens=3, logprobs=2, echo=True, n=2, **GREEDY
    )
    first, second = answer.choices
    assert first.text == second.text
    assert first.text.startswith("The capital of France is Paris")
    assert "".join(first.logprobs.tokens) == first.text
    assert first.logprobs.token_logprobs[0] is None
    for token, top in zip(
        first.logprobs.tokens[-3:], first.logprobs.top_logprobs[-3:], strict=True
    ):
        assert max(top, key=top.get) == token  # it is greedy


def test_an_answer_of_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    form = {"name": "city", "schema": schema, "strict": True}
    answer = client.chat.completions.create(
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": form},
        max_tokens=200,
        **GREEDY,
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "big"}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_call(client, choice):
    """The template of the demo model shows no tools: a grammar writes the call."""
    schema = {
        "type": "object",
        "properties": {"celsius": {"type": "boolean"}},
        "required": ["celsius"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    answer = client.chat.completions.create(
        messages=QUESTION,
        tools=[tool],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=60,
        **GREEDY,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"celsius"}


def test_errors_are_their_exceptions(client, claude):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="does not show the model any tools"):
        client.chat.completions.create(messages=QUESTION, tools=[tool], **GREEDY)
    with pytest.raises(openai.NotFoundError, match="model: expected 'smollm2'"):
        client.chat.completions.create(messages=QUESTION, model="gpt-5")
    with pytest.raises(anthropic.NotFoundError, match="model: expected 'smollm2'"):
        claude.messages.create(messages=QUESTION, max_tokens=5, model="claude")
    wrong = {"temperature": -1}
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(messages=QUESTION, max_tokens=5, model="smollm2", extra_body=wrong)
