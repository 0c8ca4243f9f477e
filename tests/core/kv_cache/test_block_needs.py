"""How many blocks a request needs: never more are held, and with so many it always goes on."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from support.core.kv_cache_model import finish, make_request
from support.searching import examples

from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.plugins.kv_cache.manager import BlockNeeds

WINDOWS = st.lists(st.sampled_from([None, 1, 2, 3, 7, 16, 40]), min_size=1, max_size=4)


def needs_of(windows, block_size=4, step=10) -> BlockNeeds:
    return BlockNeeds([KVCacheGroup(window) for window in windows], block_size, step)


def test_a_window_bounds_what_is_needed():
    assert [needs_of([None]).of(length) for length in (1, 4, 5, 400)] == [1, 1, 2, 100]
    # 15 tokens from the first that is seen to the last of a step touch 5 blocks at most.
    assert [needs_of([6]).of(length) for length in (1, 16, 20, 400)] == [1, 4, 5, 5]
    assert needs_of([None, 6, 6]).of(400) == 110
    assert needs_of([None, 6], step=None).of(400) == 200
    assert needs_of([1], step=1).of(400) == 1


def test_the_longest_request_that_fits():
    assert needs_of([None]).longest(7, 400) == 28
    assert needs_of([None]).longest(7, 27) == 27
    assert needs_of([None]).longest(0, 400) == 0
    needs = needs_of([None, 6])
    assert needs.num_null_blocks == 1
    assert needs.longest(15, 400) == 4 * (15 - 1 - 5)
    assert needs.longest(106, 400) == 400
    assert needs.longest(105, 400) == 396
    assert needs_of([6]).longest(6, 400) == 400
    assert needs_of([6]).longest(5, 400) == 16
    assert needs_of([6]).longest(1, 400) == 0


def check(manager: BlockManager, request, end: int) -> None:
    """Check what a request holds before a step whose last token is `end` - 1."""
    held = manager.num_usable_blocks - manager.num_free_blocks
    assert held <= manager.blocks_needed(end)
    seen = []
    for group, table in zip(manager.groups, manager.block_ids(request), strict=True):
        next_token = min(request.num_computed_tokens, request.num_tokens - 1)
        first = 0 if group.window is None else max(0, next_token - group.window + 1)
        seen += table[first // manager.block_size : -(-end // manager.block_size)]
    assert len(set(seen)) == len(seen)
    assert 0 not in seen or not manager.num_blocks - manager.num_usable_blocks


@examples(150)
@given(
    seed=st.integers(0, 1 << 30),
    windows=WINDOWS,
    size=st.sampled_from([1, 2, 4]),
    step=st.integers(1, 12),
    ahead=st.integers(0, 2),
    length=st.integers(2, 60),
)
def test_a_request_that_has_what_it_needs_goes_on(seed, windows, size, step, ahead, length):
    """Alone, with prefix caching, and with tokens in flight that are not known yet."""
    draw = random.Random(seed)
    prompt = draw.randint(1, length - 1)
    needs = needs_of(windows, size, max(step, ahead + 1))
    manager = BlockManager(
        needs.of(length) + needs.num_null_blocks,
        size,
        groups=needs.groups,
        max_step_tokens=needs.max_step_tokens,
    )
    assert manager.blocks_needed(length) == manager.num_usable_blocks == needs.of(length)
    for name in "ab":  # the second one finds what the first one has left
        request = make_request(name, [7] * prompt)
        prefix = manager.lookup(request)
        chunk = min(draw.randint(1, step), prompt - prefix.num_tokens)
        assert manager.admit(request, prefix, chunk)
        request.num_computed_tokens = prefix.num_tokens
        check(manager, request, prefix.num_tokens + chunk)
        request.num_computed_tokens += chunk
        while request.num_computed_tokens < length - 1:
            unknown = request.num_computed_tokens - request.num_tokens + 1
            if unknown > draw.randint(0, ahead):
                request.append(7)
                continue
            chunk = min(draw.randint(1, step), 1 - min(unknown, 0))
            end = request.num_computed_tokens + chunk
            assert manager.extend(request, chunk) is not None
            check(manager, request, end)
            request.num_computed_tokens = end
        finish(manager, request)
        assert manager.num_free_blocks == manager.num_usable_blocks
