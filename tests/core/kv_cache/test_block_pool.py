"""The block pool, and eviction policies that are wrong in every way."""

from __future__ import annotations

from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.kv_cache import Eviction
from hardpoint.plugins import EvictionContext, EvictionPolicy
from hardpoint.testing.scheduling.fakes.blocks import FakeBlocks


class Scripted(EvictionPolicy):
    """Remembers candidates like a good policy; `evict` answers as it is told."""

    contract = 1

    def __init__(self, answer=None):
        fields = FakeBlocks(1).context_fields()
        super().__init__(EvictionContext(name="scripted", options=None, **fields))
        self.answer = answer
        self.known = {}
        self.calls = []

    def released(self, block_ids):
        self.calls.append(("released", list(block_ids)))
        self.known |= dict.fromkeys(block_ids)

    def taken(self, block_ids):
        self.calls.append(("taken", list(block_ids)))
        for block in block_ids:
            del self.known[block]

    def dropped(self, block_ids):
        self.calls.append(("dropped", list(block_ids)))
        for block in block_ids:
            del self.known[block]

    def evict(self, count):
        self.calls.append(("evict", count))
        chosen = list(self.known)[:count] if self.answer is None else self.answer(count)
        if isinstance(chosen, Exception):
            raise chosen
        for block in list(self.known):
            if isinstance(chosen, list) and block in chosen:
                del self.known[block]
        return chosen


def make_pool(num_blocks=4, policy=None, **options):
    faults = []

    def fault(words, cause):
        faults.append(words if cause is None else f"{words}: {type(cause).__name__}: {cause}")

    return BlockPool(num_blocks, eviction=Eviction(policy, fault), **options), faults


def fill(pool: BlockPool, count: int, name: str = "") -> list[int]:
    """Hand out blocks, cache content in them and give them back, the first one first."""
    blocks = pool.allocate(count)
    pool.register(0, blocks, [f"{name}{i}".encode() for i in range(count)], 0, count)
    pool.release(blocks)
    return blocks


def test_empty_blocks_are_handed_out_in_order_before_cached_ones():
    pool, _ = make_pool(4)
    assert fill(pool, 2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 0]
    assert list(pool.index[0]) == [b"1"]
    assert (pool.num_free, pool.empty, list(pool.candidates)) == (1, [], [1])


def test_null_block_is_never_handed_out():
    pool, _ = make_pool(3, null_block=True)
    assert pool.num_free == 2
    assert pool.allocate(2) == [1, 2]
    assert pool.register(0, [NULL_BLOCK, 1], [b"0", b"1"], 0, 2) == [1]
    assert pool.index[0] == {b"1": 1}


def test_one_block_per_content():
    pool, _ = make_pool(4)
    one, other = pool.allocate(2), pool.allocate(2)
    assert pool.register(0, one, [b"0", b"1"], 0, 1) == [0]
    assert pool.register(0, other, [b"0", b"1"], 0, 2) == [1]
    assert pool.index[0] == {b"0": one[0], b"1": other[1]}
    pool.release([*one, *other])
    assert list(pool.candidates) == [one[0], other[1]]
    assert pool.empty == [one[1], other[0]]


def test_groups_do_not_find_each_other():
    pool, _ = make_pool(4, num_groups=2)
    blocks = pool.allocate(2)
    pool.register(0, blocks[:1], [b"0"], 0, 1)
    pool.register(1, blocks[1:], [b"0"], 0, 1)
    assert pool.index == [{b"0": blocks[0]}, {b"0": blocks[1]}]
    pool.forget(blocks[:1])
    assert pool.index == [{}, {b"0": blocks[1]}]


def test_policy_sees_candidates_only():
    policy = Scripted()
    pool, faults = make_pool(4, policy)
    held = pool.allocate(2)
    pool.release(pool.allocate(1))
    assert policy.calls == []  # nothing is cached, so nothing is asked
    pool.register(0, held, [b"0", b"1"], 0, 2)
    pool.release([1, 0])
    pool.touch([0])
    pool.touch([0])
    pool.release([0])
    pool.release([0])
    pool.allocate(3)
    assert policy.calls == [
        ("released", [1, 0]),
        ("taken", [0]),
        ("released", [0]),
        ("evict", 1),
    ]
    assert pool.index[0] == {b"0": 0}
    assert faults == []


def test_forget_and_clear_tell_the_policy():
    policy = Scripted()
    pool, faults = make_pool(4, policy)
    fill(pool, 4)
    pool.touch([3])
    policy.calls.clear()
    pool.forget([0, 0, 3])
    assert policy.calls == [("dropped", [0])]
    assert list(policy.known) == [1, 2]
    assert (pool.empty, list(pool.candidates)) == ([0], [1, 2])
    pool.clear()
    assert policy.calls == [("dropped", [0]), ("dropped", [1, 2])]
    assert policy.known == {}
    assert (sorted(pool.empty), pool.index) == ([0, 1, 2], [{}])
    pool.release([3])
    assert sorted(pool.empty) == [0, 1, 2, 3]
    assert faults == []


