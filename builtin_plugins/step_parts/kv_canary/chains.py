"""The chains of requests: a number for each position, of all that its keys and values depend on."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hardpoint.plugins import EngineCoreRequest, SchedulerOutput
from hardpoint.plugins.kv_cache import sharing_key
from hardpoint.toolkit.half_floats import float32_of

UInts = np.ndarray[Any, np.dtype[np.uint64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

NEVER_WRITTEN = 0

_MOST_PAST = 64  # ended requests with entries that are still recognized
_MOST_REJECTED = 1 << 12


class TokenChain:
    """Sums of hashes of a request's tokens, from the first to that at each position.

    The entry of a position is a hash of its sum, so that it differs where any token or embedding
    before it, its position, the cache salt or the adapter does.

    Attributes:
        request_id: the request.
        length: known tokens.
        block_ids: its block table as planned, one per group.
        places: index of the block of each column, with the released ones counted.
        adapter: name of its adapter; empty if it has none.
    """

    def __init__(self, source: EngineCoreRequest, max_model_len: int, num_groups: int) -> None:
        """Begin without tokens; there is room for `max_model_len`."""
        self.request_id, self.length = source.request_id, 0
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.places: list[int] = []
        self._num_blocks = 0
        self.adapter = "" if source.lora is None else source.lora.name
        self.seed = np.array([_hash_of(sharing_key(source))], dtype=np.uint64)
        self._sums = np.empty(max_model_len, dtype=np.uint64)
        self._content = np.zeros(0, dtype=np.uint64)
        if source.features:
            end = max(feature.offset + feature.length for feature in source.features)
            self._content = np.zeros(end, dtype=np.uint64)
            for feature in source.features:
                marks = np.arange(feature.length, dtype=np.uint64) + np.uint64(1)
                at = slice(feature.offset, feature.offset + feature.length)
                self._content[at] = _mixed(marks ^ np.uint64(_hash_of(feature.identifier)))

        if source.prompt_embeds is not None:
            self._mix_embeddings(source)

    def _mix_embeddings(self, source: EngineCoreRequest) -> None:
        content = np.zeros(max(len(source.prompt_token_ids), len(self._content)), dtype=np.uint64)
        content[: len(self._content)] = self._content
        mask = source.prompt_is_token_ids or [False] * len(source.prompt_token_ids)
        positions = np.flatnonzero(~np.asarray(mask, dtype=np.bool_))
        digests = [
            hashlib.blake2b(float32_of(row).tobytes(), digest_size=8)
            for row in source.prompt_embeds
        ]
        content[positions] ^= np.array(
            [int.from_bytes(digest.digest(), "little") for digest in digests], dtype=np.uint64
        )
        self._content = content

    def append(self, tokens: Sequence[int]) -> None:
        """Add known tokens, as many as there is room for."""
        room = len(self._sums) - self.length
        sums = self.sums_of(np.asarray(tokens[:room], dtype=np.int64), self.length)
        self._sums[self.length : self.length + len(sums)] = sums
        self.length += len(sums)

    def extend_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Append blocks to the tables of all groups."""
        for table, new in zip(self.block_ids, block_ids, strict=False):
            table += new
        count = len(block_ids[0]) if block_ids else 0
        self.places += range(self._num_blocks, self._num_blocks + count)
        self._num_blocks += count

    def release_columns(self, columns: Sequence[tuple[int, int]]) -> None:
        """Remove columns from the tables, one range after the other."""
        for first, end in columns:
            for table in (*self.block_ids, self.places):
                del table[first:end]

    @property
    def num_released(self) -> int:
        """Number of blocks that left the tables."""
        return self._num_blocks - len(self.places)

    def sums_of(self, tokens: Ints, start: int) -> UInts:
        """Return the sums at the positions of tokens that follow the first `start` known ones."""
        before = self._sums[start - 1 : start] if start else self.seed
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        keys = tokens.astype(np.uint64) ^ (positions << np.uint64(32))
        content = self._content[start : start + len(tokens)]
        keys[: len(content)] ^= content
        return np.cumsum(_mixed(keys), dtype=np.uint64) + before

    def entries(self, drafts: Sequence[int] = (), seed: UInts | None = None) -> Ints:
        """Return the entries of the known tokens and of drafts after them.

        Args:
            drafts: tokens that follow.
            seed: in place of the request's own.
        """
        tokens = np.maximum(np.asarray(drafts, dtype=np.int64), 0)  # NO_DRAFT is no token
        sums = np.concatenate((self._sums[: self.length], self.sums_of(tokens, self.length)))
        return entries_of(sums if seed is None else sums - self.seed + seed, 0)


