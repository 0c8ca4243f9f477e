"""A naive KV cache manager to compare with: contents are token tuples, states are worked out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins import EngineCoreRequest, Request, RequestStatus, SamplingParams
from hardpoint.plugins.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature


def make_request(
    name="r",
    tokens=(1,),
    *,
    salt=None,
    lora=None,
    features=(),
    prompt_logprobs=None,
) -> Request:
    return Request(
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(tokens),
            params=SamplingParams(prompt_logprobs=prompt_logprobs),
            cache_salt=salt,
            lora=None if lora is None else LoRARequest(lora, 1),
            features=[MultiModalFeature(*feature) for feature in features],
        )
    )


def run(manager: BlockManager, request: Request, chunk: int | None = None) -> bool:
    """Admit a request and take its known tokens as computed, the first `chunk` or all."""
    prefix = manager.lookup(request)
    new = request.num_tokens - prefix.num_tokens
    new = new if chunk is None else min(chunk, new)
    if not manager.admit(request, prefix, new):
        return False
    request.num_computed_tokens = prefix.num_tokens + new
    return True


def finish(manager: BlockManager, request: Request) -> None:
    request.status = RequestStatus.FINISHED
    manager.free(request)


@dataclass
class Live:
    """A request and the model's results for it."""

    request: Request
    tables: list[list[int]] | None = None
    stored: int = 0
    capacity: int = 0
    delayed: bool = False
    stopped: bool = False


@dataclass
class Model:
    """The expected cache, by content: (group, salt, lora, tokens up to the block's end)."""

    manager: BlockManager
    block_size: int
    found: dict[tuple, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    live: dict[str, Live] = field(default_factory=dict)
    replayed: list[set[bytes]] = field(default_factory=list)

    def content(self, request: Request, group: int, position: int) -> tuple:
        tokens = tuple(request.token_ids(0, (position + 1) * self.block_size))
        source = request.source
        return (group, source.cache_salt, source.lora and source.lora.name, tokens)

    @property
    def every(self) -> range:
        """All blocks but the null block."""
        return range(int(self.windowed), self.manager.num_blocks)

    def holders(self, block: int) -> int:
        return sum(table.count(block) for live in self.live.values() for table in live.tables or ())

    def expected_prefix(self, request: Request) -> tuple[int, list[list[int]]]:
        """Try every length, the longest first."""
        size = self.block_size
        for length in range((request.num_tokens - 1) // size, 0, -1):
            tables = []
            for group, spec in enumerate(self.manager.groups):
                seen = 0 if spec.window is None else max(0, length * size - spec.window + 1)
                tables.append(
                    [
                        0
                        if (i + 1) * size <= seen
                        else self.found.get(self.content(request, group, i))
                        for i in range(length)
                    ]
                )
            if all(None not in table for table in tables):
                return length * size, tables
        return 0, []

    def allocated(self, blocks: list[int]) -> None:
        """Allocate blocks: they were free, empty ones went first, then the earliest released."""
        assert len(set(blocks)) == len(blocks)
        assert all(self.holders(block) == 0 for block in blocks)
        cached = set(self.found.values())
        evicted = [block for block in blocks if block in cached]
        every = range(
            self.manager.num_blocks - self.manager.num_usable_blocks, self.manager.num_blocks
        )
        empty = [b for b in every if b not in cached and self.holders(b) == 0]
        assert len(evicted) == max(0, len(blocks) - len(empty))
        assert set(evicted) == set(self.order[: len(evicted)])
        self.drop(evicted)

    def drop(self, blocks) -> None:
        """Let content be found no more."""
        gone = set(blocks)
        self.found = {key: block for key, block in self.found.items() if block not in gone}
        self.order = [block for block in self.order if block not in gone]

    def store(self, live: Live, num_tokens: int) -> None:
        if live.delayed or live.stopped:
            return
        full = min(num_tokens, live.request.num_tokens) // self.block_size
        for group, table in enumerate(live.tables):
            for i in range(live.stored, full):
                if table[i] or not self.windowed:
                    self.found.setdefault(self.content(live.request, group, i), table[i])
        live.stored = max(live.stored, full)

    @property
    def windowed(self) -> bool:
        return any(spec.window is not None for spec in self.manager.groups)

    def released(self, blocks) -> None:
        """Note that blocks left a table (which no longer has them)."""
        cached = set(self.found.values())
        for block in blocks:
            if self.holders(block) == 0 and block in cached:
                self.order.append(block)

    def check(self) -> None:
        """Compare everything that can be seen."""
        manager, pool = self.manager, self.manager.pool
        cached = set(self.found.values())
        tables = [table for live in self.live.values() for table in live.tables or ()]
        counts = Counter(block for table in tables for block in table)
        held = {block for block in self.every if counts[block]}
        assert [pool.ref_count[block] for block in self.every] == [counts[b] for b in self.every]
        assert list(pool.candidates) == self.order
        assert set(self.order) == cached - held
        assert sorted(pool.empty) == sorted(set(self.every) - held - cached)
        assert manager.num_free_blocks == len(self.every) - len(held)
        assert not self.windowed or pool.ref_count[0] == 0
        for live in self.live.values():
            assert list(manager.block_ids(live.request)) == (live.tables or [])
        self.check_index()

    def check_index(self) -> None:
        pool = self.manager.pool
        for group, index in enumerate(pool.index):
            blocks = [block for key, block in self.found.items() if key[0] == group]
            assert sorted(index.values()) == sorted(blocks)
        for event in self.manager.take_events():
            replay(event, self.replayed)
        assert self.replayed == [set(index) for index in pool.index]


def replay(event, hashes: list[set[bytes]]) -> None:
    """Apply an event to the visible hashes per group; reject an inconsistent one."""
    if isinstance(event, AllBlocksCleared):
        for group in hashes:
            group.clear()
    elif isinstance(event, BlockRemoved):
        assert hashes[event.group] >= set(event.block_hashes)
        hashes[event.group] -= set(event.block_hashes)
    else:
        assert isinstance(event, BlockStored)
        assert not hashes[event.group] & set(event.block_hashes)
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        hashes[event.group] |= set(event.block_hashes)
