"""Grammar backends with one mistake each."""

from __future__ import annotations

import threading
import time

import numpy as np

from hardpoint.plugins import GrammarBackend
from hardpoint.testing.text.grammar_samples import KEYWORDS
from support.samples import Sample, spend


class Finite(Sample, GrammarBackend, contract=1):
    """A correct one: of `choice`, and of JSON schemas that are an enum of texts."""

    formats = ("choice", "json")

    def __init__(self, context):
        super().__init__(context)
        vocabulary = context.vocabulary
        self.texts = [*vocabulary.tokens, *[b""] * (context.vocab_size - len(vocabulary.tokens))]
        for token in vocabulary.special:
            self.texts[token] = b""
        self.longest = max(map(len, self.texts))
        self.ids = {}
        for token, text in enumerate(self.texts):
            self.ids.setdefault(text, []).append(token)

    def compile(self, structured):
        return State(self, [self.language(structured)])

    def language(self, structured):
        if structured.choice is not None:
            return [text.encode() for text in structured.choice]
        if structured.format != "json":
            raise ValueError(f"{structured.format}: expected choice or json")
        schema = structured.json
        if structured.lenient:  # any text of the suite that a schema allows
            return [valid.encode() for _, valid, _ in KEYWORDS]
        if not isinstance(schema, dict) or list(schema) != ["enum"]:
            raise ValueError("json: expected an enum")
        if not isinstance(schema["enum"], list):
            raise ValueError("json.enum: expected a list")
        return [f'"{text}"'.encode() for text in schema["enum"]]


