"""Texts of users in conversations: special tokens in them stay texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hardpoint.errors import RequestError
from hardpoint.plugins.text.tokenizer import Tokenizer

__all__ = ["UserText"]

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that are not characters and that Unicode keeps for uses such as this."""


class UserText:
    """Splits the special tokens in the inputs of a chat template before tokenization.

    Otherwise a user who writes `<|im_end|>` would end their message and begin another, as the
    system. The assistant's messages are left alone: templates look for markers in them. Tokens of
    media alone are split there, too: an image is a part of a message, never a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *values: Any, media_tokens: Collection[int] = ()
    ) -> None:
        """Look for special tokens.

        Args:
            values: messages, tools and variables of a template; plain data.
            media_tokens: ids of the tokens of media.

        Raises:
            RequestError: they hold special tokens, and all code points that could mark them.
        """
        self._tokenizer = tokenizer
        texts = [text for value in values for text in _texts(value)]
        special = [token for token in tokenizer.special_tokens if len(token) > 1]
        begins = {token[0] for token in special}
        texts = [text for text in texts if any(begin in text for begin in begins)]
        present = [token for token in special if any(token in text for text in texts)]
        self._mark = ""
        ids = tokenizer.special_tokens if media_tokens else {}
        media = [token for token in special if ids.get(token) in media_tokens]
        every: list[str] = []
        if present or media:
            every = [text for value in values for text in _texts(value, all_roles=True)]
        media = [token for token in media if any(token in text for text in every)]
        if not (present or media):
            return
        free = [mark for mark in _MARKS if not any(mark in text for text in every)]
        if not free:
            raise RequestError(
                "messages: expected no special tokens together with all of U+FDD0 to U+FDEF"
            )
        self._mark = free[0]
        self._begins = _beginnings({*present, *media})
        self._begins_of_media = _beginnings(media) if media else None

    def marked(self, value: Any) -> Any:
        """Return plain data with a mark in each special token."""
        return self._marked(value, self._begins) if self._mark else value

    def _marked(self, value: Any, begins: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return begins.sub(lambda begin: begin[1] + self._mark, value)
        if isinstance(value, Mapping):
            if value.get("role") == "assistant":
                if self._begins_of_media is None:
                    return value
                begins = self._begins_of_media
            marked = self._marked
            return {marked(key, begins): marked(item, begins) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, begins) for item in value]
        return value

    def encode(self, text: str) -> tuple[str, list[int]]:
        """Return a rendered text without marks, and its token ids."""
        pieces = text.split(self._mark) if self._mark else [text]
        # The template writes the special tokens itself.
        ids = [
            token
            for piece in pieces
            for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]
        return "".join(pieces), ids


def _beginnings(tokens: Collection[str]) -> re.Pattern[str]:
    """Match the first character at each place where a token begins, because several may overlap."""
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, tokens))}))(.)", re.DOTALL)


def _texts(value: Any, *, all_roles: bool = False) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if value.get("role") == "assistant" and not all_roles:
            return
        for key, item in value.items():
            yield from _texts(key, all_roles=all_roles)
            yield from _texts(item, all_roles=all_roles)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, all_roles=all_roles)
