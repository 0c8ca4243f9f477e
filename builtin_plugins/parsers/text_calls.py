"""Calls behind other text, which small models write."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

from hardpoint.plugins.output_parser import ContentText, OutputEvent
from hardpoint.toolkit.parsing.format_parser import Content, OpenOutput

__all__ = ["TextWithCalls", "head_of_call", "head_pattern"]

LONGEST_HEAD = 300
"""Characters of a call up to the name of its tool: more of them are text."""


class TextWithCalls(Content):
    """Content in which the head of a call leads to the state `call`.

    The head goes up to the name of a tool of the request: text often has brackets. Without tools
    of the request, any name is one.

    Attributes:
        bracket: the character that a head begins with.
        head: all of a head; its group `tool` is the name.
    """

    bracket: ClassVar[re.Pattern[str]]
    head: ClassVar[re.Pattern[str]]

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._waiting = ""  # the end of the text, which may become a head

    @abstractmethod
    def begins(self, text: str, tools: Mapping[str, object]) -> bool:
        """Return whether more text could make a head of this one."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take text up to the end of a head, which waits for the body of the call."""
        known, text, self._waiting = len(self._waiting), self._waiting + text, ""
        tools, at = self.output.request.tools, 0
        while at < len(text):
            match = self.bracket.search(text, at)
            end = match.start() if match else len(text)
            if end > at:
                events.append(ContentText(text[at:end]))
            if not match:
                break
            at, begun = end, text[end : end + LONGEST_HEAD]
            head = self.head.match(begun)
            # The next character belongs to the call, and ends this body.
            if head and head.end() < len(begun) and (not tools or head["tool"] in tools):
                self.output.notes["head"], self.next = head.group(), "call"
                return at + head.end() - known
            if len(begun) < LONGEST_HEAD and self.begins(begun, tools):
                self._waiting = begun
                break
            events.append(ContentText(text[at]))
            at += 1
        return len(text) - known

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:  # noqa: ARG002
        """Give the text that has not become a head."""
        if self._waiting:
            events.append(ContentText(self._waiting))


def head_of_call(output: OpenOutput) -> str:
    """Return the head that `TextWithCalls` left for the body of a call; empty without one."""
    head: str = output.notes.pop("head", "")
    return head


def head_pattern(before: str, tools: Iterable[str], after: str) -> str:
    """Return the regular expression of heads of calls of some tools."""
    return f"{before}(?:{'|'.join(map(re.escape, tools))}){after}"
