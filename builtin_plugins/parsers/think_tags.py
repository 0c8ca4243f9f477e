"""Reasoning between two tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from hardpoint import plugins
from hardpoint.plugins import (
    ConfigError,
    Meta,
    OutputParserContext,
    ReasoningMarkers,
)
from hardpoint.toolkit.parsing.format_parser import (
    BeforeAnswer,
    Content,
    FormatParser,
    ParserState,
    Reasoning,
)

Tag = Annotated[str, Meta(min_length=1)]


class ThinkTags(FormatParser):
    """Reasoning between the tags `<think>` and `</think>`.

    DeepSeek-R1 (arXiv:2501.12948), Qwen3 (arXiv:2505.09388), QwQ and GLM write them. The tags
    belong to neither part; everything else is kept unchanged, white space included. Reasoning
    comes before the answer: behind other text, a start tag is text.

    If the prompt ends with the start tag, the output begins inside the reasoning.
    """

    contract = 2
    roles = ("reasoning",)
    other_names = (
        *("deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "kimi_k2"),
        *("mimo", "minimax_m2", "nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
    )
    template_marks = ("<think>", "</think>")
    reasoning = "thinking"

    class Options(plugins.Options):
        """The tags.

        Attributes:
            start: start tag.
            end: end tag.
            starts_inside: whether every output begins inside the reasoning, also if the prompt
                does not end with the start tag.
            calls: special tokens that begin a call and end the reasoning, in requests with
                tools, because some models forget the end tag.
        """

        start: Tag = "<think>"
        end: Tag = "</think>"
        starts_inside: bool = False
        calls: tuple[Tag, ...] = (
            *("<tool_call>", "<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        )

    options: Options

    def __init__(self, context: OutputParserContext) -> None:
        """Create the parser.

        Raises:
            ConfigError: the tags are equal.
        """
        if context.options.start == context.options.end:
            raise ConfigError(
                f"plugin.{context.name}.end: expected another tag than start, "
                f"got {context.options.end!r} for both"
            )
        super().__init__(context)

    def states(self) -> Mapping[str, ParserState]:
        """Return the beginning, thinking and content."""
        return {
            "start": ParserState(BeforeAnswer, {self.options.start: "thinking"}),
            "content": ParserState(Content, {}),
            "thinking": ParserState(
                Reasoning,
                {self.options.end: "content"},
                calls=dict.fromkeys(self.options.calls, "content"),
            ),
        }

    def markers(self) -> ReasoningMarkers:
        """Return the token ids of the tags; often one token each."""
        return msgspec.structs.replace(super().markers(), begins_open=self.options.starts_inside)
