"""Regular expressions of JSON schemas: their literal parts, and expressions for all other texts."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable
from typing import NamedTuple

_MAX_LETTERS = 5_000
"""Of the texts that an expression excludes."""

_MAX_WRITTEN = 500_000
"""Characters of such an expression: compiling it is quadratic in the length of a text."""

_ANY = "(?s:.)*"
_LITERAL = re.compile(r"(?:[^\\.^$*+?()\[\]{}|]|\\[^a-zA-Z0-9])*")
_REPEATED = "*+?{"
_ESCAPED = '"\\'
"""Letters that JSON escapes with themselves."""

_CONTROLS = [chr(code) for code in range(32) if chr(code) != "\n"]
_COMPOSED = re.compile(r"[\[\\&~\x00-\x1f-]")
_ESCAPE = re.compile(r"\\(?:[pPxu]\{[^}]*\}|.)", re.DOTALL)
_BRACED = re.compile(r"\\[xu]\{([0-9a-fA-F]{1,8})\}")


class Literal(NamedTuple):
    """An expression that has one text, apart from its anchors.

    Attributes:
        text: the text that it matches.
        starts: whether a match begins where the string does.
        ends: whether a match ends where the string does.
    """

    text: str
    starts: bool
    ends: bool


def literal_of(pattern: str) -> Literal | None:
    """Return the text of an expression without operators; None if it has any."""
    starts = pattern.startswith("^")
    body = pattern[starts:]
    ends = body.endswith("$") and not body.endswith("\\$")
    body = body[: len(body) - ends]
    if not _LITERAL.fullmatch(body):
        return None
    return Literal(_unescaped(body), starts, ends)


def start_of(pattern: str) -> str:
    """Return the text with which all matches of an expression begin; empty if none is certain."""
    if not pattern.startswith("^") or _has_alternatives(pattern):
        return ""
    match = _LITERAL.match(pattern, 1)
    assert match is not None
    prefix = match.group()
    if pattern[match.end() : match.end() + 1] and pattern[match.end()] in _REPEATED:
        letter = re.search(r"(?:\\.|[^\\])\Z", prefix, re.DOTALL)  # which may come no time
        prefix = prefix[: letter.start()] if letter else ""
    return _unescaped(prefix)


def none_of(texts: Iterable[str]) -> str:
    """Return an expression that matches the whole of any text but some.

    Raises:
        ValueError: they are too long.
    """
    return f"^(?:{_others(sorted(set(texts)), starts=False)})$"


def not_starting(text: str) -> str:
    """Return an expression that matches the whole of any text that does not begin with another.

    Raises:
        ValueError: it is too long.
    """
    return f"^(?:{_others([text], starts=True)})$"


def quotable(pattern: str) -> str:
    """Return an expression with which llguidance accepts no string without a match.

    In JSON strings, its classes of all control characters take a quote and a backslash, too. So
    classes without both of them take no NUL.
    """
    parts: list[str] = []
    start = end = 0
    while end < len(pattern):
        begin, end = end, _end_of_item(pattern, end)
        if end - begin > 1 and _is_misread(pattern[begin:end]):
            parts += (pattern[start:begin], f"[{pattern[begin:end]}&&[^\\x00]]")
            start = end
    return "".join((*parts, pattern[start:]))


def _end_of_item(pattern: str, start: int) -> int:
    depth, place = 0, start
    while place < len(pattern):
        if pattern[place] == "\\":
            escape = _ESCAPE.match(pattern, place)
            place = escape.end() if escape else len(pattern)
        elif pattern[place] == "[":
            depth += 1
            place += 2 if pattern.startswith("[^", place) else 1
            place += pattern.startswith("]", place)  # a letter, where it comes first
        else:
            depth -= depth > 0 and pattern[place] == "]"
            place += 1
        if not depth:
            break
    return place


@functools.lru_cache(maxsize=4096)
def _is_misread(item: str) -> bool:
    """Return whether an escape or class may have all control characters, but not all of _ESCAPED.

    An expression that cannot be read here may.
    """
    if item[0] == "\\" and item[1:2] not in "DPSWp":
        return False
    if item[0] == "[" and not _COMPOSED.search(item, 1):  # reading it costs more
        return item.startswith("[^") and '"' in item
    if re.search(r"\[.*\[|&&|--|~~", item, re.DOTALL):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            letters = re.compile(_BRACED.sub(lambda code: rf"\U{int(code[1], 16):08x}", item))
    except (re.error, Warning):
        return True
    if all(map(letters.match, _ESCAPED)):
        return False
    return all(map(letters.match, _CONTROLS))


def _others(texts: list[str], *, starts: bool) -> str:
    if sum(map(len, texts)) > _MAX_LETTERS:
        raise ValueError(f"the texts have more than {_MAX_LETTERS} characters together")
    whole = set() if starts else set(texts)
    following: dict[str, set[str]] = {}
    for text in texts:
        for end in range(len(text)):
            following.setdefault(text[:end], set()).add(text[end])
        if not starts:
            following.setdefault(text, set())
    if 6 * sum(map(len, following)) > _MAX_WRITTEN:
        raise ValueError("the texts are too long")
    alternatives = []
    for prefix, letters in sorted(following.items()):
        before = "".join(map(_quoted, prefix))
        if prefix not in whole:
            alternatives.append(before)
        other = f"[^{''.join(map(_quoted, sorted(letters)))}]" if letters else "(?s:.)"
        alternatives.append(f"{before}{other}{_ANY}")
    return "|".join(alternatives) or r"[^\s\S]"


def _quoted(letter: str) -> str:
    return rf"\x{{{ord(letter):x}}}"


def _unescaped(body: str) -> str:
    return re.sub(r"\\(.)", r"\1", body, flags=re.DOTALL)


def _has_alternatives(pattern: str) -> bool:
    depth = 0
    in_class = False
    escaped = False
    for letter in pattern:
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and depth <= 0:
            return True
    return False
