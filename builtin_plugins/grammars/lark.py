"""Structural tags in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.structured import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JsonSchemaFormat,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    RegexFormat,
    SequenceFormat,
    StarFormat,
    StructuralTag,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TriggeredTagsFormat,
)

from .limits import is_lark

FREE = '%llguidance {"no_forcing": true}'
"""The last line of a grammar with texts that may be cut into any tokens.

Without it, one way alone is allowed where a text is certain, and the model cannot choose its own.
"""

_TEXT = "/(?s:.*)/"


class _Item(NamedTuple):
    """A part of a rule.

    Attributes:
        kind: a text, a special token in Lark's syntax, any text, the text of a regular expression,
            or another expression.
        source: the text, or the expression.
    """

    kind: Literal["text", "token", "any", "regex", "rule"]
    source: str = ""


class LarkWriter:
    """Writes the grammar of one structural tag."""

    def __init__(
        self, vocabulary: Vocabulary, write_schema: Callable[[Any], Mapping[str, Any]]
    ) -> None:
        """`write_schema`: returns a JSON schema as llguidance reads it."""
        self._vocabulary = vocabulary
        self._write_schema = write_schema
        self._rules: list[str] = []
        self._embedded: list[dict[str, str]] = []

    def grammar(self, tag: StructuralTag) -> str:
        """Return the grammar as llguidance reads it.

        Raises:
            ValueError: a part cannot be expressed.
        """
        start = self._sequence(self._items(tag.format))
        lark = "\n".join([f"start: {start}", *self._rules, FREE, ""])
        main: dict[str, str] = {"name": "start", "lark_grammar": lark}
        return json.dumps({"grammars": [main, *self._embedded]})

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _sequence(self, items: Sequence[_Item]) -> str:
        parts: list[str] = []
        patterns: list[str] = []  # those before the item, up to which they may go
        for item, after in zip_longest(items, items[1:]):
            match item.kind:
                case "text" if patterns:
                    # Ends their text as soon as it comes; else a pattern that it fits goes on.
                    patterns.append(quoted(item.source))
                    parts.append(self._rule(" ".join(patterns), "[lazy]"))
                    patterns = []
                case "text":
                    parts.append(quoted(item.source))
                case "any" if after is not None and after.kind not in ("text", "token"):
                    raise ValueError(
                        "any_text: expected a text or a special token after it, or nothing"
                    )
                case "any":
                    patterns.append(_TEXT)
                case "regex":
                    patterns.append(item.source)
                case _:
                    parts += [*self._joined(patterns), item.source]
                    patterns = []
        return " ".join([*parts, *self._joined(patterns)]) or '""'

    def _joined(self, patterns: Sequence[str]) -> Sequence[str]:
        """Return patterns as one terminal: as several, the first one would take all it can."""
        if len(patterns) < 2:
            return patterns
        name = f"R{len(self._rules)}"
        self._rules.append(f"{name}: {' '.join(patterns)}")
        return [name]

    def _items(self, format: Format) -> list[_Item]:
        match format:
            case ConstStringFormat(value=text):
                return self._text(text)
            case TokenFormat(token=token):
                return [self._token(token)]
            case AnyTextFormat():
                return [_Item("any")]
            case RegexFormat(pattern=pattern):
                return [_Item("regex", f"/{regex_to_lark(pattern, use_ascii='')}/")]
            case SequenceFormat(elements=elements):
                items = deque[_Item]()
                for part in reversed(elements):
                    self._add_before(part, items)
                return list(items)
            case TagFormat(begin=begin, content=content, end=end):
                items = deque(self._text(end))
                self._add_before(content, items)
                return [*self._text(begin), *items]
            case _:
                return [_Item("rule", self._expression(format))]

    def _add_before(self, format: Format, items: deque[_Item]) -> None:
        """Add the items of a format before others; each of its choices takes a text after it."""
        ends: list[Format | None] = []
        if items and items[0].kind == "text" and _is_open(format):
            match format:
                case OrFormat(elements=elements):
                    ends += elements
                case OptionalFormat(content=content):
                    ends += [content, None]
        if not ends:
            items.extendleft(reversed(self._items(format)))
            return
        text, choices = items.popleft(), []
        for choice in ends:
            ended = deque([text])
            if choice is not None:
                self._add_before(choice, ended)
            choices.append(self._rule(self._sequence(list(ended))))
        items.appendleft(_Item("rule", self._any_of(choices)))

    def _expression(self, format: Format) -> str:
        match format:
            case JsonSchemaFormat(json_schema=schema):
                return self._rule(f"%json {json.dumps(self._write_schema(schema))}")
            case GrammarFormat(grammar=source):
                name = f"g{len(self._embedded)}"
                lark = f"{read_grammar(source)}\n{FREE}\n"
                self._embedded.append({"name": name, "lark_grammar": lark})
                return f"@{name}"
            case OrFormat(elements=elements):
                return self._any_of(self._grouped(part) for part in elements)
            case OptionalFormat(content=content):
                return f"({self._grouped(content)})?"
            case StarFormat(content=content):
                return f"({self._grouped(content)})*"
            case PlusFormat(content=content):
                return f"({self._grouped(content)})+"
            case TagsWithSeparatorFormat():
                return self._separated(format)
            case TriggeredTagsFormat():
                return self._triggered(format)
            case _:
                return self._grouped(format)

    def _grouped(self, format: Format) -> str:
        return self._rule(self._sequence(self._items(format)))

    def _any_of(self, expressions: Iterable[str]) -> str:
        return f"({' | '.join(expressions)})"

    def _separated(self, format: TagsWithSeparatorFormat) -> str:
        tag = self._rule(self._any_of(self._grouped(tag) for tag in format.tags))
        more = self._sequence([*self._text(format.separator), _Item("rule", tag)])
        body = tag if format.stop_after_first else f"{tag} ({more})*"
        return f"({body})" if format.at_least_one else f"({body})?"

    def _triggered(self, format: TriggeredTagsFormat) -> str:
        triggers = set(format.triggers)
        lengths = sorted(set(map(len, triggers)), reverse=True)
        by_trigger: dict[str, list[str]] = {}
        for tag in format.tags:
            begin = self._text(tag.begin)
            whole = self._vocabulary_text(begin)
            starts = (whole[:length] for length in lengths)
            trigger = next((start for start in starts if start in triggers), None)
            if trigger is None:
                raise ValueError(f"triggered_tags: no trigger begins the tag {whole!r}")
            rest = [*self._text(whole[len(trigger) :]), *self._items(tag.content)]
            expression = self._rule(self._sequence([*rest, *self._text(tag.end)]))
            by_trigger.setdefault(trigger, []).append(expression)
        tagged = []
        for trigger, rests in by_trigger.items():
            head = self._sequence([_Item("any"), *self._text(trigger)])
            tagged.append(self._rule(f"{head} {self._any_of(rests)}"))
        later = self._rule(self._any_of(tagged))
        tail = self._rule(_TEXT)
        if not format.at_least_one:
            return f"({tail} | {later})" if format.stop_after_first else f"({later})* {tail}"
        first = self._rule(self._any_of(self._grouped(tag) for tag in format.tags))
        return first if format.stop_after_first else f"{first} ({later})* {tail}"

    def _vocabulary_text(self, items: Sequence[_Item]) -> str:
        tokens = self._vocabulary.tokens
        return "".join(
            tokens[int(item.source[2:-2])].decode(errors="replace")
            if item.kind == "token"
            else item.source
            for item in items
        )

    def _text(self, text: str | TokenFormat) -> list[_Item]:
        if isinstance(text, TokenFormat):
            return [self._token(text.token)]
        return [
            _token(part) if isinstance(part, int) else _Item("text", part)
            for part in self._vocabulary.split(text)
            if part != ""
        ]

    def _token(self, token: str | int) -> _Item:
        vocabulary = self._vocabulary
        if isinstance(token, str):
            if token not in vocabulary.special_ids:
                raise ValueError(f"token: the tokenizer has no special token {token!r}")
            return _token(vocabulary.special_ids[token])
        if not 0 <= token < len(vocabulary.tokens):
            raise ValueError(
                f"token: expected an id from 0 to {len(vocabulary.tokens) - 1}, got {token}"
            )
        return _token(token)


def _is_open(format: Format) -> bool:
    """Return whether a format may end with a pattern, which the text after it ends."""
    match format:
        case AnyTextFormat() | RegexFormat():
            return True
        case SequenceFormat(elements=[*_, part]) | OptionalFormat(content=part):
            return _is_open(part)
        case OrFormat(elements=elements):
            return any(map(_is_open, elements))
        case TagFormat(content=part, end=""):
            return _is_open(part)
        case _:
            return False


def read_grammar(source: str) -> str:
    """Return a grammar of Lark's or GBNF's syntax in Lark's.

    Raises:
        ValueError: it is of neither.
    """
    if is_lark(source):
        return source
    try:
        return gbnf_to_lark(source)
    except Exception as cause:  # the library raises its own, and plain Exceptions
        raise ValueError(f"it is neither Lark nor GBNF: {cause}") from cause


def _token(token: int) -> _Item:
    return _Item("token", f"<[{token}]>")


def quoted(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
