"""Typed questions: fields of a request, their text for a model, and their answers."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from hardpoint.typed import Strict

Content = str | dict[str, Any] | list[Any]
"""A text, or JSON that a model reads as such."""


class NoulAnswer(msgspec.Struct, tag_field="type", tag="noul"):
    """Whether something is so.

    Attributes:
        noul: probability of yes, of yes and no.
        x_label_mass: probability of the labels among all that the model may write.
    """

    noul: float
    x_label_mass: float


class ChoiceAnswer(msgspec.Struct, tag_field="type", tag="choice"):
    """One of several options.

    Attributes:
        choice: the likeliest.
        confidence: how far it stands above an even guess: 0 is one, 1 is certain.
        probabilities: probability of each option, by name; they add up to 1.
        x_label_mass: probability of the labels among all that the model may write.
    """

    choice: str
    confidence: float
    probabilities: dict[str, float]
    x_label_mass: float


class ScoreAnswer(msgspec.Struct, tag_field="type", tag="score"):
    """A level of a scale.

    Attributes:
        score: the expected level, from 0 on.
        confidence: how close the probabilities are to the likeliest level: 1 is all there, 0 is as
            far away as an even guess, or farther.
        legend: the levels, by number.
        probabilities: probability of each level, by number; they add up to 1.
        x_label_mass: probability of the labels among all that the model may write.
    """

    score: float
    confidence: float
    legend: dict[str, Content]
    probabilities: dict[str, float]
    x_label_mass: float


Answer = NoulAnswer | ChoiceAnswer | ScoreAnswer


class Question(Strict, tag_field="type"):
    """A question with a label per possible answer.

    Attributes:
        instructions: the question: a text, or JSON.
    """

    last_line: ClassVar[str]
    """The end of the text that the model reads, before its answer begins."""

    instructions: Content | None = None

    def labels(self) -> list[str]:
        """Return the label of each possible answer."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Return the meanings of the labels, a line each; none for labels without a meaning."""
        raise NotImplementedError

    def answer(self, probabilities: Sequence[float], mass: float) -> Answer:
        """Return the answer.

        Args:
            probabilities: probability of each label; they add up to 1.
            mass: their probability among all that the model may write.
        """
        raise NotImplementedError

    def text(self) -> str:
        """Return the question as a model reads it."""
        lines = [] if self.instructions is None else [f"Question: {as_text(self.instructions)}"]
        return "\n".join([*lines, *self.lines(), self.last_line])


class NoulCriteria(Strict):
    """The meaning of yes and no.

    Attributes:
        true: when the answer is yes.
        false: when it is no.
    """

    true: Content | None = None
    false: Content | None = None


class NoulQuestion(Question, tag="noul"):
    """Whether something is so.

    Attributes:
        criteria: when the answer is yes, and when no.
    """

    last_line: ClassVar[str] = "Answer Yes or No alone."

    criteria: NoulCriteria | None = None

    def labels(self) -> list[str]:
        """Return yes and no."""
        return ["Yes", "No"]

    def lines(self) -> list[str]:
        """Return the sides that are described."""
        criteria = self.criteria or NoulCriteria()
        sides = zip(self.labels(), (criteria.true, criteria.false), strict=True)
        return [f"{label}: {as_text(side)}" for label, side in sides if side is not None]

    def answer(self, probabilities: Sequence[float], mass: float) -> Answer:
        """Return the probability of yes."""
        return NoulAnswer(probabilities[0], mass)


class ChoiceQuestion(Question, tag="choice"):
    """Which of several options it is.

    Attributes:
        criteria: the options: names, and their meaning or null.
    """

    last_line: ClassVar[str] = "Answer with the letter of one option alone."

    criteria: Annotated[dict[str, Content | None], Meta(min_length=2, max_length=26)]

    def labels(self) -> list[str]:
        """Return a letter per option."""
        return list(string.ascii_uppercase[: len(self.criteria)])

    def lines(self) -> list[str]:
        """Return the options."""
        return [
            f"{label}: {name}" if meaning is None else f"{label}: {name} - {as_text(meaning)}"
            for label, (name, meaning) in zip(self.labels(), self.criteria.items(), strict=True)
        ]

    def answer(self, probabilities: Sequence[float], mass: float) -> Answer:
        """Return the likeliest option, of equals the first."""
        by_name = dict(zip(self.criteria, probabilities, strict=True))
        best, count = max(by_name, key=by_name.__getitem__), len(by_name)
        confidence = (count * by_name[best] - 1) / (count - 1)
        return ChoiceAnswer(best, min(max(confidence, 0.0), 1.0), by_name, mass)


class ScoreQuestion(Question, tag="score"):
    """Which level of a scale it is.

    Attributes:
        criteria: the levels, from the first to the last.
    """

    last_line: ClassVar[str] = "Answer with the number of one level alone."

    criteria: Annotated[list[Content], Meta(min_length=2, max_length=10)]

    def labels(self) -> list[str]:
        """Return a digit per level."""
        return list(string.digits[: len(self.criteria)])

    def lines(self) -> list[str]:
        """Return the levels."""
        levels = zip(self.labels(), self.criteria, strict=True)
        return [f"{label}: {as_text(level)}" for label, level in levels]

    def answer(self, probabilities: Sequence[float], mass: float) -> Answer:
        """Return the expected level."""
        levels = range(len(probabilities))
        best = max(levels, key=probabilities.__getitem__)
        away = math.fsum(p * abs(level - best) for level, p in enumerate(probabilities))
        even = math.fsum(abs(level - (len(levels) - 1) / 2) for level in levels) / len(levels)
        return ScoreAnswer(
            score=math.fsum(level * p for level, p in enumerate(probabilities)),
            confidence=max(0.0, 1 - away / even),
            legend=dict(zip(self.labels(), self.criteria, strict=True)),
            probabilities=dict(zip(self.labels(), probabilities, strict=True)),
            x_label_mass=mass,
        )


AnyQuestion = NoulQuestion | ChoiceQuestion | ScoreQuestion


def as_text(content: Content) -> str:
    """Return a text as it is, and JSON as JSON."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
