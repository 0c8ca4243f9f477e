"""Blocks as eviction policies see them, compared with those derived from the pool's index."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core.kv_cache_model import finish, make_request, run
from support.searching import examples

from hardpoint.core.kv_cache import BlockManager, BlockMetadata, BlockPool
from hardpoint.plugins.kv_cache import BlockStored, KVCacheGroup
from hardpoint.testing import ScriptedClock

ALL = KVCacheGroup(None)


def described(num_blocks=20, block_size=2, groups=(ALL,), *, history=True):
    """Return a manager, what a policy sees of its blocks, and the clock."""
    clock = ScriptedClock(now=100.0)
    blocks = BlockMetadata(clock)
    if history:
        blocks.start_history()
    manager = BlockManager(num_blocks, block_size, groups=groups, metadata=blocks, events=True)
    return manager, blocks, clock


def test_hash_and_depth_are_those_of_the_content():
    manager, blocks, _ = described(history=False)
    assert blocks.num_blocks == 20
    request = make_request("a", range(5))
    assert run(manager, request)
    table = manager.block_ids(request)[0]
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    hashes = [blocks.hash(block) for block in table]
    assert hashes == [*stored.block_hashes, None]  # the last block is not full
    assert [blocks.depth(block) for block in table[:2]] == [0, 1]
    finish(manager, request)
    again = make_request("b", [*range(4), 9, 9, 9])
    assert run(manager, again)
    table = manager.block_ids(again)[0]
    assert [blocks.hash(block) for block in table[:2]] == hashes[:2]
    manager.discard(table[:1])
    assert blocks.hash(table[0]) is None


def test_groups_have_hashes_of_their_own():
    manager, blocks, _ = described(groups=(ALL, KVCacheGroup(100)))
    request = make_request("a", range(4))
    assert run(manager, request)
    assert blocks.num_blocks == 19  # one is the null block
    one, other = manager.block_ids(request)
    history = blocks.history
    assert blocks.hash(other[1]) == blocks.hash(one[1]) + b"\0\1"
    for table in (one, other):
        assert history.parent_hash(table[0]) is None
        assert history.parent_hash(table[1]) == blocks.hash(table[0])
        assert [history.num_children(block) for block in table] == [1, 0]


def test_hits_are_counted_also_on_blocks_in_use_and_start_anew_with_new_content():
    manager, blocks, clock = described(num_blocks=6)
    requests = [make_request(name, [1, 2, 3, 4, ord(name)]) for name in "abc"]
    assert run(manager, requests[0])
    table = manager.block_ids(requests[0])[0]
    history = blocks.history
    hits = lambda: [history.hits(block) for block in table[:2]]  # noqa: E731
    assert hits() == [0, 0]
    clock.advance(1.0)
    assert run(manager, requests[1])  # while the first runs
    assert hits() == [1, 1]
    assert history.last_use(table[0]) == 101.0
    clock.advance(1.0)
    finish(manager, requests[0])
    finish(manager, requests[1])
    assert history.last_use(table[0]) == 102.0
    assert run(manager, requests[2])
    assert hits() == [2, 2]
    finish(manager, requests[2])
    assert run(manager, make_request("d", range(50, 62)))  # takes every block
    assert hits() == [0, 0]


def test_history_is_kept_from_the_constructor_on_or_not_at_all():
    _, blocks, _ = described(history=False)
    assert blocks.history is None
    with pytest.raises(RuntimeError, match=r"call context\.history\(\) in the constructor"):
        blocks.start_history()


@examples(60)
@given(
    num_blocks=st.integers(2, 8),
    moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=60),
)
def test_history_against_the_index(num_blocks, moves):
    """Contents are named by their chain: the parent of b"abc" is b"ab"."""
    blocks = BlockMetadata(ScriptedClock(now=0.0))
    history = blocks.start_history()
    pool = BlockPool(num_blocks, metadata=blocks)
    held: list[list[int]] = []
    hits: Counter[bytes] = Counter()
    for move, number in moves:
        if move <= 1:
            count = min(number % 5, pool.num_free)
            table = pool.allocate(count)
            name = b"abc"[number % 3 :] * 4
            for key in set(hits) - set(pool.index[0]):
                del hits[key]
            pool.register(0, table, [name[: i + 1] for i in range(count)], 0, count)
            held.append(table)
        elif move == 2 and held:
            pool.release(held.pop(number % len(held)))
        elif move == 3:
            found = list(pool.index[0].items())[: number % 4]
            hits.update(key for key, _ in found)
            pool.touch([block for _, block in found])
            held.append([block for _, block in found])
        elif move == 4:
            pool.forget(list(pool.index[0].values())[:: number + 1])
        elif number == 0:
            pool.clear()
        for key in set(hits) - set(pool.index[0]):
            del hits[key]
        children = Counter(key[:-1] for key in pool.index[0] if len(key) > 1)
        for key, block in pool.index[0].items():
            assert blocks.hash(block) == key
            assert blocks.depth(block) == len(key) - 1
            assert history.parent_hash(block) == (key[:-1] or None)
            assert history.num_children(block) == children[key]
            assert history.hits(block) == hits[key]
