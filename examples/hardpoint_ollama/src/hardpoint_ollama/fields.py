"""Bodies of Ollama's API. Unknown fields are ignored, as Ollama does."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

KeepAlive = float | str
Effort = bool | str


class Options(msgspec.Struct, kw_only=True):
    """Sampling parameters; options of the model's memory and threads are ignored.

    Attributes:
        num_predict: maximum length of the answer; without it, or if it is not above 0, the answer
            has the rest of the context.
        repeat_penalty: `repetition_penalty`.
        repeat_last_n: 0 turns the penalty off; another value penalizes all tokens.
    """

    num_predict: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    stop: list[str] | str | None = None


class CalledFunction(msgspec.Struct):
    """The function of a tool call.

    Attributes:
        arguments: by parameter.
    """

    name: str
    arguments: dict[str, Any] = {}


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of the assistant.

    Attributes:
        id: name of the call; may be missing.
    """

    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """A message of a conversation.

    Attributes:
        images: in base64, without a prefix.
        tool_name: name of the tool, of its result.
        tool_call_id: id of the call, of its result.
    """

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class TextRequest(msgspec.Struct, kw_only=True):
    """Fields of the routes that generate text.

    Attributes:
        stream: send the answer as it comes, one JSON object in a line.
        format: "json", or a JSON schema of the answer.
        options: sampling parameters.
        think: whether the model thinks, or how much: "low", "medium", "high" or "max".
        keep_alive: ignored: the model stays loaded.
        logprobs: whether the answer holds log-probabilities.
        top_logprobs: number of alternatives per position.
    """

    model: Annotated[str, Meta(min_length=1)]
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: Effort | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class ChatRequest(TextRequest, kw_only=True):
    """A conversation to answer; without messages, the model is loaded."""

    messages: list[Message] = []
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(TextRequest, kw_only=True):
    """A prompt to answer; without a prompt, the model is loaded.

    Attributes:
        suffix: text after the answer.
        raw: whether the prompt is used without the chat template.
        template, context: not supported.
    """

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool = False
    images: list[str] | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """Texts to embed.

    Attributes:
        truncate: whether texts that are too long lose their end.
        dimensions: number of dimensions of the vectors.
        keep_alive: ignored: the model stays loaded.
    """

    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str]
    truncate: bool = True
    dimensions: int | None = None
    keep_alive: KeepAlive | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """A text to embed, of the older route."""

    model: Annotated[str, Meta(min_length=1)]
    prompt: str
    keep_alive: KeepAlive | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """The model to describe; `name` is the older name of `model`."""

    model: str = ""
    name: str = ""
    verbose: bool = False
