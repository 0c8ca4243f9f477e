"""Plugins that tell their state, and fail where they are asked to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.plugins import LoadBalancer, OutputParser, StatSink
from hardpoint.plugins.output_parser import ContentText
from support.plugins.changing_parts import Mark, Sending


class Telling(StatSink):
    """A sink that has seen something."""

    contract = 1

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.seen = 0

    def record(self, stats: Any) -> None:
        """Fail at the first call with tokens."""
        self.seen += 1
        if stats.num_generation_tokens:
            raise RuntimeError("no room")

    def dump_state(self) -> Mapping[str, Any]:
        """Return how often it was called."""
        return {"seen": self.seen > 0}


class First(LoadBalancer):
    """Takes the first engine, until it is asked to fail."""

    contract = 1

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.asked = 0

    def choose(self, request: Any, engines: Any) -> int:
        """Choose the first, or none."""
        del engines
        self.asked += 1
        return 99 if "fail" in request.tags else 0

    def dump_state(self) -> Mapping[str, Any]:
        """Return how often it was asked."""
        return {"asked": self.asked}


class Plain(OutputParser):
    """Passes text on; fails at an x."""

    contract = 2
    roles = ("reasoning", "tools")

    def open(self, request: Any) -> Any:
        """Return the state of an output."""
        del request
        return PlainState()

    def dump_state(self) -> Mapping[str, Any]:
        """Return a word."""
        return {"form": "plain"}


class PlainState:
    """The state of an output."""

    in_reasoning = False

    def feed(self, text: str) -> list[ContentText]:
        """Pass it on, or fail."""
        if text:
            raise ValueError("no text today")
        return []

    def feed_token(self, token_id: int, text: str) -> list[ContentText]:
        """Do the same."""
        del token_id
        return self.feed(text)

    def finish(self) -> list[ContentText]:
        """Add nothing."""
        return []


class FailingMark(Mark):
    """Fails in the engine, in a plan."""

    def engine_half(self, context: Any) -> Any:
        """Return a half that fails."""
        del context
        self.half = FailingHalf(self.name, self.options.mark)
        return self.half


class FailingHalf(Sending):
    """Fails in a plan."""

    def begin(self, plan: Any) -> bytes:
        """Fail."""
        raise RuntimeError("no plan today")
