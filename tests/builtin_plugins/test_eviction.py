"""The built-in eviction policy."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.plugins import EvictionContext
from hardpoint.testing.scheduling.fakes.blocks import FakeBlocks
from hardpoint.testing.scripted import ScriptedClock


def make_policy() -> LeastRecentlyUsed:
    return LeastRecentlyUsed(
        EvictionContext(name="lru", options=None, **FakeBlocks(10).context_fields())
    )


def release(policy, *block_ids):
    policy.released(block_ids)


def test_entry_point():
    (entry,) = entry_points(group="hardpoint.eviction_policies", name="lru")
    assert entry.load() is LeastRecentlyUsed


def test_oldest_goes_first():
    policy = make_policy()
    release(policy, 5, 3)
    release(policy, 4)
    assert list(policy.evict(1)) == [5]
    release(policy, 5)
    assert list(policy.evict(3)) == [3, 4, 5]


def test_used_again_is_young_again():
    policy = make_policy()
    release(policy, 1, 2, 3)
    policy.taken([1])
    assert list(policy.evict(1)) == [2]
    release(policy, 1)
    assert list(policy.evict(2)) == [3, 1]


class Retained:
    """Blocks with a deadline each."""

    def __init__(self):
        self.deadlines = {}

    def retained_until(self, block):
        return self.deadlines.get(block, 0.0)


def retaining(deadlines):
    """Return a policy that has met candidates with these deadlines, its blocks and clock."""
    blocks, clock = Retained(), ScriptedClock(now=0.0)
    fields = {"blocks": blocks, "history": lambda: None, "clock": clock}
    policy = LeastRecentlyUsed(EvictionContext(name="lru", options=None, **fields))
    blocks.deadlines = dict(enumerate(deadlines))
    release(policy, *blocks.deadlines, 99)
    assert list(policy.evict(1)) == [99]
    return policy, blocks, clock


@pytest.mark.parametrize(
    ("deadlines", "later", "order"),
    [
        ([3600, 10], {}, [1, 0]),
        ([3600, 10, 10, 5], {}, [3, 1, 2, 0]),
        ([3600, 10, 15], {1: 100}, [2, 0, 1]),  # it grew
        ([3600, 100, 100], {1: 0, 2: 10}, [1, 2, 0]),  # their session was released
        ([3600, float("inf")], {1: 10}, [1, 0]),
        ([30, 40], {}, [0, 1]),
    ],
)
def test_expired_blocks_go_before_retained_ones(deadlines, later, order):
    policy, blocks, clock = retaining(deadlines)
    blocks.deadlines |= later
    clock.advance(20)
    assert list(policy.evict(len(order))) == order


def test_a_block_that_was_taken_has_its_new_deadline():
    policy, blocks, clock = retaining([10, 30])
    policy.taken([0])
    blocks.deadlines[0] = 50
    release(policy, 0, 5)
    assert list(policy.evict(1)) == [5]
    clock.advance(40)
    assert list(policy.evict(2)) == [1, 0]


@examples(60)
@given(moves=st.lists(st.tuples(st.sampled_from("rte"), st.integers(0, 9)), max_size=80))
def test_like_a_list(moves):
    policy, order = make_policy(), []
    for move, number in moves:
        if move == "r" and number not in order:
            release(policy, number)
            order.append(number)
        elif move == "t" and number in order:
            policy.taken([number])
            order.remove(number)
        elif move == "e":
            count = min(number, len(order))
            assert list(policy.evict(count)) == order[:count]
            del order[:count]
