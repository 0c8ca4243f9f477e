"""Errors of the engine name the fields that requests have, in every family."""

import asyncio
import inspect

import msgspec
import openai
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import WEATHER, user

from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.dialects.chat.request import ChatCompletionRequest
from hardpoint.builtin_plugins.server.dialects.completions.request import CompletionRequest
from hardpoint.builtin_plugins.server.dialects.messages import MessagesRequest
from hardpoint.builtin_plugins.server.dialects.responses.request import ResponsesRequest
from hardpoint.builtin_plugins.server.errors import answer_error
from hardpoint.builtin_plugins.server.routes.fields import renamed
from hardpoint.errors import PromptTooLongError
from hardpoint.plugins import CompletionOutput, RequestError, RequestOutput, SamplingParams

CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
NOT = {"type": "object", "properties": {"a": {"not": {"uniqueItems": True}}}}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT, "strict": True}}
KEYS = (
    "properties.a.not: expected a schema of constants, types, limits and required properties, not "
    "the keyword uniqueItems"
)
LATER = "`strict: false` checks it at the end instead"


@pytest.fixture(scope="module")
def fake():
    with running(FakeEngine(config=configured())) as running_server:
        yield running_server


def refused(server, path, body):
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"], error["code"]


def strict_tool():
    function = {**WEATHER["function"], "strict": True, "parameters": NOT}
    return {"type": "function", "function": function}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param", "advice"),
    [
        (CHAT, {"response_format": STRICT}, "response_format.json_schema.schema", LATER),
        (
            CHAT,
            {"structured_outputs": {"json": NOT}},
            "structured_outputs.json",
            "`lenient: true` checks it at the end instead",
        ),
        (CHAT, {"guided_json": NOT}, "guided_json", "structured_outputs with `lenient: true`"),
        (CHAT, {"tools": [strict_tool()]}, "tools", "`strict: false` of the tool leaves it out"),
        (TEXT, {"guided_json": NOT}, "guided_json", "structured_outputs with `lenient: true`"),
        (
            TOKENS,
            {"sampling_params": {"structured_outputs": {"json": NOT}}},
            "sampling_params.structured_outputs.json",
            "`lenient: true` checks it at the end instead",
        ),
    ],
)
def test_schemas_that_cannot_be_enforced(server, path, fields, param, advice, stream):
    prompts = {CHAT: {"messages": user("hi")}, TEXT: {"prompt": "hi"}, TOKENS: {"token_ids": [9]}}
    path_of_error, message, _ = refused(server, path, {**prompts[path], **fields, "stream": stream})
    assert path_of_error == param
    assert message.startswith(f"{param}: {KEYS}; ")
    assert advice in message
    assert "llguidance" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [strict_tool()], "response_format": {"type": "json_object"}},
        {"tools": [WEATHER], "response_format": STRICT},
    ],
)
def test_schemas_of_a_text_and_of_calls(server, fields):
    param, message, _ = refused(server, CHAT, {"messages": user("hi"), **fields})
    advice = "of what is not strict, it is left out"
    assert (param, message) == (None, f"response_format and tools: {KEYS}; {advice}")


def of_engine(error):
    """Return an engine's outputs that end with an error, raised or of a completion."""

    async def outputs():
        if isinstance(error, Exception):
            raise error
        ended = CompletionOutput(index=0, text="", token_ids=[])
        ended.finish_reason, ended.error = "error", error
        yield RequestOutput(
            request_id="0", prompt="", prompt_token_ids=[1], outputs=[ended], finished=True
        )

    return outputs()


def answered(body, error):
    async def read():
        return [output async for output in renamed(of_engine(error), (), body)]

    with pytest.raises(RequestError) as raised:
        asyncio.run(read())
    detail = answer_error(raised.value).detail
    return detail.param, detail.message, detail.code


LATE = (
    f"structured.json: llguidance: {KEYS}; with `lenient`, the grammar leaves it out, and the "
    "finished answer is validated against the whole schema"
)
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": NOT, "strict": True}}
OUTPUT_FORMAT = {"format": {"type": "json_schema", "schema": NOT}}


