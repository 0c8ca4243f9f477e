"""A grammar backend under test: its states, moved over the texts of samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property

from hardpoint.plugins import GrammarBackend
from hardpoint.plugins.grammars import GrammarState
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing.suite import Rule, Violation, short_repr

from .grammar_rules import ADVANCE, END_OF_TEXT, FORMATS, NO_TEXT
from .grammar_samples import GrammarSample, described
from .grammar_vocabulary import END, Mask, SampleTokens

__all__ = ["BEYOND", "MAX_DRAFTS", "GrammarSession", "compiled_by"]

BEYOND = 37
"""Ids of the model that the vocabulary has not."""
MAX_DRAFTS = 8
"""Tokens that a rollback undoes at most."""
_POSITIONS = 6  # in a text, at which a check for every token is made


class GrammarSession:
    """A backend with the samples that it compiled.

    Attributes:
        backend: under test.
        samples: what it compiles.
        tokens: those of its vocabulary.
        vocab_size: number of the model's token ids.
        end: the token that ends texts; None if the vocabulary has none.
    """

    def __init__(
        self, backend: GrammarBackend, samples: Sequence[GrammarSample], tokens: SampleTokens
    ) -> None:
        self.backend, self.samples, self.tokens = backend, samples, tokens
        self.vocab_size = len(tokens.vocabulary.tokens) + BEYOND
        self.end = tokens.vocabulary.special_ids.get(END)

    @cached_property
    def compiled(self) -> list[tuple[GrammarSample, GrammarState]]:
        """Each sample with its state before the first token.

        Raises:
            Violation: there is no sample, or one does not compile.
        """
        if not self.samples:
            raise Violation("the suite has no samples", "set `samples` in the test class")
        return [(s, compiled_by(self.backend, s.checked)) for s in self.samples]

    def where(self, sample: GrammarSample, ids: Sequence[int]) -> str:
        """Return a description and tokens, for messages."""
        names = [self.tokens.name(token) for token in ids]
        return f"{described(sample.checked)}: after the tokens [{', '.join(names)}]"

    def texts(self, sample: GrammarSample, texts: Sequence[str]) -> list[str]:
        """Return texts of a sample with a character per byte and special token."""
        special = sample.has_special
        return [self.tokens.text(text, special=special) for text in texts]

    def paths(self, sample: GrammarSample, count: int = 3) -> Iterator[list[int]]:
        """Yield valid texts as tokens, in different ways."""
        for text in self.texts(sample, sample.texts[:6]):
            yield from self.tokens.tokenizations(text, count)

    def positions(
        self, sample: GrammarSample, root: GrammarState
    ) -> Iterator[tuple[list[int], GrammarState]]:
        """Yield some places in valid texts: the tokens so far, and a state of its own."""
        places = [(path, at) for path in self.paths(sample) for at in range(len(path) + 1)]
        chosen = random.Random(0).sample(places, min(len(places), _POSITIONS))
        for path, at in [([], 0), *chosen]:
            state = root.fork()
            for index, token in enumerate(path[:at]):
                self.move(state, token, self.where(sample, path[:index]))
            yield path[:at], state

    def move(self, state: GrammarState, token: int, where: str) -> None:
        """Advance by a token that is allowed.

        Raises:
            Violation: it is refused.
        """
        if (moved := state.advance(token)) is not True:
            raise ADVANCE.violation(
                f"{where}, advance({self.tokens.name(token)}) returned {moved!r}; the token is "
                f"allowed"
            )

    def mask(self, state: GrammarState) -> Mask:
        """Return the mask of a state.

        Raises:
            Violation: fill_bitmask returned no bool.
        """
        mask = Mask.of(state, self.vocab_size)
        if type(mask.may_end) is not bool:
            raise END_OF_TEXT.violation(
                f"fill_bitmask returned {short_repr(mask.may_end)}, no bool",
                "return True or False",
            )
        return mask

    def masks(self, path: Sequence[int], state: GrammarState, where: str) -> list[Mask]:
        """Return the masks before, between and after tokens; advance the state over them."""
        masks = [self.mask(state)]
        for token in path:
            self.move(state, token, where)
            masks.append(self.mask(state))
        return masks

    def allowed(self, sample: GrammarSample, mask: Mask, where: str) -> set[int]:
        """Return the tokens of a mask without the token that ends the text, if the text may end.

        Raises:
            Violation: an id that is not text is allowed.
        """
        ids = set(mask.ids)
        if mask.may_end:
            ids.discard(-1 if self.end is None else self.end)
        texts, special = self.tokens.texts, self.tokens.vocabulary.special
        for token in sorted(ids):
            is_text = token not in special or sample.has_special
            if token >= len(texts) or not texts[token] or not is_text:
                raise NO_TEXT.violation(f"{where}, it allows {self.tokens.name(token)}")
        return ids

    def check_same(self, rule: Rule, state: GrammarState, mask: Mask, label: str) -> None:
        """Check that a state has a mask."""
        actual = self.mask(state)
        if actual.may_end != mask.may_end:
            raise rule.violation(
                f"{label}: the text may end is {actual.may_end}, it was {mask.may_end}"
            )
        for token in sorted(actual.ids ^ mask.ids):
            now = "is allowed" if token in actual.ids else "is not allowed"
            raise rule.violation(
                f"{label}: token {self.tokens.name(token)} {now}, and should be as before"
            )

    def is_whole(self, path: Sequence[int], state: GrammarState) -> bool:
        """Return whether tokens are a text that may end."""
        return all(state.advance(token) for token in path) and self.mask(state).may_end


def compiled_by(backend: GrammarBackend, structured: StructuredOutputs) -> GrammarState:
    """Compile a description, which has to be accepted."""
    try:
        return backend.compile(structured)
    except Exception as cause:
        raise FORMATS.violation(
            f"compile raised {type(cause).__name__}: {cause}, for {described(structured)}"
        ) from cause
