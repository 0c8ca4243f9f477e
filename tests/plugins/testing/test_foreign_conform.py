"""Logits processors in the forms of other engines pass the suite; broken ones do not."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from support.kit_suites import assert_fails
from support.plugins import foreign_processors as foreign
from support.searching import kit_examples

from hardpoint.host.registry.adapt import adapt, configured
from hardpoint.plugins.component import Source
from hardpoint.testing import LogitsProcessorSuite


def component(target, **options):
    """Return the component that the loader makes of an object."""
    adapted = adapt(target, Source("thing", "elsewhere:Thing", "elsewhere", "1", "a test"))
    return configured(adapted, adapted.Options(**options))


def with_extra(name, values):
    return st.builds(lambda value: {"extra_args": {name: value}}, values)


TARGETS = with_extra("target_token", st.integers(14, 120))


class TestV0Factory(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.forcing, phase="force")
    arguments = with_extra("token", st.integers(0, 120))


class TestV0Class(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.Stepping, phase="force")
    arguments = with_extra("token", st.integers(0, 120))


class TestV0Callable(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.two_parameters)
    arguments = st.just({})


class TestV1Tokens(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.OneToken)
    arguments = TARGETS


class TestV1Invariant(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.MinP)
    arguments = with_extra("min_p", st.floats(0.01, 0.9))


class TestV1WithState(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.Sums)
    arguments = with_extra("on", st.just(True))


class TestV2Tokens(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.SlotToken)
    arguments = TARGETS


class TestV2History(LogitsProcessorSuite):
    examples = kit_examples(0.3)
    processor = component(foreign.Echo)
    arguments = st.just({})


@pytest.mark.parametrize(
    ("target", "arguments", "test", "rule", "pattern"),
    [
        (foreign.CountsCalls, with_extra("on", st.just(True)), "pure", "", "differ"),
        (
            foreign.Locked,
            with_extra("on", st.just(True)),
            "drafts",
            "",
            "give the class a __deepcopy",
        ),
        (foreign.OldSlots, TARGETS, "history", "", "differ"),
        (foreign.RowsAsSlots, TARGETS, "history", "", "differ"),
    ],
)
def test_the_suite_names_what_is_wrong(monkeypatch, target, arguments, test, rule, pattern):
    attributes = {"processor": component(target), "arguments": arguments}
    assert_fails(LogitsProcessorSuite, attributes, test, rule, pattern)
