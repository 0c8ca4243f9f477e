"""Blocks of states beside those of keys: two kinds in one pool, of which either may be used up."""

from __future__ import annotations

import random

import pytest
from support.core.kv_cache_model import finish, make_request, run

from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins.kv_cache import CachedPrefix, KVCacheGroup
from hardpoint.plugins.kv_cache.manager import STATE_WINDOW

NONE = CachedPrefix()
GROUPS = [KVCacheGroup(), KVCacheGroup(STATE_WINDOW, has_states=True)]
SIZE = 2


def manager_of(num_keys: int, num_states: int, groups=GROUPS) -> BlockManager:
    """Return a manager; block 0 belongs to nobody."""
    return BlockManager(1 + num_keys + num_states, SIZE, groups=groups, num_states=num_states)


def holdings(manager: BlockManager, request) -> tuple[int, int]:
    """Return how many blocks of keys and of states a request holds."""
    keys, states = manager.block_ids(request) or ([], [])
    return len(keys), sum(map(bool, states))


def lengthened(manager: BlockManager, request, count: int) -> bool:
    """Compute `count` further tokens of a request, if there is room."""
    if manager.extend(request, count) is None:
        return False
    request.num_computed_tokens += count
    return True


def generated(manager: BlockManager, request, tokens) -> bool:
    for token in tokens:
        request.append(token)
        if not lengthened(manager, request, 1):
            return False
    return True


def test_states_are_the_last_blocks():
    manager = manager_of(20, 6)
    request = make_request("a", range(7))
    assert run(manager, request)
    keys, states = manager.block_ids(request)
    assert max(keys) <= 20 < min(filter(None, states))
    assert (manager.num_free_blocks, manager.num_free_states) == (26 - 4 - 2, 4)
    assert manager_of(20, 0, GROUPS[:1]).num_free_states is None


def test_lookahead_is_refused():
    """A state is where a step ends, not behind it."""
    with pytest.raises(ValueError, match="num_lookahead_tokens: expected 0 for a model with state"):
        manager_of(20, 6).admit(make_request("a", range(7)), NONE, 7, num_lookahead_tokens=1)


def test_states_that_are_used_up_leave_keys_alone():
    manager = manager_of(100, 3)
    a, b = make_request("a", range(10)), make_request("b", range(50, 60))
    assert run(manager, a)
    before = manager.num_free_blocks, manager.num_free_states
    assert not run(manager, b)
    assert not manager.block_ids(b)
    assert (manager.num_free_blocks, manager.num_free_states) == before == (96, 1)
    # The one that runs goes on: it gives a state back for each that it needs.
    assert generated(manager, a, range(30))
    assert holdings(manager, a) == (20, 1)
    finish(manager, a)
    assert run(manager, b)


def test_keys_that_are_used_up_leave_states_alone():
    manager = manager_of(6, 100)
    a, b = make_request("a", range(8)), make_request("b", range(50, 58))
    assert run(manager, a)
    before = manager.num_free_blocks, manager.num_free_states
    assert not run(manager, b)
    assert (manager.num_free_blocks, manager.num_free_states) == before
    assert generated(manager, a, range(4))
    assert not generated(manager, a, [4])
    assert holdings(manager, a)[0] == 6
    finish(manager, a)
    assert run(manager, b)


@pytest.mark.parametrize("found", [True, False])
def test_a_hit_needs_both_kinds(found):
    manager = manager_of(40, 8)
    request = make_request("a", range(12))
    assert run(manager, request)
    keys, states = manager.block_ids(request)
    finish(manager, request)
    again = make_request("b", [*range(12), 99])
    assert manager.lookup(again).num_tokens == 12
    manager.discard([states[-1] if found else keys[0]])
    assert manager.lookup(again).num_tokens == (10 if found else 0)


def test_either_kind_evicts_in_one_order():
    """The prompts before lose their last blocks first, and the oldest one before others."""
    manager = manager_of(40, 7)
    for name in range(3):
        request = make_request(str(name), range(100 * name, 100 * name + 8))
        assert run(manager, request)
        finish(manager, request)

    def kept():
        probes = [[*range(100 * name, 100 * name + 8), 99] for name in range(3)]
        return [manager.lookup(make_request("p", probe)).num_tokens for probe in probes]

    assert kept() == [8, 8, 8]
    assert run(
        manager, make_request("x", range(900, 904))
    )  # takes two states, of which one is empty
    assert kept() == [6, 8, 8]
    assert run(manager, make_request("y", range(910, 912)))
    assert kept() == [0, 8, 8]
    # Keys of the first one that are left are of no use, and go before a state of the second one.
    assert run(manager, make_request("z", range(920, 922)))
    assert kept() == [0, 6, 8]
    assert len(manager.pool.empty) == 40 - (2 + 1 + 1) - (3 + 4)


class Checked:
    """A manager whose blocks are counted after each call."""

    def __init__(self, manager: BlockManager, num_states: int) -> None:
        self.manager, self.first = manager, manager.num_blocks - num_states
        self.live: list = []

    def check(self) -> None:
        manager, pool = self.manager, self.manager.pool
        held = set()
        for request in self.live:
            keys, states = manager.block_ids(request)
            real = [block for block in states if block]
            assert all(0 < block < self.first for block in keys)
            assert all(block >= self.first for block in real)
            assert len(real) <= 3
            held |= {*keys, *real}
        free = {*pool.empty, *pool.empty_states, *pool.candidates}
        assert not held & free
        assert held | free == set(range(1, manager.num_blocks))
        assert len(free) == manager.num_free_blocks
        assert sum(block >= self.first for block in free) == manager.num_free_states


@pytest.mark.parametrize("seed", range(30))
def test_random_calls(seed):
    rng = random.Random(seed)
    num_keys, num_states = rng.choice([(90, 3), (30, 5), (14, 4), (12, 40)])
    manager = manager_of(num_keys, num_states)
    checked = Checked(manager, num_states)
    stems = [[rng.randrange(5) for _ in range(12)] for _ in range(3)]
    refused = 0
    for step in range(600):
        choice = rng.random()
        if choice < 0.3 and len(checked.live) < 6:
            tokens = rng.choice(stems)[: rng.randint(1, 12)] + [rng.randrange(9)] * rng.randint(
                1, 6
            )
            request = make_request(str(step), tokens)
            if run(manager, request, rng.choice([None, 3, 5])):
                checked.live.append(request)
            else:
                refused += 1
        elif choice < 0.8 and checked.live:
            request = rng.choice(checked.live)
            left = request.num_tokens - request.num_computed_tokens
            if not left:
                request.append(rng.randrange(9))
                left = 1
            if not lengthened(manager, request, rng.randint(1, left)):
                refused += 1
                manager.free(request)  # as if it were preempted
                checked.live.remove(request)
        elif choice < 0.98 and checked.live:
            request = checked.live.pop(rng.randrange(len(checked.live)))
            finish(manager, request)
        elif choice > 0.99:
            manager.reset()
        checked.check()
    assert refused
    for request in checked.live:
        finish(manager, request)
    assert manager.num_free_states == num_states