@pytest.mark.parametrize("error", [LATE, RequestError(LATE)], ids=["late", "raised"])
@pytest.mark.parametrize(
    ("type_", "body", "param", "advice"),
    [
        (ResponsesRequest, {"input": "x", "text": TEXT_FORMAT}, "text.format.schema", LATER),
        (
            MessagesRequest,
            {"messages": user("x"), "max_tokens": 9, "output_config": OUTPUT_FORMAT},
            "output_config.format.schema",
            "structured_outputs with `lenient: true` checks it at the end instead",
        ),
    ],
)
def test_schemas_of_other_families(type_, body, param, advice, error):
    request = msgspec.convert(body, type_)
    assert answered(request, error) == (param, f"{param}: {KEYS}; {advice}", None)


@pytest.mark.parametrize(
    ("type_", "body", "param"),
    [
        (ChatCompletionRequest, {"messages": user("x")}, "messages"),
        (ResponsesRequest, {"input": "x"}, "input"),
        (MessagesRequest, {"messages": user("x"), "max_tokens": 9}, "messages"),
        (CompletionRequest, {"prompt": "x"}, "prompt"),
    ],
)
def test_too_long_a_prompt(type_, body, param):
    request = msgspec.convert(body, type_)
    assert answered(request, PromptTooLongError.of(9000, 8192)) == (
        param,
        f"{param}: the prompt is too long: 9000 tokens; this model's maximum context length is "
        "8192 tokens, less one to generate",
        "context_length_exceeded",
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": user("x" * 2000)}, "messages"),
        (TEXT, {"prompt": "x" * 2000}, "prompt"),
        (TEXT, {"prompt": ["x", "x" * 2000]}, "prompt[1]"),
        (TOKENS, {"token_ids": [9] * 2000}, "token_ids"),
    ],
)
def test_too_long_a_prompt_is_known_by_its_code(server, path, body, param):
    path_of_error, message, code = refused(server, path, body)
    assert (path_of_error, code) == (param, "context_length_exceeded")
    assert "this model's maximum context length is 1024 tokens" in message
    assert message.startswith(f"{param}: the prompt is too long: ")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            CHAT,
            {"messages": user("x"), "min_tokens": 5, "max_completion_tokens": 1},
            "min_tokens: expected at most max_completion_tokens (1), got 5",
        ),
        (
            CHAT,
            {"messages": user("x"), "min_tokens": 5, "max_tokens": 1},
            "min_tokens: expected at most max_tokens (1), got 5",
        ),
        (
            TOKENS,
            {"token_ids": [9], "sampling_params": {"plugin_args": {"zz": {}}}},
            "sampling_params.plugin_args.zz: ",
        ),
    ],
)
def test_names_of_fields(server, path, body, message):
    assert refused(server, path, body)[1].startswith(message)


@pytest.mark.parametrize(
    ("type_", "body", "field", "place"),
    [
        (ResponsesRequest, {"input": "x"}, "text", TEXT_FORMAT),
        (MessagesRequest, {"messages": user("x"), "max_tokens": 9}, "output_config", OUTPUT_FORMAT),
    ],
)
def test_schemas_that_are_none(type_, body, field, place):
    wrong = {"format": {**place["format"], "schema": {"type": "nothing"}}}
    request = msgspec.convert({**body, field: wrong}, type_)
    path = f"{field}.format.schema.type"
    with pytest.raises(RequestError, match=f"^{path}: "):
        request.sampling_params(SamplingParams(), ServerLimits())


@pytest.mark.parametrize(
    ("create", "type_"),
    [
        (openai.resources.chat.Completions.create, ChatCompletionRequest),
        (openai.resources.Completions.create, CompletionRequest),
    ],
)
def test_every_field_of_the_official_client_is_known(create, type_):
    of_transport = {"self", "extra_headers", "extra_query", "extra_body"}
    names = inspect.signature(create).parameters.keys() - of_transport
    assert len(names) > 15
    known = {*type_.__struct_fields__, *type_.ignored, *type_.refused}
    assert names <= known, names - known


def test_prompts_and_completions_count_together(fake):
    limits = fake.engine.config.server.limits
    many = ["x"] * (max(limits.prompts, limits.n) // limits.n + 1)
    message = refused(fake, TEXT, {"prompt": many, "n": limits.n})[1]
    assert message == (
        f"prompt and n: expected at most {max(limits.prompts, limits.n)} completions on this "
        f"server (server.limits.prompts), got {len(many)} prompts with n {limits.n}"
    )
    body = {"prompt": many[:-1], "n": limits.n, "max_tokens": 1}
    assert fake.post(TEXT, body).status_code == 200
