"""Component adapters with one mistake each fail the rule that they break; right ones pass."""

from __future__ import annotations

import sys

import pytest
from support.broken import component_adapters as broken
from support.kit_suites import assert_fails, each_broken, label, messages_of, suite_tests
from support.plugins import transformers_processors as foreign

from hardpoint.builtin_plugins.component_adapters import Transformers
from hardpoint.testing import ComponentAdapterSuite

# adapter, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.WithOptions, "contract", "contract", "has Options, but a component adapter has none"),
    (broken.MatchesNothing, "matches", "matches", r"matches\(.*Bias.*, None\) is not True"),
    (broken.MatchesAll, "matches", "matches", r"matches\(3, None\) is not False"),
    (broken.Truthy, "matches", "matches", r"matches\(.*Bias.*, None\) is not True"),
    (broken.Raises, "matches", "matches", r"matches\(3, None\) raised TypeError"),
    (broken.Unmarked, "component", "component", "its adapt returned .*AdaptedComponent"),
    (broken.Abstract, "component", "component", "it lacks apply"),
    (broken.Counts, "same", "same", "adapting .*Bias.* gave .*number.*, then "),
    (broken.Marks, "same", "same", "it changed mark_1, mark_2 of "),
    (broken.Anonymous, "refused", "refused", "does not name the plugin: its bias must be"),
    (broken.Accepts, "refused", "refused", r"adapt\(.*NearMiss.*\) raised nothing"),
    (broken.Leaves, "stand_ins", "stand-ins", f"sys.modules has '{broken.MODULE}' after"),
    (broken.Hides, "stand_ins", "stand-ins", "the context hides an exception"),
    (broken.ForAll, "stand_ins", "stand-ins", "is not None"),
]
SAMPLES = {
    "targets": [broken.Bias],
    "refused": [broken.NearMiss],
    "modules": [broken.MODULE],
}


class TestTransformers(ComponentAdapterSuite):
    adapter = Transformers
    targets = [foreign.Counting, foreign.counting, foreign.Repetition, foreign.both]


@pytest.fixture(autouse=True)
def modules():
    yield
    sys.modules.pop(broken.MODULE, None)


@each_broken(BROKEN)
def test_a_broken_adapter_fails_its_rule(cls, test, rule, pattern):
    assert_fails(ComponentAdapterSuite, {"adapter": cls, **SAMPLES}, test, rule, pattern)


@pytest.mark.parametrize("cls", [broken.Right, broken.Bare], ids=label)
def test_correct_adapters_pass(cls):
    assert messages_of(ComponentAdapterSuite, {"adapter": cls, **SAMPLES}) == {}


def test_every_test_catches_an_adapter():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(ComponentAdapterSuite)
