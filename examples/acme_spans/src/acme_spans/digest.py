"""The processor of summaries: a document of any length, summarized in several rounds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from hardpoint import plugins
from hardpoint.plugins import (
    Annotated,
    ConfigError,
    IOProcessor,
    IOProcessorContext,
    Meta,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from hardpoint.typed import Strict

from .windows import windows

Prompts = list[tuple[list[int], SamplingParams]]
Rounds = Generator[Prompts, Sequence[RequestOutput], "Summary"]


class Text(Strict):
    """A text to summarize.

    Attributes:
        text: document of any length.
    """

    text: Annotated[str, Meta(min_length=1)]


class Summary(Strict):
    """The answer.

    Attributes:
        summary: summary of the whole text.
        rounds: number of rounds of prompts.
    """

    summary: str
    rounds: int


class Digest(IOProcessor):
    """Summarizes spans of a text, then their summaries, until one is left."""

    contract = 1
    Request = Text

    class Options(plugins.Options):
        """Options of the processor.

        Attributes:
            instruction: text before each span.
            ending: text after it.
            size: most tokens of a span; by default half of what the model reads, at most 256.
            max_tokens: most tokens of a summary.
        """

        instruction: str = "Summarize: "
        ending: str = "\n"
        size: Annotated[int, Meta(ge=2)] | None = None
        max_tokens: Annotated[int, Meta(ge=1)] = 64

    options: Options

    def __init__(self, context: IOProcessorContext) -> None:
        """Load a tokenizer.

        Raises:
            ConfigError: a prompt would be longer than the model reads, or a span has no room for
                two summaries.
        """
        super().__init__(context)
        self._tokenizer = context.tokenizer()
        self._before = self._tokenizer.encode(self.options.instruction)
        self._after = self._encoded(self.options.ending)
        limit = self.options.max_tokens
        room = context.max_model_len - len(self._before) - len(self._after) - limit
        self._size = self.options.size or min(context.max_model_len // 2, 256)
        if not 2 * limit <= self._size <= room:
            raise ConfigError(
                f"plugin.{self.name}.size: expected {2 * limit} to {room} tokens, two summaries "
                f"of {limit} or more, got {self._size}"
            )

    def pre_process(self, request: Text) -> Prompts:
        """Return a prompt for each span of the text."""
        if not (ids := self._encoded(request.text)):
            raise RequestError("data.text: expected a text with tokens, got none")
        return self._prompts(ids)

    def post_process(self, request: Text, outputs: Sequence[RequestOutput]) -> Rounds:  # noqa: ARG002
        """Summarize the summaries, until one is left."""
        rounds = 1
        while len(outputs) > 1:
            texts = [output.outputs[0].text for output in outputs]
            # Of at most `max_tokens` tokens, so that the next round has half as many prompts.
            summaries = [self._encoded(text)[: self.options.max_tokens] for text in texts]
            outputs = yield self._prompts([token for ids in summaries for token in ids])
            rounds += 1
        return Summary(summary=outputs[0].outputs[0].text.strip(), rounds=rounds)

    def _prompts(self, ids: list[int]) -> Prompts:
        params = SamplingParams(temperature=0.0, max_tokens=self.options.max_tokens)
        return [
            ([*self._before, *ids[begin:end], *self._after], params)
            for begin, end in windows(len(ids), self._size, 0)
        ]

    def _encoded(self, text: str) -> list[int]:
        encoded: Any = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoded)
