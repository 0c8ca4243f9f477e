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
from hardpoint.toolkit.parsing.format_parser import Content, FormatParser, Reasoning, State

Tag = Annotated[str, Meta(min_length=1)]


class ThinkTags(FormatParser):
    """Reasoning between the tags `<think>` and `</think>`.

    DeepSeek-R1 (arXiv:2501.12948), Qwen3 (arXiv:2505.09388), QwQ and GLM write them. The tags
    belong to neither part; everything else is kept unchanged, white space included.
    """

    contract = 2
    roles = ("reasoning",)
    template_marks = ("<think>", "</think>")
    reasoning = "thinking"

    class Options(plugins.Options):
        """The tags.

        Attributes:
            start: start tag.
            end: end tag.
            starts_inside: whether every output begins inside the reasoning, also where the prompt
                does not end with the start tag.
        """

        start: Tag = "<think>"
        end: Tag = "</think>"
        starts_inside: bool = False

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

    def states(self) -> Mapping[str, State]:
        """Return content and thinking."""
        return {
            "content": State(Content, {self.options.start: "thinking"}),
            "thinking": State(Reasoning, {self.options.end: "content"}),
        }

    def markers(self) -> ReasoningMarkers:
        """Return the token ids of the tags; often one token each."""
        return msgspec.structs.replace(super().markers(), begins_open=self.options.starts_inside)
