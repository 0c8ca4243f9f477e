"""Reasoning parser of models that put their thinking between two tags."""

from __future__ import annotations

from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import (
    ConfigError,
    Meta,
    ReasoningContext,
    ReasoningMarkers,
    ReasoningParser,
)

Tag = Annotated[str, Meta(min_length=1)]


class ThinkTags(ReasoningParser):
    """Splits reasoning from content at the tags `<think>` and `</think>`.

    DeepSeek-R1 (arXiv:2501.12948) and Qwen3 (arXiv:2505.09388) use them. The tags belong to neither
    part; everything else is kept unchanged, white space included.
    """

    contract = 1

    class Options(plugins.Options):
        """The tags.

        Attributes:
            start: start tag.
            end: end tag.
            starts_inside: whether the chat template writes `start`, so that an output without any
                tag is unfinished thinking; otherwise it is content.
        """

        start: Tag = "<think>"
        end: Tag = "</think>"
        starts_inside: bool = False

    context: ReasoningContext
    options: Options

    def __init__(self, context: ReasoningContext) -> None:
        """Create the parser.

        Raises:
            ConfigError: the tags are equal.
        """
        super().__init__(context)
        if self.options.start == self.options.end:
            raise ConfigError(
                f"plugin.{self.name}.end: expected another tag than start, "
                f"got {self.options.end!r} for both"
            )

    def markers(self) -> ReasoningMarkers:
        """Return the token ids of the tags; often one token each."""
        encode = self.context.tokenizer.encode
        return ReasoningMarkers(
            start=encode(self.options.start, add_special_tokens=False),
            end=encode(self.options.end, add_special_tokens=False),
        )

    def split(self, text: str) -> tuple[str | None, str]:
        """Split a whole output into (reasoning, content).

        An end tag without a start tag ends thinking that the template began. A missing end tag
        means that the output was cut off while thinking. Several blocks are joined. Reasoning of
        white space alone counts as none.
        """
        start, end = self.options.start, self.options.end
        reasoning: list[str] = []
        content: list[str] = []
        thinking = self._starts_inside(text)
        while text:
            part, _, text = text.partition(end if thinking else start)
            (reasoning if thinking else content).append(part)
            thinking = not thinking
        thought = "".join(reasoning)
        return (thought if thought.strip() else None), "".join(content)

    def _starts_inside(self, text: str) -> bool:
        first_start, first_end = text.find(self.options.start), text.find(self.options.end)
        if first_start >= 0:
            return 0 <= first_end < first_start
        return first_end >= 0 or self.options.starts_inside
