"""Reasoning parsers with one typical mistake each."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from hardpoint import plugins
from hardpoint.plugins import ReasoningMarkers, ReasoningParser

START, END = "<think>", "</think>"


class Tags(ReasoningParser):
    """Correct: the first block between two tags is the reasoning."""

    contract = 1

    def markers(self):
        encode = self.context.tokenizer.encode
        return ReasoningMarkers(
            encode(START, add_special_tokens=False), encode(END, add_special_tokens=False)
        )

    def split(self, text):
        before, start, rest = text.partition(START)
        if not start:
            reasoning, end, content = text.partition(END)
            return (reasoning, content) if end else (None, text)
        reasoning, _, content = rest.partition(END)
        return reasoning, before + content


class MarkersAlone(Tags):
    """Correct: leaves split out."""

    contract = 1
    split = ReasoningParser.split


class NamedTags(Tags):
    """Correct: a request names the tags."""

    contract = 1
    ARGUMENTS = st.fixed_dictionaries({"tag": st.sampled_from(["think", "thought"])})

    class Arguments(plugins.Arguments):
        tag: str = "think"

    def markers(self):
        encode = self.context.tokenizer.encode
        return ReasoningMarkers(
            *(encode(f"<{s}{self.arguments.tag}>", add_special_tokens=False) for s in ("", "/"))
        )

    def split(self, text):
        standard = text.replace(f"<{self.arguments.tag}>", START)
        return super().split(standard.replace(f"</{self.arguments.tag}>", END))


class SplitsByDefaults(NamedTags):
    contract = 1

    def split(self, text):
        return Tags.split(self, text)


class WithoutContract(Tags):
    """States no contract of its own."""


class FarMarkers(Tags):
    contract = 1

    def markers(self):
        return ReasoningMarkers([151667], [151668])


class TextMarkers(Tags):
    contract = 1

    def markers(self):
        return ReasoningMarkers(START, END)


class PairOfMarkers(Tags):
    contract = 1

    def markers(self):
        return [1], [2]


class EqualMarkers(Tags):
    contract = 1

    def markers(self):
        return ReasoningMarkers([5], [5])


class ChangingMarkers(Tags):
    contract = 1
    turns = itertools.count()

    def markers(self):
        return ReasoningMarkers([1], [2 + next(self.turns)])


class MarkersByText(Tags):
    """Its markers are those of the last text."""

    contract = 1
    last = END

    def markers(self):
        encode = self.context.tokenizer.encode
        return ReasoningMarkers(encode(START), encode(self.last))

    def split(self, text):
        self.last = text[-3:] or END
        return super().split(text)


class OtherTags(Tags):
    contract = 1

    def split(self, text):
        return super().split(text.replace("<think>", "<thought>").replace("<reason>", "<think>"))


class IgnoresCutOff(Tags):
    contract = 1

    def split(self, text):
        return super().split(text) if END in text else (None, text)


class NeedsStart(Tags):
    contract = 1

    def split(self, text):
        return super().split(text) if START in text else (None, text)


class KeepsTags(Tags):
    contract = 1

    def split(self, text):
        reasoning, content = super().split(text)
        return reasoning and START + reasoning, content


class DropsTheBeginning(Tags):
    contract = 1

    def split(self, text):
        reasoning, content = super().split(text)
        _, start, _ = text.partition(START)
        return reasoning, content if not start else text.partition(END)[2]


class Strips(Tags):
    contract = 1

    def split(self, text):
        reasoning, content = super().split(text)
        return reasoning and reasoning.strip(), content.strip()


class Exchanges(Tags):
    contract = 1

    def split(self, text):
        reasoning, content = super().split(text)
        return reasoning, content[::-1] if "Yes" in content else content


class RaisesWithoutMarkers(Tags):
    contract = 1

    def split(self, text):
        reasoning, content = text.split(END, 1)
        return reasoning.removeprefix(START), content


class ReturnsText(Tags):
    contract = 1

    def split(self, text):
        return text


class SplitsAtLines(Tags):
    contract = 1

    def split(self, text):
        if START in text or END in text:
            return super().split(text)
        reasoning, _, content = text.partition("\n\n")
        return (reasoning, content) if content else (None, text)


class GoesOn(Tags):
    """An open block of one text continues in the next one."""

    contract = 1
    is_open = False

    def split(self, text):
        if self.is_open:
            text = START + text
        self.is_open = START in text and END not in text
        return super().split(text)


class Remembers(Tags):
    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def split(self, text):
        self.seen.append(text)
        return super().split(text)
