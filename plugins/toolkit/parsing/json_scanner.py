"""A scanner of JSON that comes in pieces of any size, and outputs that are JSON or a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from hardpoint.plugins.output_parser import ContentText, OutputEvent, OutputState

__all__ = ["MAX_DEPTH", "SPACE", "CallOrJson", "JsonText", "Stop", "decoded_string", "is_json"]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')

SPACE = " \t\n\r"
"""White space of JSON."""

MAX_DEPTH = 200


class _Expected:
    """Continuations of a JSON text; plain strings, because an enum's hash takes long."""

    VALUE = "a value"
    VALUE_OR_END = "a value or ]"
    KEY = "a key in double quotes"
    KEY_OR_END = "a key in double quotes or }"
    COLON = ":"
    COMMA_OR_END = ", or the end of the list or object"
    STRING = "the rest of a string"
    ESCAPE = "an escaped character"
    HEX = "a hexadecimal digit"
    NUMBER = "a digit"
    LITERAL = "true, false or null"
    NOTHING = "nothing"


_IN_STRING = frozenset({_Expected.STRING, _Expected.ESCAPE, _Expected.HEX})

_IN_TOKEN = _IN_STRING | {_Expected.NUMBER, _Expected.LITERAL}


# Numbers: from each state, the state after a character of a class.
_NUMBER = {
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": "f", "1": "f"},
    "f": {"0": "f", "1": "f", "e": "e"},
    "e": {"0": "x", "1": "x", "+": "s", "-": "s"},
    "s": {"0": "x", "1": "x"},
    "x": {"0": "x", "1": "x"},
}

_NUMBER_ENDS = frozenset("01fx")


class Stop(Enum):
    """Where `JsonText.feed` stops before the end of the text."""

    BEGIN = auto()
    """A value begins."""
    END = auto()
    """It has ended."""
    ITEM = auto()
    """A value has ended in the list around such objects."""
    DONE = auto()
    """The whole value has ended."""
    ERROR = auto()
    """The text is no JSON."""


