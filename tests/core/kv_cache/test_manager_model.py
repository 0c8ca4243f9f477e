"""The KV cache manager against a naive one, over any order of moves."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.core.kv_cache_model import Live, Model, make_request
from support.searching import examples

from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.core.kv_cache import BlockManager, Eviction
from hardpoint.plugins import EvictionContext, RequestStatus
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.testing.scheduling.fakes.blocks import FakeBlocks

GROUPS = [(None,), (3,), (1,), (None, 4), (5, None, 2), (None, None)]
pick = st.integers(0, 99)
some_hold = precondition(lambda self: self.choose(0) is not None)
some_wait = precondition(lambda self: self.choose(0, running=False) is not None)


class Cache(RuleBasedStateMachine):
    """Moves that a scheduler may make, each done to the manager and to the model."""

    @initialize(
        num_blocks=st.integers(2, 30),
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from(GROUPS),
        plugin=st.booleans(),
    )
    def start(self, num_blocks, block_size, windows, plugin):
        self.size = block_size
        context = EvictionContext(name="lru", options=None, **FakeBlocks(1).context_fields())
        lru = LeastRecentlyUsed(context)
        self.manager = BlockManager(
            num_blocks,
            block_size,
            groups=[KVCacheGroup(window) for window in windows],
            eviction=Eviction(lru) if plugin else None,
            events=True,
        )
        self.model = Model(self.manager, block_size, replayed=[set() for _ in windows])
        self.names = 0

    def choose(self, number, *, running=True) -> Live | None:
        ones = [
            one
            for one in self.model.live.values()
            if (one.tables is not None) == running and not (running and one.delayed)
        ]
        return ones[number % len(ones)] if ones else None

    @rule(
        length=st.integers(1, 16),
        other=st.sampled_from([None, None, 0, 2, 5]),
        salt=st.sampled_from([None, None, None, "s"]),
        lora=st.sampled_from([None, None, None, "l"]),
    )
    def arrive(self, length, other, salt, lora):
        """Most prompts are the same but for their length and one token."""
        tokens = [int(i == other) for i in range(length)]
        name = f"r{self.names}"
        self.names += 1
        self.model.live[name] = Live(make_request(name, tokens, salt=salt, lora=lora))

    @some_wait
    @rule(
        number=pick,
        chunk=st.integers(1, 9),
        lookahead=st.integers(0, 3),
        reserved=st.integers(0, 3),
        external=st.integers(0, 6),
        delay=st.booleans(),
    )
    def admit(self, number, chunk, lookahead, reserved, external, delay):
        one = self.choose(number, running=False)
        request, manager, model = one.request, self.manager, self.model
        prefix = manager.lookup(request)
        length, tables = model.expected_prefix(request)
        assert (prefix.num_tokens, list(prefix.block_ids)) == (length, tables)
        external = min(external, request.num_tokens - 1 - length)
        delay = delay and external > 0
        chunk = 0 if delay else min(chunk, request.num_tokens - length - external)
        end = length + external + chunk
        new = -(-(end + lookahead) // self.size) - length // self.size
        found = {block for table in tables for block in table if block or not model.windowed}
        idle = sum(model.holders(block) == 0 for block in found)
        fits = new * len(manager.groups) + idle + reserved <= manager.num_free_blocks
        done = manager.admit(
            request,
            prefix,
            chunk,
            num_external_tokens=external,
            num_lookahead_tokens=lookahead,
            num_reserved_blocks=reserved,
            delay_caching=delay,
        )
        assert done == fits
        if not done:
            return
        after = [list(table) for table in manager.block_ids(request)]
        known = tables or [[] for _ in manager.groups]
        assert [table[: length // self.size] for table in after] == known
        assert all(len(table) == length // self.size + new for table in after)
        model.order = [block for block in model.order if block not in found]
        one.tables = [list(table) for table in known]
        model.allocated([b for table in after for b in table[length // self.size :]])
        one.tables, one.stored, one.delayed = after, length // self.size, delay
        one.stopped = False
        request.num_computed_tokens = length + external
        model.store(one, end)
        request.num_computed_tokens = end

    @rule(number=pick, arrived=st.integers(0, 20))
    def arrived(self, number, arrived):
        ones = [one for one in self.model.live.values() if one.delayed]
        if not ones:
            return
        one = ones[number % len(ones)]
        arrived = min(arrived, one.request.num_computed_tokens)
        one.delayed = False
        self.model.store(one, arrived)
        one.request.num_computed_tokens = arrived
        self.manager.cache_arrived(one.request, arrived)

    @some_hold
    @rule(
        number=pick,
        chunk=st.integers(1, 9),
        lookahead=st.integers(0, 3),
        drafts=st.integers(0, 3),
        accepted=st.integers(0, 3),
        token=st.integers(0, 1),
    )
    def step(self, number, chunk, lookahead, drafts, accepted, token):
        one = self.choose(number)
        request, manager, model = one.request, self.manager, self.model
        computed = request.num_computed_tokens
        known = min(chunk, request.num_tokens - computed)
        if computed + known < request.num_tokens:
            drafts = 0
        if known + drafts == 0:
            return
        before = [list(table) for table in one.tables]
        passed = self.passed(one)
        wanted = -(-(computed + known + drafts + lookahead) // self.size) - len(before[0])
        gains = sum(model.holders(block) == 1 for block in passed)
        fits = max(0, wanted) * len(before) <= manager.num_free_blocks + gains
        new = manager.extend(request, known + drafts, lookahead)
        if wanted > 0:
            assert (new is not None) == fits
        if new is None:
            return
        assert new == () or [len(table) for table in new] == [wanted] * len(before)
        after = [list(table) for table in manager.block_ids(request)]
        kept = [u[: len(t)] for t, u in zip(before, after, strict=True)]
        gone = [
            old
            for t, u in zip(before, kept, strict=True)
            for old, block in zip(t, u, strict=True)
            if old != block
        ]
        assert set(gone) <= set(passed)
        assert wanted <= 0 or gone == passed
        one.tables = kept
        model.released(gone)
        model.allocated([block for table in new for block in table])
        one.tables = after
        model.store(one, computed + known + drafts)
        request.num_computed_tokens = computed + known + min(accepted, drafts)
        if request.num_computed_tokens >= request.num_tokens:
            for _ in range(request.num_computed_tokens - request.num_tokens + 1):
                request.append(token)

    def passed(self, one: Live) -> list[int]:
        """Return the blocks that lie before every window of the next token."""
        position = min(one.request.num_computed_tokens, one.request.num_tokens - 1)
        return [
            block
            for spec, table in zip(self.manager.groups, one.tables, strict=True)
            for i, block in enumerate(table)
            if spec.window is not None
            and block
            and (i + 1) * self.size <= position - spec.window + 1
        ]

    @rule(number=pick, finished=st.booleans())
    def free(self, number, finished):
        ones = list(self.model.live.values())
        if not ones:
            return
        one = ones[number % len(ones)]
        rows = list(zip(*one.tables, strict=True))[::-1] if one.tables else []
        one.tables, one.delayed = None, False
        one.request.status = RequestStatus.FINISHED if finished else RequestStatus.PREEMPTED
        one.request.num_computed_tokens = 0
        if finished:
            del self.model.live[one.request.request_id]
        self.model.released(
            [block for row in rows for block in row if block or not self.model.windowed]
        )
        self.manager.free(one.request)

    @some_hold
    @rule(number=pick, back=st.integers(0, 8))
    def rewind(self, number, back):
        one = self.choose(number)
        target = max(0, one.request.num_computed_tokens - back)
        lost = any(
            not block and (i + 1) * self.size > target - spec.window + 1
            for spec, table in zip(self.manager.groups, one.tables, strict=True)
            if spec.window is not None
            for i, block in enumerate(table)
        )
        if lost:
            with pytest.raises(ValueError, match=f"cannot go back to token {target}"):
                self.manager.rewind(one.request, target)
            return
        self.manager.rewind(one.request, target)
        first = target // self.size
        self.model.drop([block for table in one.tables for block in table[first:]])
        one.stored = min(one.stored, first)
        one.request.num_computed_tokens = target

    @rule(blocks=st.lists(pick, max_size=4))
    def discard(self, blocks):
        blocks = [block % self.manager.num_blocks for block in blocks]
        self.model.drop(blocks)
        self.manager.discard(blocks)

    @rule()
    @precondition(lambda self: self.names % 5 == 4)
    def reset(self):
        self.manager.reset()
        self.model.found, self.model.order = {}, []
        for one in self.model.live.values():
            one.stopped = one.tables is not None
            one.delayed = False

    @invariant()
    def agrees(self):
        if hasattr(self, "model"):
            self.model.check()


Cache.TestCase.settings = examples(150, stateful_step_count=50)
TestCache = Cache.TestCase
