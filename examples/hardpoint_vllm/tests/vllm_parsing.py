"""Parsers that import vLLM, as published packages have them."""

import re
from collections.abc import Sequence

from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.logger import init_logger
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers import ToolParser, ToolParserManager

logger = init_logger(__name__)


@ReasoningParserManager.register_module("pipes")
class Pipes(ReasoningParser):
    """Reasoning before `||`."""

    reasoning_end_str = "||"

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return False

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def extract_reasoning(self, model_output: str, request: ChatCompletionRequest):
        reasoning, end, content = model_output.partition("||")
        return (reasoning, content or None) if end else (None, model_output)

    def extract_reasoning_streaming(
        self, previous, current, delta, previous_ids, current_ids, delta_ids
    ):
        if "||" in previous:
            return DeltaMessage(content=delta)
        reasoning, _, content = delta.partition("||")
        return DeltaMessage(reasoning=reasoning or None, content=content or None)


@ToolParserManager.register_module(["arrows"])
class Arrows(ToolParser):
    """Calls as `->NAME{JSON}`, one a line."""

    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
        assert tokenizer.get_vocab()["a"] == tokenizer.encode("a", add_special_tokens=False)[0]

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest):
        calls = re.findall(r"->(\w+)({.*})", model_output)
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[
                ToolCall(function=FunctionCall(name=name, arguments=text)) for name, text in calls
            ],
            content=model_output.partition("->")[0] or None,
        )

    def extract_tool_calls_streaming(
        self, previous, current, delta, previous_ids, current_ids, delta_ids, request
    ):
        content = current.partition("->")[0][len(previous.partition("->")[0]) :]
        match = re.search(r"->(\w+)({.*})", current)
        if match is None or self.current_tool_id == 0:
            return DeltaMessage(content=content) if content else None
        self.current_tool_id = 0
        function = DeltaFunctionCall(name=match[1], arguments=match[2])
        calls = [DeltaToolCall(index=0, id="c1", function=function)]
        return DeltaMessage(content=content or None, tool_calls=calls)


class Raises(Arrows):
    """Fails for every output."""

    def extract_tool_calls(self, model_output, request):
        raise KeyError("broken")


class WithoutMethod(ToolParser):
    """Lacks extract_tool_calls."""


class Tags(ReasoningParser):
    """Derives from the base class, and has a constructor with more arguments."""

    def __init__(self, tokenizer, *args, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.start_token, self.end_token = "<t>", "</t>"

    def extract_reasoning(self, model_output, request):
        assert request.tools is None or request.tools[0].function.name == "now"
        head, end, tail = model_output.removeprefix(self.start_token).partition(self.end_token)
        return head, tail if end else None
