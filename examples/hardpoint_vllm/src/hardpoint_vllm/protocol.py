"""vLLM's objects for output parsers: messages, calls of tools, requests, and base classes."""

from __future__ import annotations

import json
import uuid
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

ClassT = TypeVar("ClassT", bound=type)


def make_tool_call_id(**_: Any) -> str:
    """Return the id of a new call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class _Model:
    """Fields by keyword with defaults, as vLLM's pydantic models have them."""

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **fields: Any) -> None:
        """Set the fields.

        Raises:
            TypeError: there is no such field.
        """
        if unknown := fields.keys() - self.defaults.keys():
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        for name, default in self.defaults.items():
            value = fields.get(name, default)
            setattr(self, name, value() if callable(value) else value)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {
            name: _dumped(getattr(self, name), exclude_none)
            for name in self.defaults
            if not (exclude_none and getattr(self, name) is None)
        }

    def __class_getitem__(cls, parameters: Any) -> type[_Model]:
        """Return the class: type parameters of vLLM's models are for validation."""
        return cls

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.defaults)
        return f"{type(self).__name__}({fields})"


def _dumped(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, _Model):
        return value.model_dump(exclude_none=exclude_none)
    if isinstance(value, list):
        return [_dumped(item, exclude_none) for item in value]
    return value


class FunctionCall(_Model):
    """The function of a call."""

    defaults: ClassVar[Mapping[str, Any]] = {"id": None, "name": "", "arguments": ""}


class ToolCall(_Model):
    """A call of a tool."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "id": None,  # the engine makes it
        "type": "function",
        "function": None,
    }


class DeltaFunctionCall(_Model):
    """A part of the function of a call."""

    defaults: ClassVar[Mapping[str, Any]] = {"name": None, "arguments": None}


class DeltaToolCall(_Model):
    """A part of a call."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "id": None,
        "type": None,
        "index": 0,
        "function": None,
    }


class ExtractedToolCallInformation(_Model):
    """The calls and the content of an output."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "tools_called": False,
        "tool_calls": list,
        "content": None,
    }


class DeltaMessage(_Model):
    """A part of an output. `reasoning_content` is the former name of `reasoning`."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "role": None,
        "content": None,
        "reasoning": None,
        "reasoning_content": None,
        "tool_calls": list,
    }


class ChatCompletionRequest(_Model):
    """The fields of a chat request that parsers read."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "",
        "messages": list,
        "tools": None,
        "tool_choice": None,
        "parallel_tool_calls": True,
        "skip_special_tokens": True,
        "include_reasoning": True,
        "structured_outputs": None,
        "response_format": None,
        "chat_template_kwargs": dict,
        "stream": False,
        **dict.fromkeys(
            (
                "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens",
                "max_tokens", "min_p", "n", "presence_penalty", "reasoning_effort",
                "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_logprobs",
                "top_p", "user",
            )
        ),
    }  # fmt: skip


class ResponsesRequest(ChatCompletionRequest):
    """A request of `/v1/responses`: no parser gets one here."""


class IOProcessorRequest(_Model):
    """A request of `/pooling` for an IO processor."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "model": None,
        "priority": 0,
        "data": None,
        "task": "plugin",
        "softmax": None,
        "activation": None,
    }


class IOProcessorResponse(_Model):
    """The answer of `/pooling` from an IO processor."""

    defaults: ClassVar[Mapping[str, Any]] = {"request_id": None, "created_at": 0, "data": None}


def tool_of(name: str, schema: Mapping[str, Any]) -> SimpleNamespace:
    """Return a tool as requests of vLLM have it."""
    function = SimpleNamespace(name=name, description=None, parameters=dict(schema), strict=None)
    fields = {"type": "function", "function": {"name": name, "parameters": dict(schema)}}

    def model_dump(**_: Any) -> dict[str, Any]:
        return fields

    return SimpleNamespace(type="function", function=function, model_dump=model_dump)


