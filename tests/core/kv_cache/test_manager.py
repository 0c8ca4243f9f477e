"""The KV cache manager, case by case; `test_manager_model.py` tries them in any order."""

from __future__ import annotations

import pytest
from support.core.kv_cache_model import finish, make_request, replay, run

from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.core.kv_cache import BlockManager, Eviction
from hardpoint.plugins import EvictionContext, EvictionPolicy, RequestStatus
from hardpoint.plugins.kv_cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CachedPrefix,
    KVCacheGroup,
)
from hardpoint.testing.scheduling.fakes.blocks import FakeBlocks

TOKENS = list(range(10))
WINDOW = [KVCacheGroup(None), KVCacheGroup(4)]


def lru() -> Eviction:
    context = EvictionContext(name="lru", options=None, **FakeBlocks(6).context_fields())
    return Eviction(LeastRecentlyUsed(context))


def hit(manager: BlockManager, tokens, **keys) -> int:
    return manager.lookup(make_request("probe", tokens, **keys)).num_tokens


def filled(tokens=TOKENS, num_blocks=20, block_size=2, **options) -> BlockManager:
    """Return a manager that one finished request left its content in."""
    manager = BlockManager(num_blocks, block_size, **options)
    request = make_request("first", tokens)
    assert run(manager, request)
    finish(manager, request)
    return manager


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (TOKENS, 8),  # all five blocks are there, but one token must be left to compute
        ([*TOKENS, 10], 10),
        ([*TOKENS[:9], 99], 8),
        ([*TOKENS[:7], 99, 8, 9], 6),
        ([99, *TOKENS[1:]], 0),
        (TOKENS[:3], 2),
        (TOKENS[:2], 0),
        (TOKENS[:1], 0),
    ],
)
def test_lookup(tokens, found):
    prefix = filled().lookup(make_request("second", tokens))
    assert prefix.num_tokens == found
    assert prefix.block_ids == ([list(range(found // 2))] if found else ())


@pytest.mark.parametrize(("tokens", "cached"), [(TOKENS, 6), ([*TOKENS, 10], 8), (TOKENS[:3], 0)])
@pytest.mark.parametrize("groups", [[KVCacheGroup(None)], WINDOW])
def test_the_last_block_of_a_prefix_is_dropped_for_drafting_heads(tokens, cached, groups):
    manager = filled(groups=groups, drops_last_block=True)
    assert hit(manager, tokens) == cached


def test_lookups_count_when_they_are_used():
    manager = filled()
    before = manager.stats()
    found = manager.lookup(request := make_request("a", [*TOKENS, 10]))
    assert found.num_tokens == 10
    assert manager.stats() == before  # whoever waits may look every step
    assert not manager.admit(request, found, 1, num_reserved_blocks=1000)
    assert manager.stats() == before
    assert manager.admit(request, found, 1)
    stats = manager.stats()
    assert stats.requests - before.requests == 1
    assert stats.queried_tokens - before.queried_tokens == 11
    assert stats.hit_tokens - before.hit_tokens == 10
    silent = make_request("b", TOKENS, prompt_logprobs=0)
    assert manager.admit(silent, manager.lookup(silent), 10)
    assert manager.stats() == stats


def test_prompt_logprobs_find_nothing_but_are_found():
    manager = BlockManager(20, 2)
    assert run(manager, make_request("a", TOKENS, prompt_logprobs=0))
    assert hit(manager, TOKENS, prompt_logprobs=0) == 0
    assert hit(manager, TOKENS) == 8


def test_without_prefix_caching():
    manager = filled(prefix_caching=False, events=True)
    assert hit(manager, TOKENS) == 0
    assert (manager.stats().requests, manager.take_events()) == (0, [])
    assert len(manager.pool.empty) == manager.num_free_blocks == 20


@pytest.mark.parametrize(
    "keys", [{"salt": "s"}, {"lora": "l"}, {"features": [("image", 0, 3)]}, {"salt": ""}]
)
def test_what_depends_on_more_than_tokens_is_not_shared(keys):
    manager = filled()
    assert hit(manager, TOKENS, **keys) == 0
    keyed = make_request("keyed", TOKENS, **keys)
    assert run(manager, keyed)
    assert hit(manager, TOKENS, **keys) == 8
    assert not set(manager.block_ids(keyed)[0]) & set(range(5))


def test_requests_of_one_step_share():
    manager = BlockManager(20, 2)
    requests = [make_request(f"r{i}", TOKENS) for i in range(4)]
    assert all(run(manager, request) for request in requests)
    tables = [manager.block_ids(request)[0] for request in requests]
    assert [table[:4] for table in tables] == [[0, 1, 2, 3]] * 4
    assert len({table[4] for table in tables}) == 4
    assert manager.num_free_blocks == 20 - 8


def test_a_chunk_is_found_up_to_its_last_full_block():
    manager = BlockManager(20, 4)
    request = make_request("a", TOKENS)
    assert run(manager, request, chunk=7)
    assert hit(manager, TOKENS) == 4
    assert manager.extend(request, 1) == ()
    assert hit(manager, TOKENS) == 8


def test_admit_counts_what_it_takes_out_of_the_candidates():
    manager = filled(num_blocks=6)  # five hold content, one is empty
    other = make_request("other", [50, 51, 52])
    assert run(manager, other)  # takes the empty block, and the tail of the content
    long = make_request("long", [*TOKENS[:8], 60, 61, 62])
    prefix = manager.lookup(long)
    assert (prefix.num_tokens, manager.num_free_blocks) == (8, 4)
    assert not manager.admit(long, prefix, 1)
    assert (manager.block_ids(long), manager.num_free_blocks) == ([], 4)
    finish(manager, other)
    assert not manager.admit(long, prefix, 1, num_reserved_blocks=2)
    assert manager.admit(long, prefix, 1, num_reserved_blocks=1)
    assert manager.block_ids(long)[0][:4] == [0, 1, 2, 3]
    assert manager.num_free_blocks == 1


def test_lookahead_and_external_tokens_have_blocks():
    manager = BlockManager(20, 2)
    request = make_request("a", TOKENS)
    assert manager.admit(request, CachedPrefix(), 3, num_external_tokens=4, num_lookahead_tokens=2)
    assert len(manager.block_ids(request)[0]) == 5
    assert hit(manager, TOKENS) == 6  # of seven tokens; lookahead holds nothing yet


def test_admitting_twice():
    manager = BlockManager(20, 2)
    request = make_request("a", TOKENS)
    assert run(manager, request)
    with pytest.raises(ValueError, match="^request 'a' holds blocks already$"):
        manager.admit(request, CachedPrefix(), 1)


def test_an_id_is_used_again_while_its_blocks_are_kept():
    """As where a connector still saves the blocks of a request that ended."""
    manager = BlockManager(20, 2)
    old, new = make_request("same", TOKENS), make_request("same", [7] * 6)
    assert run(manager, old)
    assert run(manager, new)
    assert manager.block_ids(old) == [[0, 1, 2, 3, 4]]
    assert manager.block_ids(new) == [[5, 6, 7]]
    finish(manager, old)
    assert manager.block_ids(new) == [[5, 6, 7]]


def test_extend():
    manager = BlockManager(4, 4)
    request = make_request("a", TOKENS)
    assert run(manager, request)
    assert manager.extend(request, 2) == ()
    assert manager.extend(request, 2, 1) == [[3]]
    assert manager.extend(request, 2, 4) == ()
    assert manager.extend(request, 7) is None
    assert manager.block_ids(request) == [[0, 1, 2, 3]]


def test_generated_tokens_are_found_and_drafts_are_not():
    manager = BlockManager(20, 2)
    request = make_request("a", [1, 2, 3])
    assert run(manager, request)
    request.append(4)
    assert manager.extend(request, 4) == [[2, 3]]  # one token and three drafts
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    for token in (5, 6):  # one draft was accepted
        request.append(token)
    request.num_computed_tokens = 5
    assert manager.extend(request, 1) == ()
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 6


def test_tokens_that_are_not_known_yet_are_cached_when_they_are():
    """As in asynchronous scheduling, where the plan runs ahead of the sampled tokens."""
    manager = BlockManager(20, 2)
    request = make_request("a", [1, 2, 3])
    assert run(manager, request)
    assert manager.extend(request, 1) == ()
    request.num_computed_tokens = 4
    assert hit(manager, [1, 2, 3, 4, 5]) == 2
    request.append(4)
    assert manager.extend(request, 1) == [[2]]
    assert hit(manager, [1, 2, 3, 4, 5]) == 4


def test_delayed_caching():
    manager = BlockManager(20, 2)
    request = make_request("a", TOKENS)
    assert manager.admit(request, CachedPrefix(), 0, num_external_tokens=9, delay_caching=True)
    assert hit(manager, TOKENS) == 0
    request.num_computed_tokens = 5  # four of the tokens did not come
    manager.cache_arrived(request, 5)
    assert hit(manager, TOKENS) == 4
    assert manager.extend(request, 4) == ()
    assert hit(manager, TOKENS) == 8
    manager.cache_arrived(request, 10)  # it has nothing to wait for any more
    assert hit(manager, [*TOKENS, 10]) == 8


def test_freed_while_its_data_was_on_the_way():
    manager = BlockManager(20, 2)
    request = make_request("a", TOKENS)
    assert manager.admit(request, CachedPrefix(), 0, num_external_tokens=8, delay_caching=True)
    manager.free(request)
    manager.cache_arrived(request, 8)
    assert (hit(manager, TOKENS), len(manager.pool.empty)) == (0, 20)
    assert run(manager, request)
    assert hit(manager, TOKENS) == 8


def test_tail_is_evicted_first():
    manager = filled(num_blocks=6, eviction=lru())
    assert run(manager, make_request("b", [50, 51, 52, 53, 54]))  # the empty one, and two more
    assert hit(manager, [*TOKENS, 10]) == 6


def test_least_recently_used_goes():
    manager = BlockManager(6, 2, eviction=lru())
    for name in "abc":
        request = make_request(name, [ord(name)] * 4)
        assert run(manager, request)
        finish(manager, request)
    assert hit(manager, [*b"aaaaa"]) == 4
    again = make_request("again", [*b"aaaaa"])
    assert run(manager, again)  # found, and its fifth token took the tail of b
    finish(manager, again)
    assert [hit(manager, [ord(name)] * 5) for name in "abc"] == [4, 2, 4]
    assert run(manager, make_request("d", [9] * 4))
    assert [hit(manager, [ord(name)] * 5) for name in "abc"] == [4, 0, 4]


def test_faulty_eviction_policy_changes_nothing_but_what_is_evicted():
    class Broken(EvictionPolicy):
        contract = 1

        def released(self, blocks):
            pass

        def taken(self, block_ids):
            pass

        dropped = taken

        def evict(self, count):
            return [17] * count

    faults = []
    policy = Broken(EvictionContext(name="broken", options=None, **FakeBlocks(6).context_fields()))
    manager = filled(num_blocks=6, eviction=Eviction(policy, lambda *words: faults.append(words)))
    assert run(manager, make_request("b", [50, 51, 52, 53, 54]))
    assert faults == [("evict(2) returned 17, which is no candidate", None)]
    assert hit(manager, [*TOKENS, 10]) == 6


def test_hashes_live_until_a_request_is_finished():
    manager = BlockManager(20, 2)
    request = make_request("a", TOKENS)
    assert run(manager, request)
    request.status = RequestStatus.PREEMPTED
    manager.free(request)
    assert len(manager._hashes) == 1
    assert run(manager, request)
    assert manager.stats().hit_tokens == 8
    finish(manager, request)
    manager.free(request)
    assert len(manager._hashes) == 0
    assert manager.num_free_blocks == 20


def test_rewind():
    manager = BlockManager(20, 2)
    request = make_request("a", TOKENS)
    assert run(manager, request)
    before = manager.block_ids(request)
    manager.rewind(request, 5)
    assert manager.block_ids(request) == before
    assert hit(manager, TOKENS) == 4
    request.num_computed_tokens = 5
    assert manager.extend(request, 2) == ()
    assert hit(manager, TOKENS) == 6
    request.num_computed_tokens = 7
    assert manager.extend(request, 3) == ()
    assert hit(manager, [*TOKENS, 10]) == 10


def test_discard():
    manager = filled()
    holder = make_request("holder", TOKENS)
    assert run(manager, holder)
    manager.discard([1, 4, 13])
    assert hit(manager, [*TOKENS, 10]) == 2
    assert manager.block_ids(holder)[0][:4] == [0, 1, 2, 3]
    finish(manager, holder)
    assert sorted(manager.pool.candidates) == [0, 2, 3]
    assert manager.num_free_blocks == 20


def test_reset_while_a_request_runs():
    manager = filled()
    request = make_request("a", [*TOKENS, 10, 11])
    assert run(manager, request, chunk=1)
    manager.reset()
    assert hit(manager, [*TOKENS, 10]) == 0
    assert len(manager.block_ids(request)[0]) == 6
    assert manager.extend(request, 1) == ()
    assert manager.num_free_blocks == len(manager.pool.empty) == 14
    assert hit(manager, [*TOKENS, 10, 11, 12]) == 0  # it stores nothing more
    manager.free(request)
    assert run(manager, request)
    assert hit(manager, [*TOKENS, 10, 11, 12]) == 12


def test_events():
    manager = BlockManager(6, 2, events=True, eviction=lru())
    first = make_request("a", [1, 2, 3, 4, 5], lora="adapter")
    assert run(manager, first, chunk=3)
    assert manager.extend(first, 2) == [[2]]
    hashes = list(manager._hashes.of(first, 2))
    stored = BlockStored([hashes[0]], None, [1, 2], 2, "adapter", 0)
    assert manager.take_events() == [
        stored,
        BlockStored([hashes[1]], hashes[0], [3, 4], 2, "adapter", 0),
    ]
    finish(manager, first)
    assert manager.take_events() == []
    assert run(manager, make_request("b", TOKENS))
    removed, second = manager.take_events()
    assert removed == BlockRemoved([hashes[1]])
    assert (second.parent_hash, second.token_ids, len(second.block_hashes)) == (None, TOKENS, 5)
    manager.discard([0])
    manager.reset()
    assert manager.take_events() == [BlockRemoved([hashes[0]]), AllBlocksCleared()]


def test_events_of_several_groups():
    manager = BlockManager(20, 2, groups=WINDOW, events=True)
    request = make_request("a", TOKENS)
    assert run(manager, request)
    hashes = [set(), set()]
    for event in manager.take_events():
        replay(event, hashes)
    assert hashes == [set(index) for index in manager.pool.index]
    assert len(hashes[0]) == len(hashes[1]) == 5
    manager.discard(manager.block_ids(request)[1][:1])
    (event,) = manager.take_events()
    assert (event.group, len(event.block_hashes)) == (1, 1)


def test_events_of_blocks_with_a_gap():
    """Blocks that another request has stored in between are not reported again."""
    manager = BlockManager(20, 2, events=True)
    delayed = make_request("delayed", TOKENS)
    assert manager.admit(delayed, CachedPrefix(), 0, num_external_tokens=10, delay_caching=True)
    other = make_request("other", TOKENS[:6])
    assert run(manager, other)
    manager.discard(manager.block_ids(other)[0][:1])
    manager.take_events()
    manager.cache_arrived(delayed, 10)
    keys = manager._hashes.of(delayed, 5)
    assert manager.take_events() == [
        BlockStored([keys[0]], None, [0, 1], 2),
        BlockStored(keys[3:], keys[2], [6, 7, 8, 9], 2),
    ]


def test_pool_of_one_block():
    manager = BlockManager(1, 4, eviction=lru())
    for name in "ab":
        request = make_request(name, [ord(name)] * 4)
        assert run(manager, request)
        request.append(7)
        assert manager.extend(request, 1) is None
        assert not run(manager, make_request("other", [5]))
        finish(manager, request)
    assert hit(manager, [*b"bbbbb"]) == 4
    assert hit(manager, [*b"aaaaa"]) == 0
