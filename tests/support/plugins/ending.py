"""A part that changes outputs and notes the ends of requests, and a processor that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from hardpoint import plugins
from hardpoint.plugins import FrontendHalf, LogitsProcessor, Phase, StepPart
from hardpoint.plugins.text import OutputFormat, OutputReader


class Upper(StepPart):
    """Writes outputs in capitals.

    Attributes:
        events: what happened to each format, in order of the formats.
    """

    contract = 1
    events: ClassVar[list[list[str]]] = []

    def frontend_half(self, context: Any) -> FrontendHalf:
        """Return the half that makes formats."""
        return UpperHalf()

    @classmethod
    @contextmanager
    def noting(cls) -> Iterator[list[list[str]]]:
        """Note events from here on."""
        cls.events.clear()
        yield cls.events
        cls.events.clear()


class UpperHalf(FrontendHalf):
    """Makes a format for each request."""

    def output_format(self, request: Any, calls: Any) -> OutputFormat:
        """Return a format, which fails in the method that a tag names."""
        Upper.events.append([])
        return UpperFormat(Upper.events[-1], request.tags.get("fails in"))

    def prepare(self, request: Any, reasoning: Any) -> None:
        """Reject a request with such a tag."""
        if request.tags.get("fails in") == "prepare":
            raise plugins.RequestError("tags: expected others")


class UpperFormat(OutputFormat):
    """Notes its end."""

    def __init__(self, events: list[str], failing: str | None) -> None:
        self.events, self.failing = events, failing

    def open(self, request: Any) -> OutputReader:
        """Return a reader."""
        self.act("open")
        return UpperReader()

    def end(self, outcome: str) -> None:
        """Note how the request ended."""
        self.events.append(outcome)
        self.act("end")

    def close(self) -> None:
        """Note the call."""
        self.events.append("closed")
        self.act("close")

    def act(self, method: str) -> None:
        """Fail in one method."""
        if method == self.failing:
            raise KeyError("missing")


class UpperReader(OutputReader):
    """Writes in capitals."""

    def complete(self, completion: Any, *, finished: bool) -> None:
        """Change the text."""
        completion.text = completion.text.upper()
        completion.content = completion.text or None


class Fails(LogitsProcessor):
    """Fails with each request that names it."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        """Whether the processor fails."""

        fails: bool = False

    def apply(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        """Fail for a row with the argument."""
        if any(arguments.fails for arguments in rows.arguments()):
            raise ValueError("it fails")
        return logits
