"""A minimal grammar backend: the answer is one of several texts.

Enable it with `plugins.enable = ["choice_grammar"]`; then a request may name it:
`structured={"choice": [...], "backend": "choice_grammar"}`. It compiles `choice` alone.
`hardpoint.testing.GrammarSuite` checks it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hardpoint.plugins import GrammarBackend, GrammarContext
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.toolkit.bitmasks import allow_tokens

if TYPE_CHECKING:
    from hardpoint.plugins.text.grammars import GrammarState


class ChoiceGrammar(GrammarBackend):
    """The texts of `choice`."""

    contract = 1
    formats = ("choice",)

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        vocabulary = context.vocabulary
        self.texts = [*vocabulary.tokens, *[b""] * (context.vocab_size - len(vocabulary.tokens))]
        for token in vocabulary.special:  # no grammar allows one for its text
            self.texts[token] = b""
        self.longest = max(map(len, self.texts))
        self.ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(self.texts):
            self.ids.setdefault(text, []).append(token)

    def compile(self, structured: StructuredOutputs) -> GrammarState:
        if structured.choice is None:
            raise ValueError(
                f"{structured.format}: expected choice, the only format that it compiles"
            )
        return Choices(self, [[text.encode() for text in structured.choice]])


class Choices:
    """The rest of each possible text: a list per token so far."""

    def __init__(self, grammar: ChoiceGrammar, rests: list[list[bytes]]) -> None:
        self.grammar, self.rests = grammar, rests

    def fill_bitmask(self, row: np.ndarray) -> bool:
        for rest in self.rests[-1]:
            for size in range(1, min(len(rest), self.grammar.longest) + 1):
                allow_tokens(row, self.grammar.ids.get(rest[:size], ()))
        return b"" in self.rests[-1]

    def advance(self, token_id: int) -> bool:
        text = self.grammar.texts[token_id]
        left = [rest[len(text) :] for rest in self.rests[-1] if rest.startswith(text)]
        if text and left:
            self.rests.append(left)
        return bool(text and left)

    def rollback(self, count: int) -> None:
        del self.rests[-count:]

    def fork(self) -> Choices:
        return Choices(self.grammar, self.rests[:])