class JsonText:
    """Checks one JSON value as its text comes; each character is looked at once.

    Attributes:
        key: key of the member before its value, at `stop_depth`.
        expected: the next possible tokens.
    """

    def __init__(self, stop_depth: int = 0) -> None:
        """`stop_depth`: `feed` stops before and after each member's value of objects so deep."""
        self._stop_depth = stop_depth
        self._open: list[str] = []
        self.expected = _Expected.VALUE
        self.key = ""
        self._key_text: list[str] | None = None
        self._is_key = False
        self._number = ""
        self._left = 0  # of an escape's digits
        self._literal = ""
        self._begun = False  # whether BEGIN was reported for the value that comes

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self.expected in _IN_STRING

    @property
    def is_done(self) -> bool:
        """Whether the value is complete; a number may go on."""
        return self.expected is _Expected.NOTHING or (
            self.expected is _Expected.NUMBER and not self._open and self._number in _NUMBER_ENDS
        )

    def feed(self, text: str, at: int = 0) -> tuple[int, Stop | None]:
        """Take text from `at` on; return where it stopped, and why before the end of it."""
        end, stop = len(text), None
        while at < end:
            expected = self.expected
            if expected is _Expected.STRING:
                at, stop = self._string(text, at)
            elif expected is _Expected.NOTHING:
                return at, Stop.DONE
            elif text[at] in SPACE and expected not in _IN_TOKEN:
                at += 1
            else:
                at, stop = self._METHODS[expected](self, text, at)
            if stop is not None:
                return at, stop
        return at, None

    def _string(self, text: str, at: int) -> tuple[int, Stop | None]:
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if self._key_text is not None:
            self._key_text.append(text[at:end])
        if end == len(text):
            return end, None
        if text[end] == "\\":
            self._note(text[end])
            self.expected = _Expected.ESCAPE
            return end + 1, None
        if text[end] != '"':
            return end, Stop.ERROR
        if self._is_key:
            self._is_key = False
            self.expected = _Expected.COLON
            if self._key_text is not None:
                raw = "".join(self._key_text)
                self.key = decoded_string(f'"{raw}"') or raw
                self._key_text = None
            return end + 1, None
        return end + 1, self._value_ended()

    def _note(self, character: str) -> None:
        if self._key_text is not None:
            self._key_text.append(character)

    def _escape(self, text: str, at: int) -> tuple[int, Stop | None]:
        character = text[at]
        if character not in '"\\/bfnrtu':
            return at, Stop.ERROR
        self._note(character)
        self._left = 4
        self.expected = _Expected.HEX if character == "u" else _Expected.STRING
        return at + 1, None

    def _hex(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] not in "0123456789abcdefABCDEF":
            return at, Stop.ERROR
        self._note(text[at])
        self._left -= 1
        if not self._left:
            self.expected = _Expected.STRING
        return at + 1, None

    def _in_literal(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != self._literal[0]:
            return at, Stop.ERROR
        self._literal = self._literal[1:]
        return at + 1, None if self._literal else self._value_ended()

    def _in_number(self, text: str, at: int) -> tuple[int, Stop | None]:
        character = text[at]
        kind = "1" if character in "123456789" else character.replace("E", "e")
        following = _NUMBER[self._number].get(kind)
        if following is not None:
            self._number = following
            return at + 1, None
        if self._number not in _NUMBER_ENDS:
            return at, Stop.ERROR
        return at, self._value_ended()

    def _colon(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != ":":
            return at, Stop.ERROR
        self.expected = _Expected.VALUE
        return at + 1, None

    def _key_or_end(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != '"':
            return self._end(text, at)
        self._is_key, self.expected = True, _Expected.STRING
        if len(self._open) == self._stop_depth:
            self._key_text = []
        return at + 1, None

    def _comma_or_end(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != ",":
            return self._end(text, at)
        self.expected = _Expected.KEY if self._open[-1] == "}" else _Expected.VALUE
        return at + 1, None

    def _end(self, text: str, at: int) -> tuple[int, Stop | None]:
        if self.expected is _Expected.KEY or text[at] != self._open[-1]:
            return at, Stop.ERROR
        self._open.pop()
        return at + 1, self._value_ended()

    def _value(self, text: str, at: int) -> tuple[int, Stop | None]:
        character = text[at]
        if self.expected is _Expected.VALUE_OR_END and character == "]":
            return self._end(text, at)
        if not self._begun and self._tells():
            self._begun = True
            return at, Stop.BEGIN
        self._begun = False
        if character == '"':
            self.expected = _Expected.STRING
        elif character in "{[":
            if len(self._open) == MAX_DEPTH:
                return at, Stop.ERROR
            is_object = character == "{"
            self._open.append("}" if is_object else "]")
            self.expected = _Expected.KEY_OR_END if is_object else _Expected.VALUE_OR_END
        elif character in "-0123456789":
            self._number = character if character in "-0" else "1"
            self.expected = _Expected.NUMBER
        elif character in "tfn":
            self._literal = {"t": "rue", "f": "alse", "n": "ull"}[character]
            self.expected = _Expected.LITERAL
        else:
            return at, Stop.ERROR
        return at + 1, None

    _METHODS = {
        _Expected.VALUE: _value,
        _Expected.VALUE_OR_END: _value,
        _Expected.KEY: _key_or_end,
        _Expected.KEY_OR_END: _key_or_end,
        _Expected.COLON: _colon,
        _Expected.COMMA_OR_END: _comma_or_end,
        _Expected.ESCAPE: _escape,
        _Expected.HEX: _hex,
        _Expected.NUMBER: _in_number,
        _Expected.LITERAL: _in_literal,
    }

    def _tells(self) -> bool:
        return len(self._open) == self._stop_depth > 0 and self._open[-1] == "}"

    def _value_ended(self) -> Stop | None:
        if not self._open:
            self.expected = _Expected.NOTHING
            return Stop.DONE
        self.expected = _Expected.COMMA_OR_END
        if self._tells():
            return Stop.END
        return Stop.ITEM if len(self._open) == self._stop_depth - 1 else None


def decoded_string(text: str) -> str | None:
    """Return the string that a JSON text is; None if it is another value."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):  # also half of a surrogate pair
        return None


def is_json(text: str, first: str = "") -> bool:
    """Return whether a text is a JSON value that begins with `first`, and nothing else."""
    json = JsonText()
    at, _ = json.feed(text)
    return at == len(text) and json.is_done and text.startswith(first)


_BEGINS_OF_JSON = frozenset('{["-0123456789tfn')


class CallOrJson:
    """The state of a parser of calls for an output that a grammar makes one of the two.

    Calls of the parser must begin with no character that JSON begins with.
    """

    in_reasoning = False

    def __init__(self, calls: OutputState) -> None:
        self._calls = calls
        self._is_json: bool | None = None  # unknown before the first character

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take a piece of text; JSON is content."""
        if self._is_json is None and (begin := text.lstrip()[:1]):
            self._is_json = begin in _BEGINS_OF_JSON
        return [ContentText(text)] if self._is_json else self._calls.feed(text)

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Process a special token; as the first token it begins a call."""
        if self._is_json is None:
            self._is_json = False
        return [ContentText(text)] if self._is_json else self._calls.feed_token(token_id, text)

    def finish(self) -> Sequence[OutputEvent]:
        """End the output."""
        return self._calls.finish()
