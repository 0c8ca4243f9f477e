"""Reasoning parsers of models that put their thinking between two tags."""

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
    """Thinking stands between `<think>` and `</think>`.

    As DeepSeek-R1 (arXiv:2501.12948) and Qwen3 (arXiv:2505.09388) write it. A tag belongs to
    neither part; everything else is kept as it stands, white space too.
    """

    contract = 1

    class Options(plugins.Options):
        """The tags.

        Attributes:
            start: begins the thinking.
            end: ends it.
            starts_inside: the chat template has already written `start`, so that an output without
                any tag is thinking that was cut off. Without this it is an answer.
        """

        start: Tag = "<think>"
        end: Tag = "</think>"
        starts_inside: bool = False

    context: ReasoningContext
    options: Options

    def __init__(self, context: ReasoningContext) -> None:
        """Raise ConfigError if one tag cannot be told from the other."""
        super().__init__(context)
        if self.options.start == self.options.end:
            raise ConfigError(
                f"plugin.{self.name}.end: expected another tag than start, "
                f"got {self.options.end!r} for both"
            )

    def markers(self) -> ReasoningMarkers:
        """Return the tags as the tokenizer spells them; often one token each."""
        encode = self.context.tokenizer.encode
        return ReasoningMarkers(
            start=encode(self.options.start, add_special_tokens=False),
            end=encode(self.options.end, add_special_tokens=False),
        )

    def split(self, text: str) -> tuple[str | None, str]:
        """Return a whole output as (reasoning, content).

        An end tag without a start tag before it ends thinking that the template began. A missing
        end tag means that the output was cut off while thinking. Several blocks are joined.
        Thinking that is only white space counts as none.
        """
        start, end = self.options.start, self.options.end
        reasoning: list[str] = []
        content: list[str] = []
        thinking = self._begins_inside(text)
        while text:
            part, _, text = text.partition(end if thinking else start)
            (reasoning if thinking else content).append(part)
            thinking = not thinking
        thought = "".join(reasoning)
        return (thought if thought.strip() else None), "".join(content)

    def _begins_inside(self, text: str) -> bool:
        first_start, first_end = text.find(self.options.start), text.find(self.options.end)
        if first_start >= 0:
            return 0 <= first_end < first_start
        return first_end >= 0 or self.options.starts_inside