class _Parser(ABC):
    """Common members of vLLM's parsers."""

    model_tokenizer: Any

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The token ids by text."""
        vocabulary: dict[str, int] = self.model_tokenizer.get_vocab()
        return vocabulary

    def adjust_request(self, request: Any) -> Any:
        """Return the request."""
        return request


class ReasoningParser(_Parser):
    """vLLM's base class of reasoning parsers."""

    engine_based_streaming = False
    reasoning_start_str: Any = None
    reasoning_end_str: Any = None

    def __init__(self, tokenizer: Any, *_: Any, **__: Any) -> None:
        """Keep the tokenizer."""
        self.model_tokenizer = tokenizer

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Return reasoning and content of an output."""
        raise NotImplementedError

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the reasoning ends in token ids."""
        raise NotImplementedError


class BaseThinkingReasoningParser(ReasoningParser):
    """vLLM's base class of reasoning parsers with a start token and an end token."""

    start_token: Any = None
    end_token: Any = None

    def __init__(self, tokenizer: Any, *arguments: Any, **options: Any) -> None:
        """Look the tokens up.

        Raises:
            ValueError: the class names no tokens.
            RuntimeError: the tokenizer has no such tokens.
        """
        super().__init__(tokenizer, *arguments, **options)
        if not self.start_token or not self.end_token:
            raise ValueError("start_token and end_token must be defined in subclasses")
        start, end = self.vocab.get(self.start_token), self.vocab.get(self.end_token)
        if start is None or end is None:
            raise RuntimeError(
                f"{type(self).__name__} reasoning parser could not locate think start/end tokens "
                f"in the tokenizer!"
            )
        self.start_token_id, self.end_token_id = start, end

    @property
    def reasoning_start_str(self) -> Any:
        """The text of the start token."""
        return self.start_token

    @property
    def reasoning_end_str(self) -> Any:
        """The text of the end token."""
        return self.end_token

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the last of both tokens is the end token."""
        markers = [i for i in input_ids if i in (self.start_token_id, self.end_token_id)]
        return bool(markers) and markers[-1] == self.end_token_id

    def is_reasoning_end_streaming(self, _ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Return whether the end token is among new token ids."""
        return self.end_token_id in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return the token ids after the end token."""
        if self.end_token_id not in input_ids[:-1]:
            return []
        return input_ids[input_ids.index(self.end_token_id) + 1 :]

    def extract_reasoning(
        self,
        model_output: str,
        request: Any,  # noqa: ARG002 - as vLLM's
    ) -> tuple[str | None, str | None]:
        """Return the texts before and after the end token; without one, all is reasoning."""
        before, start, after = model_output.partition(self.start_token)
        reasoning, end, content = (after if start else before).partition(self.end_token)
        return reasoning, (content or None) if end else None

    def extract_reasoning_streaming(
        self,
        previous_text: str,  # noqa: ARG002 - as vLLM's
        current_text: str,  # noqa: ARG002
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],  # noqa: ARG002
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Return the new part of an output."""
        start, end = self.start_token_id, self.end_token_id
        if list(delta_token_ids) in ([start], [end]):
            return None
        if start not in (*previous_token_ids, *delta_token_ids) or end in previous_token_ids:
            return DeltaMessage(content=delta_text)
        text = delta_text.partition(self.start_token)[2] if start in delta_token_ids else delta_text
        reasoning, _, content = text.partition(self.end_token)
        return DeltaMessage(reasoning=reasoning, content=content or None)


