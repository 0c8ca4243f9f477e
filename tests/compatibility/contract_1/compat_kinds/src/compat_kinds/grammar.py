"""A grammar backend for digits."""

import re

from hardpoint.plugins import GrammarBackend
from hardpoint.plugins.grammars import allow_tokens


class CompatDigits(GrammarBackend):
    """Compiles one regex, `[0-9]{count}`."""

    contract = 1
    formats = ("regex",)

    def __init__(self, context):
        super().__init__(context)
        assert context.compile_seconds > 0
        assert len(context.vocabulary.tokens) <= context.vocab_size
        special = set(context.vocabulary.special)
        self.sizes = {
            token: len(text)
            for token, text in enumerate(context.vocabulary.tokens)
            if re.fullmatch(rb"[0-9]+", text) and token not in special
        }

    def compile(self, structured):
        match = re.fullmatch(r"\[0-9\]\{(\d{1,4})\}", structured.regex or "")
        if match is None:
            raise ValueError(f"{structured.format}: expected a regex [0-9]{{count}}")
        return Digits(self.sizes, [int(match[1])])


class Digits:
    """How many digits are left after each token."""

    def __init__(self, sizes, left):
        self.sizes, self.left = sizes, left

    def fill_bitmask(self, row):
        allow_tokens(row, [t for t, size in self.sizes.items() if size <= self.left[-1]])
        return self.left[-1] == 0

    def advance(self, token_id):
        size = self.sizes.get(token_id)
        if size is None or size > self.left[-1]:
            return False
        self.left.append(self.left[-1] - size)
        return True

    def rollback(self, count):
        del self.left[len(self.left) - count :]

    def fork(self):
        return Digits(self.sizes, self.left[:])
