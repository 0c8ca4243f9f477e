"""Components for settings that name one: a parser, a grammar backend, a loader, a scheme."""

from __future__ import annotations

import re

from hardpoint import plugins
from hardpoint.plugins import (
    GrammarBackend,
    ModelError,
    OutputParser,
    Quantization,
    WeightLoader,
)
from hardpoint.plugins.output_parser import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.toolkit.bitmasks import allow_tokens
from support.samples import Sample


class Arrows(Sample, OutputParser, contract=2):
    """`reasoning=>[tool]arguments`."""

    roles = ("reasoning", "tools")

    class Options(plugins.Options):
        arrow: str = "=>"

    def open(self, request):
        return WholeText(self.options.arrow)


class Hermes(Arrows):
    """Has the name of a built-in."""


class WholeText:
    """The text of an output, parsed at its end."""

    in_reasoning = False

    def __init__(self, arrow):
        self.arrow, self.text = arrow, ""

    def feed(self, text):
        self.text += text
        return []

    def feed_token(self, token_id, text):
        return self.feed(text)

    def finish(self):
        reasoning, arrow, rest = self.text.partition(self.arrow)
        events = [ReasoningText(reasoning)] if arrow else []
        if call := re.fullmatch(r"\[(\w+)\](.*)", rest):
            begin, arguments = ToolCallBegin(call[1]), ToolCallArguments(call[2])
            return [*events, begin, arguments, ToolCallEnd()]
        return [*events, ContentText(rest if arrow else self.text)]


class Twice(GrammarBackend):
    """Compiles a regex of one letter; the answer has it twice."""

    contract = 1
    formats = ("regex",)

    def compile(self, structured):
        return Letters(self.context.vocabulary.tokens.index(structured.regex.encode()), 0)


class Letters:
    def __init__(self, letter, count):
        self.letter, self.count = letter, count

    def fill_bitmask(self, row):
        if self.count < 2:
            allow_tokens(row, [self.letter])
        return self.count == 2

    def advance(self, token_id):
        is_right = token_id == self.letter and self.count < 2
        self.count += is_right
        return is_right

    def rollback(self, count):
        self.count -= count

    def fork(self):
        return Letters(self.letter, self.count)


class FromNowhere(WeightLoader):
    """Reads no files."""

    contract = 1

    @classmethod
    def recognises(cls, files):
        return False

    def config(self):
        raise ModelError("it reads nothing")

    def weights(self, shapes):
        return iter(())


class Halves(Quantization):
    """A scheme without a form."""

    contract = 1


class Unversioned:
    """Derives from nothing."""


def plain():
    """Is no class."""
