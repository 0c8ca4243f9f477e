"""The built-in eviction policy."""

from __future__ import annotations

from importlib.metadata import entry_points

from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.plugins import EvictionContext
from hardpoint.testing.scheduling.fakes.blocks import FakeBlocks


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
