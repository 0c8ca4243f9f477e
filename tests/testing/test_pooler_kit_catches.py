"""Poolers with one mistake each fail the rule that they break, with a helpful message."""

from __future__ import annotations

import pytest
from support.broken import poolers as broken
from support.kit_suites import assert_fails, each_broken, label, messages_of, suite_tests
from support.searching import kit_examples

from hardpoint.testing import PoolerSuite

# pooler, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.NoState, "shape", "shape", r"start\(\) gave 7, expected a PromptPooler"),
    (broken.WrongShape, "shape", "shape", r"gave a tensor \[\d+, 16\], expected \[16\]"),
    (broken.NoTensor, "shape", "shape", r"finish\(\) gave -?\d"),
    (broken.Fails, "shape", "exceptions", r"KeyError: 'vector' \(in finish"),
    (broken.DependsOnChunks, "chunks", "chunks", r"has another result in chunks of \d+, \d+"),
    (broken.SharesState, "alone", "alone", r"prompt \d of \d has another result than alone"),
    (broken.Remembers, "alone", "alone", r"another result than alone"),
    (broken.KeepsViews, "overwritten", "overwritten", "memory that was shown before"),
    (broken.NeedsMore, "last", "last", r"without the first \d+ of \d+ tokens, the result is"),
]


@each_broken(BROKEN)
def test_a_broken_pooler_fails_its_rule(cls, test, rule, pattern):
    assert_fails(PoolerSuite, {"pooler": cls}, test, rule, pattern)


@pytest.mark.parametrize("cls", [broken.Largest, broken.Newest], ids=label)
def test_correct_components_pass(cls):
    assert messages_of(PoolerSuite, {"pooler": cls, "examples": kit_examples()}) == {}


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(PoolerSuite)
