"""The chain of a request: a number for each position, of all that its keys and values depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.block_hash import adapter_key

UInts = np.ndarray[Any, np.dtype[np.uint64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

NEVER_WRITTEN = 0


class TokenChain:
    """Sums of hashes of a request's tokens, from the first to that at each position.

    The entry of a position is a hash of its sum, so that it differs where any token before it, its
    position, the cache salt or the adapter does.

    Attributes:
        request_id: the request.
        length: known tokens.
        block_ids: its block table as planned, one per group.
        adapter: name of its adapter; empty if it has none.
    """

    def __init__(self, source: EngineCoreRequest, max_model_len: int, num_groups: int) -> None:
        """Begin without tokens; there is room for `max_model_len`."""
        self.request_id, self.length = source.request_id, 0
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.adapter = "" if source.lora is None else source.lora.name
        key = source.cache_salt, source.lora and adapter_key(source.lora)
        self.seed = np.array([_hash_of(repr(key))], dtype=np.uint64)
        self._sums = np.empty(max_model_len, dtype=np.uint64)
        self._content = np.zeros(0, dtype=np.uint64)
        if source.features:
            end = max(feature.offset + feature.length for feature in source.features)
            self._content = np.zeros(end, dtype=np.uint64)
            for feature in source.features:
                own = np.arange(feature.length, dtype=np.uint64) + np.uint64(1)
                at = slice(feature.offset, feature.offset + feature.length)
                self._content[at] = _mixed(own ^ np.uint64(_hash_of(feature.identifier)))

    def append(self, tokens: Sequence[int]) -> None:
        """Add known tokens, as many as there is room for."""
        room = len(self._sums) - self.length
        sums = self.sums_of(np.asarray(tokens[:room], dtype=np.int64), self.length)
        self._sums[self.length : self.length + len(sums)] = sums
        self.length += len(sums)

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
