"""Reasoning parsers: separate a model's reasoning from its answer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from .arguments import ComponentWithArguments, prepared_type
from .component import Context
from .markers import ReasoningMarkers
from .tokenizer import Tokenizer

__all__ = ["ReasoningContext", "ReasoningMarkers", "ReasoningParser"]


@dataclass(frozen=True, kw_only=True)
class ReasoningContext(Context["ReasoningParser"]):
    """Context of a reasoning parser.

    Attributes:
        arguments: of the request that the parser is for; None, for the parser that serves all
            requests without arguments, is the defaults.
    """

    tokenizer: Tokenizer
    arguments: Any = None


class ReasoningParser(ComponentWithArguments):
    """Splits reasoning from content, in the frontend.

    One parser serves all requests that give it no arguments. A request that does gets a parser of
    its own, which is closed once the request was checked. A class with a `prepare` of its own has
    one parser for each request.
    """

    context: ReasoningContext

    def __init__(self, context: ReasoningContext) -> None:
        """Store the context; `self.arguments` is its field, too, or the defaults."""
        super().__init__(context)
        given = context.arguments
        self.arguments: Any = prepared_type(type(self))() if given is None else given

    @abstractmethod
    def markers(self) -> ReasoningMarkers:
        """Return the token ids that enclose the reasoning."""

    def split(self, text: str) -> tuple[str | None, str]:
        """Return a whole output as (reasoning, content); reasoning is None if there is none.

        May be left out; the engine itself uses the markers.

        Raises:
            NotImplementedError: the parser does not split text.
        """
        raise NotImplementedError(f"the reasoning parser {self.name!r} does not split text")
