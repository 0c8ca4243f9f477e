"""Keys of `rank_pattern` and `alpha_pattern`: names of modules, and simple expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Generic, TypeVar

Value = TypeVar("Value", bound=float)

_LONGEST = 256
_MOST_EXPRESSIONS = 64
_NAME = re.compile(r"\^?[\w.-]+")
_PIECE = re.compile(r"(\\[.dw]|\[\^?(?:\\[.dw]|[\w.-])+\]|[\w.-])(?:([*+?])\??)?")
_FORM = (
    r"a name, or one with \., \d, \w, . or [...] in it, each followed by *, + or ? if it repeats"
)


class ModulePatterns(Generic[Value]):
    """Values by suffixes of module names, matched as in PEFT: the first match counts.

    The time of a match is linear in the length of the name. A dot in a name is a dot.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        """Read the keys.

        Raises:
            ValueError: one is of another form, or there are too many expressions.
        """
        self._values = list(values.values())
        self._names: dict[str, int] = {}
        self._expressions: list[tuple[int, _Expression]] = []
        for index, key in enumerate(values):
            if _NAME.fullmatch(text := key.removesuffix("$")):
                self._names.setdefault(text, index)
            else:
                self._expressions.append((index, _Expression(text)))
        if len(self._expressions) > _MOST_EXPRESSIONS:
            raise ValueError(
                f"expected at most {_MOST_EXPRESSIONS} keys that are no names, got "
                f"{len(self._expressions)}"
            )

    def value_of(self, module: str, default: Value) -> Value:
        """Return the value of a module, or the default if no key matches."""
        parts = module.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts))]
        indices = [self._names[end] for end in (*ends, f"^{module}") if end in self._names]
        first = min(indices, default=len(self._values))
        for index, expression in self._expressions:
            if index > first:
                break
            if expression.matches(module):
                first = index
        return self._values[first] if first < len(self._values) else default


class _Expression:
    """A sequence of characters, each of them possibly optional or repeated.

    It is followed along a name with a set of places, one bit each, so that nothing is tried twice.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ValueError(f"expected at most {_LONGEST} characters, got {text[:40]!r}...")
        self._is_whole = text.startswith("^")
        self._pieces: list[re.Pattern[str]] = []
        self._optional = self._repeated = 0
        place = int(self._is_whole)
        while place < len(text):
            if (match := _PIECE.match(text, place)) is None:
                raise ValueError(f"expected {_FORM}, got {text!r}")
            bit = 1 << len(self._pieces)
            self._optional |= bit * (match[2] in ("*", "?"))
            self._repeated |= bit * (match[2] in ("*", "+"))
            try:
                self._pieces.append(re.compile(match[1]))
            except re.error as error:
                raise ValueError(f"expected {_FORM}, got {text!r}: {error}") from None
            place = match.end()
        self._accepting = functools.cache(self._accepts)

    def _accepts(self, character: str) -> int:
        return sum(1 << n for n, piece in enumerate(self._pieces) if piece.fullmatch(character))

    def matches(self, module: str) -> bool:
        places = 0
        before = "."
        for index, character in enumerate(module):
            if before == "." and not (index and self._is_whole):
                places |= 1
            accepted = self._with_skipped(places) & self._accepting(character)
            places = accepted << 1 | accepted & self._repeated
            before = character
        return bool(self._with_skipped(places) >> len(self._pieces) & 1)

    def _with_skipped(self, places: int) -> int:
        while (more := places | (places & self._optional) << 1) != places:
            places = more
        return places
