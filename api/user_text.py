"""Texts of a conversation stay texts: the special tokens in them are not those of the template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hardpoint.plugins import RequestError, Tokenizer

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that are no characters and that Unicode keeps for uses such as this."""


class UserText:
    """Splits the special tokens in what a template is given, before they are tokenised.

    Otherwise a user who writes `<|im_end|>` would end their message and begin another, as the
    system. The assistant's messages are left alone: templates look for markers in them.
    """

    def __init__(self, tokenizer: Tokenizer, *given: Any) -> None:
        """Look for special tokens.

        Args:
            given: messages, tools and variables of a template; plain data.

        Raises:
            RequestError: they hold special tokens, and all code points that could mark them.
        """
        self._tokenizer = tokenizer
        texts = [text for value in given for text in _texts(value)]
        special = [token for token in tokenizer.special_tokens if len(token) > 1]
        begins = {token[0] for token in special}
        texts = [text for text in texts if any(begin in text for begin in begins)]
        found = [token for token in special if any(token in text for text in texts)]
        self._mark = ""
        if not found:
            return
        every = [text for value in given for text in _texts(value, all_roles=True)]
        free = [mark for mark in _MARKS if not any(mark in text for text in every)]
        if not free:
            raise RequestError(
                "messages: expected no special tokens together with all of U+FDD0 to U+FDEF"
            )
        self._mark = free[0]
        # At each place where one begins, because several may overlap.
        self._begin = re.compile(f"(?=(?:{'|'.join(map(re.escape, found))}))(.)", re.DOTALL)

    def marked(self, value: Any) -> Any:
        """Return plain data with a mark in each special token."""
        if not self._mark:
            return value
        if isinstance(value, str):
            return self._begin.sub(lambda begin: begin[1] + self._mark, value)
        if isinstance(value, Mapping):
            if value.get("role") == "assistant":
                return value
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

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


def _texts(value: Any, *, all_roles: bool = False) -> Iterator[str]:
    """Yield the texts in plain data, of the assistant's messages only with `all_roles`."""
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
