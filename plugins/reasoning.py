"""Reasoning parsers: where a model thinks aloud, and how that is told from the answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from .component import Component, Context
from .tokenizing import Tokenizer

__all__ = ["ReasoningContext", "ReasoningMarkers", "ReasoningParser"]


@dataclass(frozen=True)
class ReasoningMarkers:
    """The token ids around a model's thinking; either may be empty.

    Attributes:
        start: begins it.
        end: ends it.
    """

    start: Sequence[int]
    end: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class ReasoningContext(Context):
    """What a reasoning parser is built with."""

    tokenizer: Tokenizer


class ReasoningParser(Component):
    """Splits reasoning from content. Lives in the frontend."""

    context: ReasoningContext

    @abstractmethod
    def markers(self) -> ReasoningMarkers:
        """Return the token ids between which the model thinks."""

    @abstractmethod
    def split(self, text: str) -> tuple[str | None, str]:
        """Return a whole output as (reasoning, content); reasoning is None if there is none."""
