"""Structural tags as xgrammar has them.

Its tags have texts, in which our special tokens are found by their text; its own are apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

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
    SequenceFormat,
    StarFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TriggeredTagsFormat,
)

from .compile_program import SENTINEL
from .schemas import spelled_out

Plain = dict[str, Any]
Parts = list[str | int]


class TagConverter:
    """Converts the parts of one structural tag.

    Attributes:
        tokens: the special tokens that the text may have, by id.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        check_schema: Callable[[Any], None],
        check_grammar: Callable[[str], None],
    ) -> None:
        """Start with no tokens.

        Args:
            vocabulary: the tokenizer's.
            check_schema: raises ValueError for a schema that is refused.
            check_grammar: the same for a grammar.
        """
        self.tokens: set[int] = set()
        self._vocabulary = vocabulary
        self._check_schema = check_schema
        self._check_grammar = check_grammar

    def convert(self, format: Format) -> Plain:
        """Return a part and all parts in it.

        Raises:
            ValueError: xgrammar has nothing for it.
        """
        match format:
            case ConstStringFormat():
                return _sequence(self._texts(self._parts(format.value)))
            case TokenFormat():
                return self._token(self._id(format))
            case AnyTextFormat():
                return {"type": "any_text", "excludes": [SENTINEL]}
            case TagFormat():
                return self._tag(format)
            case TriggeredTagsFormat():
                return self._triggered_tags(format)
            case TagsWithSeparatorFormat():
                return self._tags_with_separator(format)
            case _:
                pass
        plain: Plain = msgspec.to_builtins(format)
        match format:
            case SequenceFormat() | OrFormat():
                plain["elements"] = [self.convert(element) for element in format.elements]
            case OptionalFormat() | StarFormat() | PlusFormat():
                plain["content"] = self.convert(format.content)
            case _:
                self._check(format, plain)
        return plain

    def _check(self, format: Format, plain: Plain) -> None:
        """Check parts that xgrammar has nearly as they are."""
        if isinstance(format, JsonSchemaFormat):
            self._check_schema(format.json_schema)
            plain["json_schema"] = spelled_out(format.json_schema)
        elif isinstance(format, GrammarFormat):
            self._check_grammar(format.grammar)

    def _tag(self, tag: TagFormat) -> Plain:
        """Return a tag; it begins and ends with a text or a token, and the rest is within."""
        begin, end = self._parts(tag.begin), self._parts(tag.end)
        content = self.convert(tag.content)
        first = next((index for index, part in enumerate(end) if isinstance(part, int)), 0)
        # A text before a token does not end the content by itself.
        content = _sequence([content, *self._texts(end[:first])])
        end = end[first:]
        if len(end) > 1:
            inner = {"type": "tag", "begin": "", "content": content, "end": self._border(end[0])}
            content = _sequence([inner, *self._texts(end[1:-1])])
        if len(begin) > 1:
            content = _sequence([*self._texts(begin[1:]), content])
        return {
            "type": "tag",
            "begin": self._border(begin[0]),
            "content": content,
            "end": self._border(end[-1]),
        }

    def _triggered_tags(self, format: TriggeredTagsFormat) -> Plain:
        triggers = [self._parts(trigger) for trigger in format.triggers]
        tags = [self._tag(tag) for tag in format.tags]
        plain: Plain = {
            "tags": tags,
            "at_least_one": format.at_least_one,
            "stop_after_first": format.stop_after_first,
        }
        if all(len(parts) == 1 and isinstance(parts[0], str) for parts in triggers):
            if all(isinstance(tag["begin"], str) for tag in tags):
                texts = {"triggers": format.triggers, "excludes": [SENTINEL]}
                return {"type": "triggered_tags", **texts, **plain}
        elif all(isinstance(parts[0], int) for parts in triggers):
            tokens = sorted({parts[0] for parts in triggers if isinstance(parts[0], int)})
            others = [token for token in self._vocabulary.special if token not in tokens]
            return {
                "type": "token_triggered_tags",
                "trigger_tokens": tokens,
                "exclude_tokens": others,
                **plain,
            }
        raise ValueError(
            "expected triggers for xgrammar that are all texts, without special tokens in them, "
            f"or that all begin with a special token, got {format.triggers}"
        )

    def _tags_with_separator(self, format: TagsWithSeparatorFormat) -> Plain:
        tags = [self._tag(tag) for tag in format.tags]
        separator = self._parts(format.separator)
        if len(separator) == 1 and isinstance(separator[0], str):
            plain: Plain = msgspec.to_builtins(format)
            return {**plain, "type": "tags_with_separator", "tags": tags}
        any_tag: Plain = {"type": "or", "elements": tags}
        some = any_tag
        if not format.stop_after_first:
            further = _sequence([*self._texts(separator), any_tag])
            some = _sequence([any_tag, {"type": "star", "content": further}])
        return some if format.at_least_one else {"type": "optional", "content": some}

    def _parts(self, text: str | TokenFormat) -> Parts:
        """Return a text as texts and tokens, at least one."""
        if isinstance(text, TokenFormat):
            return [self._id(text)]
        return self._vocabulary.split(text) if text else [""]

    def _texts(self, parts: Parts) -> list[Plain]:
        return [
            self._token(part) if isinstance(part, int) else {"type": "const_string", "value": part}
            for part in parts
        ]

    def _border(self, part: str | int) -> str | Plain:
        return self._token(part) if isinstance(part, int) else part

    def _token(self, token: int) -> Plain:
        self.tokens.add(token)
        return {"type": "token", "token": token}

    def _id(self, format: TokenFormat) -> int:
        token = format.token
        if isinstance(token, str):
            token = self._vocabulary.special_ids.get(token, -1)
        if token not in self._vocabulary.special:
            raise ValueError(
                f"expected the text or id of a special token of the tokenizer, got {format.token!r}"
            )
        return token


def _sequence(elements: list[Plain]) -> Plain:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