class State:
    """The rest of each text: a list per token so far."""

    def __init__(self, grammar, rests):
        self.grammar, self.rests = grammar, rests

    def allowed(self):
        for rest in self.rests[-1]:
            for size in range(1, min(len(rest), self.grammar.longest) + 1):
                yield from self.grammar.ids.get(rest[:size], ())

    def fill_bitmask(self, row):
        words = row.view(np.uint32)
        for token in self.allowed():
            words[token // 32] |= 1 << token % 32
        return b"" in self.rests[-1]

    def left(self, token_id):
        text = self.grammar.texts[token_id]
        return [rest[len(text) :] for rest in self.rests[-1] if text and rest.startswith(text)]

    def advance(self, token_id):
        if left := self.left(token_id):
            self.rests.append(left)
        return bool(left)

    def rollback(self, count):
        del self.rests[-count:]

    def fork(self):
        return type(self)(self.grammar, self.rests[:])


def with_state(state):
    """Return a backend with a class of states, named as it is."""

    def compiled(self, structured):
        return state(self, [self.language(structured)])

    return type(state.__name__, (Finite,), {"compile": compiled, "__module__": __name__})


class WithoutContract(Finite, contract=None):
    pass


@with_state
class TooWide(State):
    def allowed(self):
        """Compare the first byte of tokens alone."""
        first = {rest[:1] for rest in self.rests[-1] if rest}
        return [t for t, text in enumerate(self.grammar.texts) if text and text[:1] in first]


@with_state
class TooNarrow(State):
    def allowed(self):
        """Allow no token of several bytes."""
        return [t for t in super().allowed() if len(self.grammar.texts[t]) == 1]


@with_state
class OneIdPerText(State):
    def allowed(self):
        """Allow one of two tokens with the same bytes."""
        return [self.grammar.ids[self.grammar.texts[t]][0] for t in super().allowed()]


@with_state
class WholeCharacters(State):
    def allowed(self):
        """Allow whole characters only."""
        for token in super().allowed():
            try:
                self.grammar.texts[token].decode()
            except UnicodeDecodeError:
                continue
            yield token


class Specials(Finite):
    """Takes special tokens for their texts."""

    def __init__(self, context):
        super().__init__(context)
        for token in context.vocabulary.special:
            text = context.vocabulary.tokens[token]
            self.texts[token] = text
            self.ids.setdefault(text, []).append(token)


@with_state
class Beyond(State):
    def fill_bitmask(self, row):
        can_end = super().fill_bitmask(row)
        row[-1] = -1
        return can_end


@with_state
class AllowsEmpty(State):
    def allowed(self):
        yield from super().allowed()
        yield 0


@with_state
class EndsTooLate(State):
    def fill_bitmask(self, row):
        return super().fill_bitmask(row) and self.rests[-1] == [b""]


@with_state
class EndsTooEarly(State):
    def fill_bitmask(self, row):
        super().fill_bitmask(row)
        return len(self.rests) > 1


@with_state
class ReturnsNone(State):
    def fill_bitmask(self, row):
        super().fill_bitmask(row)


@with_state
class Disagrees(State):
    def advance(self, token_id):
        """Accept a token by its first byte."""
        text = self.grammar.texts[token_id][:1]
        left = [rest[1:] for rest in self.rests[-1] if text and rest.startswith(text)]
        left = super().left(token_id) or left
        if left:
            self.rests.append(left)
        return bool(left)


@with_state
class RaisesInAdvance(State):
    def advance(self, token_id):
        if not super().advance(token_id):
            raise ValueError("the token is not allowed")
        return True


@with_state
class RefusedChanges(State):
    def advance(self, token_id):
        left = self.left(token_id)
        self.rests.append(left)
        return bool(left)


@with_state
class RefusedIsUndone(State):
    def advance(self, token_id):
        left = self.left(token_id)
        self.rests.append(left or self.rests[-1])
        return bool(left)


@with_state
class RollbackOffByOne(State):
    def rollback(self, count):
        del self.rests[max(1, len(self.rests) - count + 1) :]


@with_state
class RollbackForgets(State):
    def rollback(self, count):
        """Undo tokens of one byte only."""
        for _ in range(count):
            left = self.rests.pop()
            if all(len(a) - len(b) > 3 for a, b in zip(self.rests[-1], left, strict=False)):
                self.rests.append(left)


@with_state
class RollbackOnce(State):
    pending = 0

    def rollback(self, count):
        """Undo tokens later, and only the last time."""
        self.pending = count

    def now(self):
        if self.pending:
            super().rollback(self.pending)
        self.pending = 0

    def fill_bitmask(self, row):
        self.now()
        return super().fill_bitmask(row)

    def advance(self, token_id):
        self.now()
        return super().advance(token_id)

    def fork(self):
        self.now()
        return super().fork()


@with_state
class ForkShares(State):
    def fork(self):
        return type(self)(self.grammar, self.rests)


@with_state
class ForksAreOne(State):
    """Forks at the same place are one."""

    one = None

    def fork(self):
        if self.one is None or self.one.rests != self.rests:
            self.one = type(self)(self.grammar, self.rests[:])
        return self.one


@with_state
class FillChanges(State):
    filled = 0

    def fill_bitmask(self, row):
        self.filled += 1
        can_end = super().fill_bitmask(row)
        if self.filled % 3 == 0:
            row[:] = 0
        return can_end


class OneCurrent(Finite):
    """Keeps the grammar that is compiled in the backend."""

    def compile(self, structured):
        self.current = self.language(structured)
        time.sleep(0.01)
        return State(self, [self.current])


@with_state
class OneThread(State):
    def __init__(self, grammar, rests):
        super().__init__(grammar, rests)
        self.thread = threading.get_ident()

    def fill_bitmask(self, row):
        assert threading.get_ident() == self.thread, "another thread"
        return super().fill_bitmask(row)


class RaisesTypeError(Finite):
    def language(self, structured):
        if isinstance(structured.json, dict) and {}.get(structured.json.get("anyOf")):
            raise ValueError("json.anyOf: expected an enum")
        return super().language(structured)


class RefusesWithoutReason(Finite):
    def language(self, structured):
        try:
            return super().language(structured)
        except ValueError:
            raise ValueError from None


class AcceptsAnything(Finite):
    def language(self, structured):
        if structured.json is not None and list(structured.json) != ["enum"]:
            return [b"null"]
        return super().language(structured)


class AcceptsOtherFormats(Finite):
    def language(self, structured):
        if structured.regex is not None:
            return [structured.regex.encode()]
        return super().language(structured)


class StatesTooMuch(Finite):
    formats = ("choice", "json", "regex")


class NoFormats(Finite):
    formats = ()


class TakesForever(Finite):
    def compile(self, structured):
        language = self.language(structured)
        if len(language) > 1000:
            time.sleep(5)
        return State(self, [language])


class RaisesForLarge(Finite):
    def compile(self, structured):
        language = self.language(structured)
        if len(language) > 1000:
            raise RecursionError("too large")
        return State(self, [language])


class IgnoresKeywords(Finite):
    def language(self, structured):
        schema = structured.json
        if schema is not None and "enum" not in schema:
            return [text.encode() for _, *both in KEYWORDS for text in both]
        return super().language(structured)


class RefusesLenient(Finite):
    def language(self, structured):
        if structured.lenient:
            raise ValueError("lenient: expected false")
        return super().language(structured)


class ValidatesNothing(Finite):
    @classmethod
    def validate(cls, structured, answer):
        return None


class ValidatesWithBools(Finite):
    @classmethod
    def validate(cls, structured, answer):
        return True


class RaisesInValidate(Finite):
    @classmethod
    def validate(cls, structured, answer):
        raise ValueError("not JSON")


class Cached(Finite):
    def __init__(self, context):
        super().__init__(context)
        self.compiled = []

    def compile(self, structured):
        self.compiled.append(State(self, [self.language(structured)]))
        return self.compiled[-1]


@with_state
class LargeForks(State):
    def __init__(self, grammar, rests):
        super().__init__(grammar, rests)
        self.table = bytearray(1 << 17)


@with_state
class SlowMasks(State):
    def allowed(self):
        spend(1e-6 * len(self.grammar.texts))
        return super().allowed()
