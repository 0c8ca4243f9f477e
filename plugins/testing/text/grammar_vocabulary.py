"""The small vocabulary on which the suite of grammar backends runs, and its masks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hardpoint.plugins.grammars import GrammarState, Vocabulary

__all__ = ["END", "Mask", "SampleTokens", "build_vocabulary", "large_vocabulary"]

END = "<eos>"
"""The special token that ends a text, in the vocabularies built here."""

_SPECIAL = ("<pad>", END, "<|call|>", "<|end|>", "")
_FIRST_SPECIAL = 256  # the character of a special token is this and its id; those below are bytes
_MAX_PIECES = 400


def build_vocabulary(texts: Sequence[str], special: Sequence[str]) -> Vocabulary:
    """Return a vocabulary of all bytes, pieces of texts, special tokens, and an empty token.

    Pieces begin and end in the middle of characters, too, and cross the end of a text. Two of them
    have two ids.

    Args:
        texts: texts of samples.
        special: texts of further special tokens.
    """
    random_choice = random.Random(0)
    pieces: dict[bytes, None] = {}
    for text in texts:
        data = text.encode()
        pieces |= dict.fromkeys([data, data + b"\n", data + b"ab", b" " + data])
        pieces |= dict.fromkeys(
            data[at : at + size] for size in (2, 3, 5) for at in range(len(data) - size + 1)
        )
    names = sorted(piece for piece in pieces if len(piece) > 1)
    if len(names) > _MAX_PIECES:
        names = sorted(random_choice.sample(names, _MAX_PIECES))
    first = next((text.encode() for text in texts if text), b"a")
    twice = [first[:1], first[:2]]
    further = [*names, *twice, b"zz", b"\xff\xfe", b'",', b'":', b"}}", b"  ", b"\n\n"]
    specials = [*dict.fromkeys([*_SPECIAL, *special])]
    tokens = [b"", *(name.encode() for name in specials), *map(_byte, range(256)), *further]
    return Vocabulary(tokens=tuple(tokens), special=tuple(range(1, 1 + len(specials))))


def large_vocabulary(texts: Sequence[str], size: int) -> Vocabulary:
    """Return a vocabulary of a real one's size, of syllables, numbers and pieces of texts."""
    small = build_vocabulary(texts, ())
    known = dict.fromkeys(small.tokens)
    syllables = [a + b for a in "bcdfghklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er")]
    syllabic = ("".join(parts) for n in (2, 3) for parts in itertools.product(syllables, repeat=n))
    tokens = list(small.tokens)
    for number, word in enumerate(syllabic):
        token = (word, f" {word}", f" {word.title()}", f'"{word}', str(number))[number % 5].encode()
        if len(tokens) == size:
            break
        if token not in known:
            tokens.append(token)
    return Vocabulary(tokens=tuple(tokens), special=small.special)


def _byte(value: int) -> bytes:
    return bytes([value])


@dataclass(frozen=True)
class Mask:
    """The results of `fill_bitmask`.

    Attributes:
        row: row of the bitmask, as bytes.
        may_end: what it returned.
    """

    row: bytes
    may_end: bool

    @classmethod
    def of(cls, state: GrammarState, vocab_size: int) -> Mask:
        """Return the mask of a state."""
        row = np.zeros((vocab_size + 31) // 32, np.int32)
        return cls(may_end=state.fill_bitmask(row), row=row.tobytes())

    @cached_property
    def ids(self) -> frozenset[int]:
        """The tokens allowed; ids beyond the vocabulary too."""
        bits = np.unpackbits(np.frombuffer(self.row, np.uint8), bitorder="little")
        return frozenset(bits.nonzero()[0].tolist())


class SampleTokens:
    """Texts as tokens.

    A text is a string with a character for each byte, and one for each special token: so a token
    that adds a text is a string, too.

    Attributes:
        vocabulary: the tokens.
        texts: by id, what the token adds; "" for an id that no grammar allows.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.texts = [token.decode("latin-1") for token in vocabulary.tokens]
        for token in vocabulary.special:
            self.texts[token] = chr(_FIRST_SPECIAL + token)
        self._ids: dict[str, list[int]] = {}
        for token, text in enumerate(self.texts):
            if text:
                self._ids.setdefault(text, []).append(token)
        self._longest = max(map(len, self._ids))

    def text(self, text: str, *, special: bool) -> str:
        """Return a sample's text; special tokens in it are tokens if `special` is true."""
        parts = self.vocabulary.split(text) if special else [text]
        return "".join(
            part.encode().decode("latin-1") if isinstance(part, str) else chr(_FIRST_SPECIAL + part)
            for part in parts
        )

    def shown(self, text: str) -> str:
        """Return a text in a readable form."""
        parts: list[str] = []
        for is_special, run in itertools.groupby(text, lambda c: ord(c) >= _FIRST_SPECIAL):
            if is_special:
                parts += (self.name(ord(char) - _FIRST_SPECIAL) for char in run)
            else:
                parts.append(repr("".join(run).encode("latin-1").decode(errors="backslashreplace")))
        return " + ".join(parts) or "''"

    def name(self, token: int) -> str:
        """Return how messages name a token."""
        if token >= len(self.texts):
            return f"{token} (beyond the vocabulary)"
        if token in self.vocabulary.special:
            return f"{token} (the special token {self.vocabulary.tokens[token].decode()!r})"
        return f"{token} ({self.vocabulary.tokens[token]!r})"

    def ids(self, text: str) -> Sequence[int]:
        """Return the tokens that add exactly a text."""
        return self._ids.get(text, ())

    def next_tokens(self, rest: str) -> Iterator[int]:
        """Yield the tokens with which a text begins, short ones first."""
        for size in range(1, min(self._longest, len(rest)) + 1):
            yield from self.ids(rest[:size])

    def tokenizations(self, text: str, count: int = 4) -> list[list[int]]:
        """Return a text cut into tokens in different ways: by bytes, greedily, and at random.

        Ways that the vocabulary does not have are left out.
        """
        tokenizations: list[list[int]] = []
        pickers: list[Callable[[list[int]], int]] = [lambda ids: ids[0], lambda ids: ids[-1]]
        pickers += [random.Random(number).choice for number in range(count - len(pickers))]
        for pick in pickers:
            ids: list[int] = []
            rest = text
            while rest and (possible := list(self.next_tokens(rest))):
                ids.append(pick(possible))
                rest = rest[len(self.texts[ids[-1]]) :]
            if not rest and ids not in tokenizations:
                tokenizations.append(ids)
        return tokenizations

    def next_by_prefix(self, texts: Iterable[str]) -> dict[str, set[int]]:
        """Return for each beginning of texts the tokens with which one of them goes on."""
        allowed: dict[str, set[int]] = {}
        for text in texts:
            for at in range(len(text) + 1):
                allowed.setdefault(text[:at], set()).update(self.next_tokens(text[at:]))
        return allowed
