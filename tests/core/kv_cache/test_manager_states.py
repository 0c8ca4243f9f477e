"""The KV cache manager with a group of states."""

from __future__ import annotations

import pytest
from support.core.kv_cache_model import finish, make_request, run

from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.plugins.kv_cache.manager import STATE_WINDOW, BlockNeeds

STATES = KVCacheGroup(STATE_WINDOW, has_states=True)
TOKENS = list(range(20))


def found(manager: BlockManager, tokens) -> int:
    return manager.lookup(make_request("probe", tokens)).num_tokens


def in_chunks(manager: BlockManager, chunk: int):
    """Return a request whose tokens were computed in chunks."""
    request = make_request("a", TOKENS)
    assert run(manager, request, chunk)
    while new := min(chunk, request.num_tokens - request.num_computed_tokens):
        assert manager.extend(request, new) is not None
        request.num_computed_tokens += new
    return request


def test_a_step_gets_two_blocks_for_states():
    manager = BlockManager(40, 2, groups=[KVCacheGroup(None), STATES], num_states=10)
    request = in_chunks(manager, 11)
    (_, states) = manager.block_ids(request)
    # Those of the first step are behind the window, but for the one that the second began with.
    assert [bool(block) for block in states] == [False] * 5 + [True] + [False] * 2 + [True] * 2
    finish(manager, request)
    assert manager.num_free_blocks == 39


@pytest.mark.parametrize(
    ("chunk", "kept"),
    [
        (20, {18, 20}),  # at the end, and before the last block
        (11, {10, 18, 20}),
        (5, {4, 8, 10, 14, 18, 20}),  # 6, 12 and 16 are in the middle of steps
        (1, set(range(2, 21, 2))),
    ],
)
def test_a_hit_ends_where_a_state_is_kept(chunk, kept):
    manager = BlockManager(60, 2, groups=[KVCacheGroup(None), STATES], num_states=30)
    request = in_chunks(manager, chunk)
    known = [*TOKENS, 99]
    expected = [max((k for k in kept if k < count), default=0) for count in range(1, 22)]
    assert [found(manager, known[:count]) for count in range(1, 22)] == expected
    finish(manager, request)
    assert [found(manager, known[:count]) for count in range(1, 22)] == expected


def test_what_one_request_holds_at_once():
    needs = BlockNeeds([KVCacheGroup(None), STATES], 4, max_step_tokens=100)
    assert [needs.of(tokens) for tokens in (1, 4, 5, 12, 13, 400)] == [2, 2, 4, 6, 7, 103]
    assert needs.num_null_blocks == 1


def test_states_cannot_go_back():
    manager = BlockManager(40, 2, groups=[STATES], num_states=39)
    request = make_request("a", TOKENS)
    assert run(manager, request)
    with pytest.raises(ValueError, match="cannot go back to token 4: states of its layers"):
        manager.rewind(request, 4)


def test_few_states_of_generated_tokens_are_kept():
    """Those of the prompt, the last ones, and every 16th block, which others evict last."""
    manager = BlockManager(200, 2, groups=[KVCacheGroup(None), STATES], num_states=60)
    request = make_request("a", TOKENS[:5])
    assert run(manager, request)
    for token in range(90):
        request.append(token)
        assert manager.extend(request, 1) is not None
        request.num_computed_tokens += 1
    known = [*TOKENS[:5], *range(90), 99]
    kept = [4, 6, 32, 64, 94]
    for held in (True, False):
        ends = [found(manager, known[: count + 1]) for count in range(len(known))]
        assert sorted(set(ends) - {0}) == kept, held
        finish(manager, request)
