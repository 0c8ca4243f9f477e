"""Hashes of the content of full KV blocks."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hardpoint.plugins import EngineCoreRequest, Request
from hardpoint.plugins.kv_cache.block_hash import NO_PARENT, extra_keys, hash_block, with_part_keys

PartKeys = Callable[[EngineCoreRequest, range], bytes]
"""Returns what step parts make a span of tokens depend on; empty if none does."""

_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "sha256": hashlib.sha256,
    "blake2b": lambda: hashlib.blake2b(digest_size=32),
}


_AT_ONCE = 32
"""Blocks whose tokens are packed at once: the reader of a chain may need the first ones alone."""

_BYTES_PER_TOKEN = 4


class BlockHashes:
    """The hashes of each request's full blocks, computed once and extended as it grows.

    The formula is `plugins.block_hash`, which keys of stored blocks share.
    """

    def __init__(
        self, block_size: int, algorithm: str = "sha256", part_keys: PartKeys | None = None
    ) -> None:
        """`algorithm` is "sha256" or "blake2b"; digests have 32 bytes.

        Raises:
            ValueError: an unknown algorithm.
        """
        if algorithm not in _ALGORITHMS:
            known = ", ".join(_ALGORITHMS)
            raise ValueError(f"hash_algorithm: expected one of {known}, got {algorithm!r}")
        self.block_size = block_size
        self._part_keys = part_keys
        self._fresh = _ALGORITHMS[algorithm]()
        self.by_request: dict[Request, list[bytes]] = {}

    def of(self, request: Request, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks of a request.

        Args:
            num_blocks: at most the number of blocks that its known tokens fill.
        """
        hashes = self.by_request.get(request)
        if hashes is None:
            hashes = self.by_request[request] = []
        if len(hashes) < num_blocks:
            self._extend(request, hashes)
        return hashes

    def of_prompt(self, source: EngineCoreRequest) -> list[bytes]:
        """Return the hashes of the full blocks of a prompt. Safe in any thread."""
        hashes: list[bytes] = []
        self._extend(Request(source), hashes)
        return hashes

    def of_prefix(self, source: EngineCoreRequest, num_blocks: int) -> Iterator[bytes]:
        """Yield the hashes of the first blocks of a prompt, each computed when it is asked for.

        Args:
            num_blocks: at most the number of blocks that its prompt fills.
        """
        extras = self._extras(source, 0, num_blocks)
        return self._chain(NO_PARENT, source.prompt_token_ids, range(num_blocks), extras)

    def __len__(self) -> int:
        return len(self.by_request)

    def _extend(self, request: Request, hashes: list[bytes]) -> None:
        size = self.block_size
        first, end = len(hashes), request.num_tokens // size
        extras = self._extras(request.source, first, end)
        parent = hashes[-1] if hashes else NO_PARENT
        tokens = request.token_ids(first * size, end * size)
        hashes += self._chain(parent, tokens, range(first, end), extras)

    def _chain(
        self, parent: bytes, tokens: Sequence[int], blocks: range, extras: Mapping[int, bytes]
    ) -> Iterator[bytes]:
        """Yield the hashes of blocks.

        Args:
            parent: hash of the block before the first.
            blocks: their indices, for `extras`.
            extras: extra keys, by index.
        """
        size, fresh = self.block_size, self._fresh
        bytes_per_block = size * _BYTES_PER_TOKEN
        for start in range(0, len(blocks), _AT_ONCE):
            some = blocks[start : start + _AT_ONCE]
            packed = _packed(tokens[start * size : (start + len(some)) * size])
            for place, index in enumerate(some):
                block = packed[place * bytes_per_block : (place + 1) * bytes_per_block]
                parent = hash_block(parent, block, extras.get(index, b""), fresh)
                yield parent

    def _extras(self, source: EngineCoreRequest, first: int, end: int) -> dict[int, bytes]:
        extras = extra_keys(source, first, end, self.block_size)
        if self._part_keys is not None:
            size = self.block_size
            for index in range(first, end):
                if key := self._part_keys(source, range(index * size, (index + 1) * size)):
                    extras[index] = with_part_keys(extras.get(index, b""), key)
        return extras


def _packed(tokens: Sequence[int]) -> bytes:
    """Return tokens as little-endian uint32."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