class ToolParser(_Parser):
    """vLLM's base class of tool parsers."""

    engine_based_streaming = False
    supports_required_and_named = True
    structural_tag_model: str | None = None

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None) -> None:
        """Keep the tokenizer and the tools."""
        self.model_tokenizer = tokenizer
        self.tools = list(tools or ())
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    def get_remaining_unstreamed_args(self) -> str:
        """Return the arguments that were parsed and not streamed."""
        if not self.prev_tool_call_arr:
            return ""
        index = len(self.prev_tool_call_arr) - 1
        arguments = self.prev_tool_call_arr[index].get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        sent = self.streamed_args_for_tool[index : index + 1]
        done = sent[0] if sent else ""
        return text[len(done) :] if text.startswith(done) else ""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Return the calls and the content of an output."""
        raise NotImplementedError


class _Manager:
    """vLLM's registry of parsers: the decorator returns the class, which is enabled by FQCN."""

    @classmethod
    def register_module(
        cls,
        name: str | list[str] | None = None,  # noqa: ARG003 - as vLLM's
        force: bool = True,  # noqa: ARG003
        module: ClassT | None = None,
    ) -> ClassT | Callable[[ClassT], ClassT]:
        """Return the class, or a decorator that does."""
        return module if module is not None else lambda decorated: decorated

    @classmethod
    def _refuse(cls, name: str) -> type:
        raise KeyError(
            f"{name!r}: parsers run in the engine: reasoning.parser and tools.parser of the "
            f"configuration name them, and outputs have `reasoning`, `content` and `tool_calls` "
            f"(docs/write-an-output-parser.md)"
        )

    get_reasoning_parser = get_tool_parser = _refuse

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Do nothing: parsers are enabled by FQCN."""


class ReasoningParserManager(_Manager):
    """vLLM's registry of reasoning parsers."""


class ToolParserManager(_Manager):
    """vLLM's registry of tool parsers."""


class TokenizerLike:
    """vLLM's type of tokenizers, for annotations."""


_MESSAGES = {
    "DeltaFunctionCall": DeltaFunctionCall,
    "DeltaMessage": DeltaMessage,
    "DeltaToolCall": DeltaToolCall,
    "ExtractedToolCallInformation": ExtractedToolCallInformation,
    "FunctionCall": FunctionCall,
    "ToolCall": ToolCall,
}
_REQUESTS = {
    "ChatCompletionRequest": ChatCompletionRequest,
    "ChatCompletionToolsParam": SimpleNamespace,
    "ResponsesRequest": ResponsesRequest,
}
_POOLING = {
    "IOProcessorRequest": IOProcessorRequest,
    "IOProcessorResponse": IOProcessorResponse,
}
_TOOLS = {"ToolParser": ToolParser, "ToolParserManager": ToolParserManager}
_REASONING = {
    "ReasoningParser": ReasoningParser,
    "ReasoningParserManager": ReasoningParserManager,
}
_TOKENIZERS = {"TokenizerLike": TokenizerLike, "AnyTokenizer": TokenizerLike}
MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm.entrypoints": {},
    "vllm.entrypoints.chat_utils": {"make_tool_call_id": make_tool_call_id},
    "vllm.entrypoints.generate": {},
    "vllm.entrypoints.generate.base": {},
    "vllm.entrypoints.generate.base.protocol": _MESSAGES,
    "vllm.entrypoints.openai": {},
    "vllm.entrypoints.openai.protocol": _MESSAGES | _REQUESTS | _POOLING,
    "vllm.entrypoints.openai.engine": {},
    "vllm.entrypoints.openai.engine.protocol": _MESSAGES,
    "vllm.entrypoints.openai.chat_completion": {},
    "vllm.entrypoints.openai.chat_completion.protocol": _MESSAGES | _REQUESTS,
    "vllm.entrypoints.openai.responses": {},
    "vllm.entrypoints.openai.responses.protocol": _REQUESTS,
    "vllm.entrypoints.openai.tool_parsers": _TOOLS,
    "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser": _TOOLS,
    "vllm.entrypoints.pooling": {},
    "vllm.entrypoints.pooling.pooling": {},
    "vllm.entrypoints.pooling.pooling.protocol": _POOLING,
    "vllm.reasoning": {**_REASONING, "BaseThinkingReasoningParser": BaseThinkingReasoningParser},
    "vllm.reasoning.abs_reasoning_parsers": _REASONING,
    "vllm.reasoning.basic_parsers": {"BaseThinkingReasoningParser": BaseThinkingReasoningParser},
    "vllm.tokenizers": _TOKENIZERS,
    "vllm.tool_parsers": _TOOLS,
    "vllm.tool_parsers.abstract_tool_parser": _TOOLS,
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": _TOKENIZERS,
}
"""Names by module, where vLLM is not installed."""
