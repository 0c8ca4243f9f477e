"""Outputs that begin with a call, or are JSON in whose strings the markers of calls may be."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins.output_parser import ContentText, OutputEvent, OutputState

_BEGINS_OF_JSON = frozenset('{["-0123456789tfn')


class CallOrJson:
    """The state of a parser of calls for an output that a grammar makes one of the two.

    Calls of the parser must begin with no character that JSON begins with.
    """

    in_reasoning = False

    def __init__(self, calls: OutputState) -> None:
        """Parse calls by `calls`."""
        self._calls = calls
        self._is_json: bool | None = None  # unknown before the first character

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take a piece of text; JSON is content."""
        if self._is_json is None and (begin := text.lstrip()[:1]):
            self._is_json = begin in _BEGINS_OF_JSON
        return [ContentText(text)] if self._is_json else self._calls.feed(text)

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special token: one that is first begins a call."""
        if self._is_json is None:
            self._is_json = False
        return [ContentText(text)] if self._is_json else self._calls.feed_token(token_id, text)

    def finish(self) -> Sequence[OutputEvent]:
        """End the output."""
        return self._calls.finish()