def test_policy_chooses():
    policy = Scripted(lambda count: [3, 1][:count])
    pool, faults = make_pool(4, policy)
    fill(pool, 4)
    assert pool.allocate(2) == [3, 1]
    assert (list(pool.candidates), faults) == ([0, 2], [])


@pytest.mark.parametrize(
    ("answer", "taken", "words"),
    [
        (lambda n: RuntimeError("broken"), [0, 1], "evict(2) failed: RuntimeError: broken"),
        (lambda n: None, [0, 1], "evict(2) failed: TypeError: 'NoneType' object is not iterable"),
        (lambda n: [3, "x"], [0, 1], "evict(2) failed: TypeError: 'str' object cannot be"),
        (lambda n: [3, 17], [3, 0], "evict(2) returned 17, which is no candidate"),
        (lambda n: [-1, 3], [3, 0], "evict(2) returned -1, which is no candidate"),
        (lambda n: [4, 5], [0, 1], "evict(2) returned 4, which is no candidate"),
        (lambda n: [2, 2], [2, 0], "evict(2) returned 2 twice"),
        (lambda n: [0], [0, 1], "evict(2) returned 1 block"),
        (lambda n: [], [0, 1], "evict(2) returned 0 blocks"),
        (lambda n: [3, 2, 1], [3, 2], "evict(2) returned more than 2 blocks"),
        (lambda n: repeat(3), [3, 0], "evict(2) returned 3 twice"),
    ],
)
def test_wrong_choice(answer, taken, words):
    """The right part of an answer counts; the rest are the blocks released first."""
    policy = Scripted(answer)
    pool, faults = make_pool(6, policy)
    fill(pool, 4)
    held = pool.allocate(2)
    assert held == [4, 5]
    assert pool.allocate(2) == taken
    assert len(faults) == 1
    assert faults[0].startswith(words)
    assert list(pool.candidates) == [block for block in range(4) if block not in taken]


def test_policy_that_fails_to_listen():
    class Deaf(Scripted):
        def released(self, blocks):
            raise KeyError("released")

        def taken(self, block_ids):
            raise KeyError("taken")

        def dropped(self, block_ids):
            raise KeyError("dropped")

    pool, faults = make_pool(4, Deaf())
    fill(pool, 4)
    pool.touch([2])
    assert pool.allocate(1) == [0]
    assert faults == [
        "released() of 4 blocks failed: KeyError: 'released'",
        "taken() of 1 block failed: KeyError: 'taken'",
        "evict(1) returned 0 blocks",
        "dropped() of 1 block failed: KeyError: 'dropped'",
    ]
    assert list(pool.candidates) == [1, 3]


def test_policy_learns_what_was_decided_in_its_place():
    policy = Scripted(lambda count: [])
    pool, _ = make_pool(4, policy)
    fill(pool, 4)
    pool.allocate(2)
    assert list(policy.known) == [2, 3]
    assert policy.calls[-1] == ("dropped", [0, 1])


def test_fault_without_listener_ends():
    pool = BlockPool(2, eviction=Eviction(Scripted(lambda count: [9])))
    fill(pool, 2)
    with pytest.raises(PluginFaultError, match=r"evict\(1\) returned 9, which is no candidate"):
        pool.allocate(1)


class Erratic(Scripted):
    """Draws what it does from a list of moods."""

    def __init__(self, moods):
        super().__init__()
        self.moods = moods

    def mood(self):
        return self.moods.pop() if self.moods else 0

    def released(self, block_ids):
        if self.mood() != 1:
            super().released(block_ids)

    def taken(self, block_ids):
        super().taken(block_ids)
        if self.mood() == 2:
            raise RuntimeError

    def evict(self, count):
        mood = self.mood()
        chosen = super().evict(count)
        return {1: [*chosen, 0], 2: chosen[:-1], 3: [0] * count, 4: None}.get(mood, chosen)


@examples(100)
@given(
    num_blocks=st.integers(1, 8),
    moods=st.lists(st.integers(0, 5), max_size=60),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60),
)
def test_no_policy_breaks_the_pool(num_blocks, moods, moves):
    """Whatever it does, every block is in one state, and as many are handed out as asked for."""
    pool, _ = make_pool(num_blocks, Erratic(moods))
    held: list[list[int]] = []
    for serial, (move, number) in enumerate(moves):
        if move <= 1:
            count = number % (pool.num_free + 1)
            blocks = pool.allocate(count)
            assert len(set(blocks)) == count
            pool.register(0, blocks, [b"%d.%d" % (serial, i) for i in range(count)], 0, count)
            held.append(blocks)
        elif move == 2 and held:
            pool.release(held.pop(number % len(held)))
        elif move == 3:
            found = list(pool.index[0].values())[: number % 4]
            pool.touch(found)
            held.append(found)
        elif number == 0:
            pool.clear()
        else:
            pool.forget(list(pool.index[0].values())[::number])
        counts = [sum(blocks.count(b) for blocks in held) for b in range(num_blocks)]
        assert pool.ref_count == counts
        idle = [block for block in range(num_blocks) if not counts[block]]
        assert sorted([*pool.empty, *pool.candidates]) == idle
        assert set(pool.candidates) <= set(pool.index[0].values())
        assert not set(pool.empty) & set(pool.index[0].values())
