"""The order of logits processors."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plugins.fake import component

from hardpoint.errors import PluginConflictError
from hardpoint.host.registry.ordering import ordered
from hardpoint.plugins import LogitsProcessor, Phase


def processor(phase=Phase.TRUNCATE, before=(), after=()):
    return component(LogitsProcessor, phase=phase, before=before, after=after)


def test_phases_come_first():
    processors = {phase.name: processor(phase) for phase in reversed(Phase)}
    assert ordered(processors) == ["MASK", "BIAS", "PENALTY", "TEMPERATURE", "TRUNCATE", "FORCE"]


def test_within_a_phase_they_stay_as_enabled():
    assert ordered({name: processor() for name in "cab"}) == ["c", "a", "b"]


def test_after_and_before_are_kept():
    processors = {
        "last": processor(after=("middle",)),
        "middle": processor(),
        "first": processor(before=("middle",)),
    }
    assert ordered(processors) == ["first", "middle", "last"]


def test_a_wish_moves_no_more_than_it_must():
    processors = {
        "a": processor(after=("c",)),
        "b": processor(),
        "c": processor(),
        "d": processor(),
    }
    assert ordered(processors) == ["b", "c", "a", "d"]


def test_wishes_about_what_is_not_enabled_ask_for_nothing():
    processors = {"a": processor(after=("x",)), "b": processor(before=("y",))}
    assert ordered(processors) == ["a", "b"]


def test_a_cycle_names_its_members():
    processors = {"a": processor(after=("b",)), "b": processor(after=("a",)), "c": processor()}
    with pytest.raises(PluginConflictError) as error:
        ordered(processors)
    message = str(error.value)
    assert message.startswith("logits_processors: their before/after make a cycle: ")
    assert message.endswith(("a -> b -> a", "b -> a -> b"))


def test_a_wish_about_oneself_asks_for_nothing():
    """A replacement for min_p that wants to follow min_p has that name itself."""
    processors = {"a": processor(after=("a",)), "b": processor(before=("b", "a"))}
    assert ordered(processors) == ["b", "a"]


@pytest.mark.parametrize("wish", ["before", "after"])
def test_a_wish_against_the_phases_is_a_clash(wish):
    processors = {
        "bias": processor(Phase.BIAS, **{wish: ("cut",)}),
        "cut": processor(Phase.TRUNCATE),
    }
    with pytest.raises(PluginConflictError) as error:
        ordered(processors)
    assert (
        f"'bias' (phase BIAS) wants to run {wish} 'cut' (phase TRUNCATE); before and after order "
        f"processors of one phase only"
    ) in str(error.value)


names = st.sampled_from("abcdef")


@given(
    order=st.permutations("abcdef"),
    phases=st.dictionaries(names, st.sampled_from(Phase), min_size=6, max_size=6),
    pairs=st.sets(st.tuples(names, names)),
)
def test_every_wish_that_can_be_met_is_met(order, phases, pairs):
    """Wishes that follow one hidden order have no cycle, so all of them must hold."""
    wishes = [(x, y) for x, y in pairs if x < y and phases[x] == phases[y]]
    processors = {
        name: processor(
            phases[name],
            before=tuple(y for x, y in wishes if x == name),
            after=tuple(x for x, y in wishes if y == name),
        )
        for name in order
    }
    result = ordered(processors)
    assert sorted(result) == sorted(order)
    assert all(phases[x] <= phases[y] for x, y in itertools.pairwise(result))
    assert all(result.index(x) < result.index(y) for x, y in wishes)


def test_a_set_of_plugins_is_in_this_order(installed):
    """Built-ins are found min_p first, but min_p wants to follow top_k."""
    plugins = installed.resolve()
    assert [entry.name for entry, _ in plugins.logits_processors()] == ["top_k", "min_p"]
    assert [entry.place for entry in plugins.entries("logits_processors")] == [0, 1]
