"""Speculators with one mistake each fail the rule that they break, with a helpful message."""

from __future__ import annotations

import pytest
from support.broken import speculators as broken
from support.kit_suites import assert_fails, each_broken, label, messages_of, suite_tests
from support.searching import kit_examples

from hardpoint.testing import SpeculatorSuite

# speculator, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.TooFew, "drafts", "drafts", r"returned 0 sequences for 1 requests"),
    (broken.TooLong, "drafts", "drafts", r"returned \d drafts of a request, its limit is"),
    (broken.NoLists, "drafts", "drafts", r"propose returned 7 for \d requests"),
    (broken.OutOfRange, "drafts", "drafts", r"returned token 131, the vocabulary is 0 to 130"),
    (broken.OpensHead, "drafts", "exceptions", r"context\(\): expected the field open_head, which"),
    (broken.Fails, "drafts", "exceptions", r"KeyError: \d+ \(in follow"),
    (broken.MixesScopes, "alone", "alone", r"each of a scope of its own, got the drafts"),
    (broken.ByPlace, "alone", "alone", r"each of a scope of its own, got the drafts"),
    (broken.Remembers, "forgets", "forgets", r"after \d others had ended, and .* from a new"),
    (broken.ReadsNewTokensOnly, "resumed", "resumed", r"when it was started with them"),
    (broken.WritesLastKeys, "blocks", "blocks", r"it wrote no keys at position 0 of request r0"),
    (broken.WritesElsewhere, "blocks", "blocks", r"it wrote slot 7000000 of block 437500, which"),
    (broken.Appends, "reads_only", "reads only", r"it changed the output of a request"),
    (broken.SetsState, "reads_only", "reads only", r"it set state of a request"),
    (broken.Grows, "memory", "memory", r"grew from \d+ to \d+ elements while 60 requests"),
    (broken.KeepsSequences, "memory", "memory", r"grew from \d+ to \d+ elements while 60"),
    (broken.Slow, "speed", "speed", r"of 500 tokens cost \d+ microseconds, the budget is 200"),
    (broken.Searches, "speed", "speed", r"of 16000 tokens cost \d+ microseconds, of one of 500"),
]  # fmt: skip

RIGHT = [
    {"speculator": broken.LastPair},
    {"speculator": broken.Learns, "learns": True},
    {"speculator": broken.WritesKeys},
    {"speculator": broken.FirstLayers},
]


@each_broken(BROKEN)
def test_a_broken_speculator_fails_its_rule(cls, test, rule, pattern):
    assert_fails(SpeculatorSuite, {"speculator": cls}, test, rule, pattern)


@pytest.mark.parametrize("attributes", RIGHT, ids=label)
def test_correct_components_pass(attributes):
    more = {"budget_us_per_request": None, "examples": kit_examples()}
    assert messages_of(SpeculatorSuite, attributes | more) == {}


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(SpeculatorSuite)