class KnownChains:
    """The chains of the requests of a worker, by plans and samples alone."""

    def __init__(self, max_model_len: int, num_groups: int) -> None:
        """Know no request yet.

        Args:
            max_model_len: tokens of a request.
            num_groups: KV cache groups.
        """
        self._sizes = max_model_len, num_groups
        self._chains: dict[str, TokenChain] = {}
        self._past: OrderedDict[str, TokenChain] = OrderedDict()
        self._drafted: dict[str, tuple[int, Ints]] = {}  # first position and entries, in the step
        self._rejected: dict[int, str] = {}  # request, by the entry of a draft

    def get(self, request_id: str) -> TokenChain | None:
        """Return the chain of a request; None if no plan had it in full."""
        return self._chains.get(request_id)

    def begin(self, plan: SchedulerOutput) -> None:
        """Take the tokens and the blocks of a plan."""
        for new in plan.new_requests:
            chain = TokenChain(new.source, *self._sizes)
            chain.append([*new.source.prompt_token_ids, *new.output_token_ids])
            chain.extend_blocks(new.block_ids)
            chain.release_columns(new.released_columns)
            self._chains[chain.request_id] = chain
        for request_id, block_ids in plan.cached_requests.new_block_ids.items():
            if (known := self.get(request_id)) is not None:
                known.extend_blocks(block_ids)
        for request_id, columns in plan.cached_requests.released_columns.items():
            if (known := self.get(request_id)) is not None:
                known.release_columns(columns)
        for request_id, drafts in plan.draft_token_ids.items():
            if (known := self.get(request_id)) is not None:
                self._drafted[request_id] = known.length, known.entries(drafts)[known.length :]

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Append the tokens of the step, and remember the drafts that were rejected."""
        for request_id, tokens in token_ids.items():
            if (chain := self.get(request_id)) is None:
                continue
            chain.append(tokens)
            start, drafts = self._drafted.get(request_id, (0, np.empty(0, dtype=np.int64)))
            known = chain.entries()[start : start + len(drafts)]
            for entry in set(drafts.tolist()).difference(known.tolist()):
                self._rejected[entry] = request_id
        self._drafted = {}
        while len(self._rejected) > _MOST_REJECTED:
            del self._rejected[next(iter(self._rejected))]

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended, but for the last ones."""
        for request_id in request_ids:
            if (chain := self._chains.pop(request_id, None)) is not None:
                self._past[request_id] = chain
        while len(self._past) > _MOST_PAST:
            self._past.popitem(last=False)

    def describe(self, entry: int, chain: TokenChain, position: int) -> str:
        """Return the owner of an entry, found instead of the expected position."""
        if entry == NEVER_WRITTEN:
            return "none: they were never written"
        if (owner := self._rejected.get(entry)) is not None:
            return f"those of a rejected draft of request {owner!r}"
        for other in self._others(chain):
            if position < chain.length and chain.entries(seed=other.seed)[position] == entry:
                return f"those of the same tokens with {_difference(chain, other)}"
        for other in self._others(chain):
            at = np.flatnonzero(other.entries() == entry)
            if len(at):
                ended = "" if self._chains.get(other.request_id) is other else ", which has ended"
                return f"those of request {other.request_id!r}{ended}, at position {at[0]}"
        return "those of another token, or of other tokens before it"

    def _others(self, chain: TokenChain) -> Iterator[TokenChain]:
        yield chain
        yield from (x for x in (*self._chains.values(), *self._past.values()) if x is not chain)


def _difference(chain: TokenChain, other: TokenChain) -> str:
    if other.adapter == chain.adapter:
        return "another cache salt or adapter"
    return f"adapter {other.adapter!r}" if other.adapter else "no adapter"


def entries_of(sums: UInts, start: int) -> Ints:
    """Return the entries of positions from `start` on, by their sums; never 0."""
    positions = np.arange(start, start + len(sums), dtype=np.uint64)
    return np.maximum(_mixed(sums ^ _mixed(positions)), np.uint64(1)).view(np.int64)


def _mixed(values: UInts) -> UInts:
    """Return a hash of each value: the finaliser of splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
