"""The KV cache manager with windows and several groups of layers."""

from __future__ import annotations

import pytest
from support.core.kv_cache_model import finish, make_request, run

from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins.kv_cache import KVCacheGroup

TOKENS = list(range(10))
WINDOW = [KVCacheGroup(None), KVCacheGroup(4)]


def hit(manager: BlockManager, tokens) -> int:
    return manager.lookup(make_request("probe", tokens)).num_tokens


def test_window_bounds_what_is_held():
    manager = BlockManager(9, 2, groups=[KVCacheGroup(4)])
    assert manager.num_usable_blocks == manager.num_free_blocks == 8
    request = make_request("a", [1])
    assert run(manager, request)
    for token in range(200):
        request.append(token)
        assert manager.extend(request, 1) is not None
        request.num_computed_tokens += 1
        assert 8 - manager.num_free_blocks <= 3
    (table,) = manager.block_ids(request)
    assert len(table) == 101
    assert table[:98] == [0] * 98
    assert 0 not in table[99:]


def test_window_makes_room_for_itself():
    """Blocks it has passed are freed before new ones are taken, unless others hold them, too."""
    manager = BlockManager(4, 2, groups=[KVCacheGroup(2)])
    request, other = make_request("a", TOKENS), make_request("b", TOKENS[:5])
    assert run(manager, request, chunk=4)
    assert run(manager, other)
    assert manager.block_ids(other) == [[0, 2, 3]]
    assert manager.num_free_blocks == 0
    assert manager.extend(request, 2) == [[1]]
    assert manager.block_ids(request) == [[0, 2, 1]]
    request.num_computed_tokens = 6
    assert manager.extend(request, 2) is None
    assert manager.block_ids(request) == [[0, 2, 1]]
    manager.free(other)
    assert manager.extend(request, 2) == [[3]]
    assert manager.block_ids(request) == [[0, 0, 1, 3]]


def test_hit_in_a_window_goes_on():
    manager = BlockManager(20, 2, groups=[KVCacheGroup(4)])
    assert run(manager, make_request("a", TOKENS))
    request = make_request("b", [*TOKENS[:8], 20])
    assert run(manager, request)
    assert manager.block_ids(request) == [[0, 0, 3, 4, 6]]
    request.append(21)
    request.append(22)
    assert manager.extend(request, 2) == [[7]]
    assert manager.block_ids(request) == [[0, 0, 0, 4, 6, 7]]
    assert manager.num_free_blocks == 19 - 7


def test_window_hit_needs_only_what_is_seen():
    manager = BlockManager(20, 2, groups=[KVCacheGroup(4)])
    request = make_request("a", TOKENS)
    assert run(manager, request)
    finish(manager, request)
    blocks = [manager.pool.index[0][key] for key in manager._hashes.of(request, 5)]
    manager.discard(blocks[:2])
    prefix = manager.lookup(make_request("b", TOKENS))
    assert (prefix.num_tokens, prefix.block_ids) == (8, [[0, 0, *blocks[2:4]]])
    manager.discard(blocks[3:4])
    assert hit(manager, [*TOKENS, 10]) == 0


def test_groups_agree_on_the_longest_prefix():
    manager = BlockManager(20, 2, groups=WINDOW)
    request = make_request("a", TOKENS)
    assert run(manager, request)
    full, windowed = manager.block_ids(request)
    finish(manager, request)
    manager.discard(windowed[4:])
    prefix = manager.lookup(make_request("b", [*TOKENS, 10]))
    assert prefix.num_tokens == 8
    assert prefix.block_ids == [full[:4], [0, 0, *windowed[2:4]]]
    manager.discard(full[3:4])
    assert hit(manager, TOKENS) == 6
    assert manager.blocks_needed(9) == 10


def test_what_one_window_shortens_another_must_see():
    manager = BlockManager(20, 2, groups=[KVCacheGroup(6), KVCacheGroup(2)])
    request = make_request("a", TOKENS)
    assert run(manager, request)
    wide, narrow = manager.block_ids(request)
    manager.discard([wide[1], narrow[4]])
    prefix = manager.lookup(make_request("b", [*TOKENS, 10]))
    assert (prefix.num_tokens, prefix.block_ids) == (2, [wide[:1], narrow[:1]])


def test_rewind_behind_a_window():
    manager = BlockManager(40, 2, groups=[KVCacheGroup(4)])
    request = make_request("a", list(range(30)))
    assert run(manager, request, chunk=20)
    assert manager.extend(request, 10) is not None
    request.num_computed_tokens = 30
    manager.rewind(request, 20)
    words = (
        "^request 'a' cannot go back to token 18: in its window of 4 tokens, "
        "the blocks before token 16 were released$"
    )
    with pytest.raises(ValueError, match=words):
        manager.rewind(request, 18)


def test_drafts_in_flight_do_not_move_the_window():
    """The plan counts drafts as computed; were they rejected, the window would go back."""
    manager = BlockManager(40, 1, groups=[KVCacheGroup(2)])
    request = make_request("a", [1, 2, 3])
    assert run(manager, request)
    request.num_computed_tokens = 3 + 4
    assert manager.extend(request, 4) is not None
    assert manager.block_ids(request)[0][:3] == [0, 2, 3]


def test_tails_of_all_groups_are_evicted_first():
    manager = BlockManager(20, 2, groups=WINDOW)
    request = make_request("a", TOKENS[:4])
    assert run(manager, request)
    full, windowed = manager.block_ids(request)
    finish(manager, request)
    assert list(manager.pool.candidates) == [full[1], windowed[1], full[0], windowed[0]]
