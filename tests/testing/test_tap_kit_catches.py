"""Activation taps with one mistake each fail the rule that they break, with a helpful message."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from support.broken import taps as broken
from support.kit_suites import assert_fails, each_broken, label, messages_of, suite_tests

from hardpoint.testing import ActivationTapSuite

# tap, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.Neither, "overrides", "overrides", r"neither read\(\) nor change\(\)"),
    (broken.NoSites, "sites", "sites", r"sites\(\) gave \[\]"),
    (broken.WrongPlace, "sites", "sites", r"sites\(\) gave \[TapSite\(layer=0, place='logits'"),
    (broken.Sums, "shape", "shape", r"read\(\) gave \[16\], expected \[\d+, ...\]"),
    (broken.Cuts, "shape", "shape", r"change\(\) gave \[\d+, 3\], expected \[\d+, 16\]"),
    (broken.Infinite, "shape", "shape", r"change\(\) gave numbers that are not finite"),
    (broken.Fails, "shape", "exceptions", r"KeyError: 'direction' \(in read"),
    (broken.Centred, "alone", "alone", r"read\(\) gave other numbers for \d requests? than"),
    (broken.Counts, "again", "again", r"read\(\) gave other numbers when it was called again"),
    (broken.InPlace, "in_place", "in_place", r"change\(\) changed its values in place"),
    (broken.OneKey, "cache_key", "cache_key", "have one key and two effects"),
    (broken.TextKey, "cache_key", "cache_key", r"cache_key\(\) gave 'scaled', expected bytes"),
]

ARGUMENTS = st.builds(dict, factor=st.sampled_from([0.5, 3.0]), layer=st.integers(0, 3))


def attributes(cls):
    """Return the attributes of a suite of a class."""
    takes_some = issubclass(cls, broken.Scaled)
    return {"tap": cls, "examples": 0.4} | ({"arguments": ARGUMENTS} if takes_some else {})


@each_broken(BROKEN)
def test_a_broken_tap_fails_its_rule(cls, test, rule, pattern):
    assert_fails(ActivationTapSuite, attributes(cls), test, rule, pattern)


@pytest.mark.parametrize("cls", [broken.Norms, broken.Scaled], ids=label)
def test_correct_components_pass(cls):
    assert messages_of(ActivationTapSuite, attributes(cls)) == {}


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(ActivationTapSuite)
