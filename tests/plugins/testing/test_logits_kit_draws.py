"""Draws of the suite of logits processors: ids of arguments, tokenizers, requests that use it."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import strategies as st
from support.kit_suites import message_of, messages_of, suite_tests
from support.samples import Sample
from support.searching import kit_examples

from hardpoint import plugins
from hardpoint.plugins import Edits, Phase, SparseLogitsProcessor
from hardpoint.testing import LogitsProcessorSuite
from hardpoint.testing.logits.subject import drawn_tokens, token_ids_in
from hardpoint.testing.scripted_tokenizer import ByteTokenizer
from hardpoint.testing.suite import Search


class Phrases(Sample, SparseLogitsProcessor, contract=1):
    """Correct: once the output ends with the beginning of a form, raises the token that is next."""

    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        words: list[str]

    class Prepared(Arguments):
        forms: list[list[list[int]]]

    @classmethod
    def prepare(cls, arguments, context):
        forms = [[_ids(word), _ids(word.upper())] for word in arguments.words]
        return cls.Prepared(words=arguments.words, forms=forms)

    def edits(self, rows):
        pairs = [
            (row, token)
            for row, request in enumerate(rows.requests)
            for token in _next_of(rows.arguments()[row].forms, list(request.output_token_ids))
        ]
        if not pairs:
            return None
        row, token = zip(*pairs, strict=True)
        return Edits(row, token, [5.0] * len(pairs))


class Accumulates(Phrases):
    """Keeps the tokens of all requests."""

    def __init__(self, context):
        super().__init__(context)
        self.kept: list[int] = []

    def edits(self, rows):
        for request, arguments in zip(rows.requests, rows.arguments(), strict=True):
            self.kept += _next_of(arguments.forms, list(request.output_token_ids))
        pairs = [(row, token) for row in range(len(rows)) for token in sorted(set(self.kept))]
        if not pairs:
            return None
        row, token = zip(*pairs, strict=True)
        return Edits(row, token, [5.0 * self.kept.count(token_id) for token_id in token])


class RefusesAll(Phrases):
    @classmethod
    def prepare(cls, arguments, context):
        raise ValueError("words: not today")


def _ids(word: str) -> list[int]:
    return [20 + ord(letter) for letter in word]


def _next_of(forms: list[list[list[int]]], outputs: list[int]) -> list[int]:
    next_tokens = {
        form[known]
        for alternatives in forms
        for form in alternatives
        for known in range(1, len(form))
        if outputs[-known:] == form[:known]
    }
    return sorted(next_tokens)


WORDS = st.fixed_dictionaries(
    {"words": st.lists(st.text("cdefgh", min_size=3, max_size=5), min_size=1, max_size=3)}
)


def suite(processor: type, **more: Any) -> dict[str, Any]:
    return {"processor": processor, "arguments": WORDS, **more}


class Pair(msgspec.Struct):
    ids: list[int]
    more: dict[int, list[tuple[int, ...]]]


def test_ids_are_found_at_any_depth_in_their_order():
    nested = {"forms": [[[7, 8], [9]], [[8]]], "pair": Pair([3], {4: [(5, 6)]}), "on": True}
    assert token_ids_in(nested, 100) == (7, 8, 9, 8, 3, 4, 5, 6)
    assert token_ids_in(nested, 6) == (3, 4, 5)
    assert token_ids_in(None, 100) == ()


def test_ids_of_arguments_often_follow_each_other():
    drawn = drawn_tokens(100, max_size=6)
    draws: list[list[int]] = []
    Search(200, seed=1).run(lambda tokens: draws.append(tokens), tokens=drawn)
    runs = [t for t in draws if any(b == a + 1 < 0 for a, b in itertools.pairwise(t))]
    assert len(runs) > 50
    assert all(len(tokens) <= 6 for tokens in draws)


@pytest.mark.parametrize("seed", range(6))
def test_prepared_ids_that_are_nested_have_an_effect(seed):
    assert message_of(LogitsProcessorSuite, suite(Phrases, replay_seed=seed), "effect") is None


def test_a_processor_of_nested_ids_passes():
    tests = suite_tests(LogitsProcessorSuite) - {"speed"}
    brief = suite(Phrases, examples=kit_examples())
    assert messages_of(LogitsProcessorSuite, brief, tests) == {}


@pytest.mark.parametrize("test", ["history", "pure", "swaps", "memory"])
def test_what_is_kept_of_nested_ids_is_found(test, monkeypatch):
    for seed in range(3):
        message = message_of(LogitsProcessorSuite, suite(Accumulates, replay_seed=seed), test)
        assert message is not None, seed
        assert "breaks a rule" in message


@pytest.mark.parametrize(
    "test",
    [
        "bystanders",
        *(
            pytest.param(t, marks=pytest.mark.nightly)
            for t in ("history", "pure", "speed", "swaps")
        ),
    ],
)
def test_nothing_is_proved_by_requests_that_do_not_use_it(test):
    message = message_of(LogitsProcessorSuite, suite(RefusesAll, examples=0.02), test)
    assert message is not None
    assert "nothing to check was drawn: prepare rejected everything" in message
    assert "the last time because 'words: not today'" in message


class Spells(Phrases):
    """Correct: refuses a request without a tokenizer."""

    given: ClassVar[list[int | None]] = []

    @classmethod
    def prepare(cls, arguments, context):
        tokenizer = context.tokenizer
        cls.given.append(None if tokenizer is None else tokenizer.vocab_size)
        if tokenizer is None:
            raise ValueError("words: there is no tokenizer to encode them")
        forms = [[tokenizer.encode(word)] for word in arguments.words]
        return cls.Prepared(words=arguments.words, forms=forms)


class TakesItForGranted(Phrases):
    @classmethod
    def prepare(cls, arguments, context):
        forms = [[context.tokenizer.encode(word)] for word in arguments.words]
        return cls.Prepared(words=arguments.words, forms=forms)


def test_by_default_there_is_a_tokenizer_now_and_then_none(monkeypatch):
    monkeypatch.setattr(Spells, "given", [])
    tests = suite_tests(LogitsProcessorSuite) - {"speed"}
    brief = suite(Spells, examples=kit_examples())
    assert messages_of(LogitsProcessorSuite, brief, tests) == {}
    assert set(Spells.given) == {None, 257}


@pytest.mark.nightly  # the search for the smallest case takes seconds
def test_a_processor_has_to_take_that_there_is_no_tokenizer(monkeypatch):
    message = message_of(LogitsProcessorSuite, suite(TakesItForGranted), "contract")
    assert message is not None
    assert "prepare raised AttributeError: 'NoneType' object has no attribute 'encode'" in message
    assert " without a tokenizer\n" in message


def test_a_tokenizer_that_is_given_is_the_only_one(monkeypatch):
    monkeypatch.setattr(Spells, "given", [])
    attributes_of_suite = suite(Spells, tokenizer=ByteTokenizer(["<think>"]), vocab_size=300)
    assert message_of(LogitsProcessorSuite, attributes_of_suite, "pure") is None
    assert set(Spells.given) == {258}


@pytest.mark.nightly
def test_a_small_vocabulary_has_no_room_for_the_default_tokenizer(monkeypatch):
    monkeypatch.setattr(Spells, "given", [])
    message = message_of(LogitsProcessorSuite, suite(Spells, vocab_size=256), "pure")
    assert message is not None
    assert "the last time because 'words: there is no tokenizer to encode them'" in message
    assert set(Spells.given) == {None}
