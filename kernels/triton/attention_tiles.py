"""Tiles of paged attention: the sizes that its kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .launch import is_interpreted, power_of_2

__all__ = [
    "LEAST_SPLIT",
    "LISTED",
    "MAX_HEAD_SIZES",
    "MOST_SPLITS",
    "AttentionSizes",
    "AttentionTiles",
]

MAX_HEAD_SIZES = {2: 512, 4: 256}
"""Elements of a head, at most, by the bytes of one: tiles of more need too many registers."""

LEAST_SPLIT = 256  # keys of a split at least
_SPLIT_PROGRAMS = 256  # a sequence's, at most: splits * kv_heads
MOST_SPLITS = (16, 128)  # of a sequence, least and most that are allowed by this
LISTED = 128  # sequences at a time, of which a program finds a split: one for each thread


@dataclass(frozen=True)
class AttentionTiles:
    """Launch parameters.

    Attributes:
        rows: query heads times queries of a tile.
        keys: number of keys of a tile.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By bytes of an element and the size of a head, at most. Wider ones take more registers and memory.
_CHUNK_TILES = {
    (2, 128): AttentionTiles(128, 64, 8, 2),
    (2, 256): AttentionTiles(64, 32, 8, 2),
    (2, 512): AttentionTiles(32, 16, 8, 3),
    (4, 64): AttentionTiles(32, 32, 4, 2),
    (4, 256): AttentionTiles(16, 16, 4, 2),
}
_SINGLE_TILES = {
    (2, 128): AttentionTiles(16, 64, 4, 3),
    (2, 256): AttentionTiles(16, 32, 4, 2),
    (2, 512): AttentionTiles(16, 16, 4, 2),
    (4, 64): AttentionTiles(16, 32, 4, 3),
    (4, 256): AttentionTiles(16, 16, 4, 3),
}
# Of codes, which take registers when they are decoded.
_CODED_CHUNK_TILES = {
    (2, 128): AttentionTiles(128, 32, 8, 2),
    (2, 256): AttentionTiles(64, 16, 8, 2),
    (2, 512): AttentionTiles(16, 16, 4, 2),
    (4, 256): AttentionTiles(16, 16, 4, 1),
}
_CODED_SINGLE_TILES = {
    (2, 256): AttentionTiles(16, 32, 4, 2),
    (2, 512): AttentionTiles(16, 16, 4, 2),
    (4, 128): AttentionTiles(8, 16, 4, 1),
    (4, 256): AttentionTiles(16, 16, 4, 1),
}


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes that kernels are compiled for.

    Attributes:
        heads: query heads.
        kv_heads: key heads.
        head_size: elements of a head.
        block_size: tokens per block.
        itemsize: bytes of an element of a query.
        is_coded: whether keys and values are codes of 8 bits.
    """

    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    itemsize: int
    is_coded: bool = False

    @property
    def shape(self) -> dict[str, int]:
        """Constants of the cache's shape."""
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_SIZE": self.head_size,
            "BLOCK_SIZE": self.block_size,
        }

    @property
    def block_d(self) -> int:
        """Width of a tile; tensor cores want 16 at least."""
        return max(power_of_2(self.head_size), 16)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def _chunk_tiles(self) -> AttentionTiles:
        return self._choose(_CODED_CHUNK_TILES if self.is_coded else _CHUNK_TILES)

    @property
    def _single_tiles(self) -> AttentionTiles:
        return self._choose(_CODED_SINGLE_TILES if self.is_coded else _SINGLE_TILES)

    def _choose(self, table: Mapping[tuple[int, int], AttentionTiles]) -> AttentionTiles:
        return next(
            tiles
            for (itemsize, most), tiles in table.items()
            if itemsize == self.itemsize and self.head_size <= most
        )

    def packs(self, tiles: AttentionTiles) -> int:
        """Return the tiles that all query heads need."""
        return self.kv_heads * -(-self.group // min(self.group, tiles.rows))

    def chunks(self) -> tuple[dict[str, Any], AttentionTiles]:
        """Return the constants of `chunks_kernel`, but for CAPPED and WINDOWED."""
        tiles = self._chunk_tiles
        return self._attention(tiles), tiles

    def singles(self) -> tuple[dict[str, Any], AttentionTiles]:
        """Return the constants of `singles_kernel`, but for CAPPED and WINDOWED."""
        tiles = self._single_tiles
        return self._attention(tiles) | self.splits() | {"LISTED": LISTED}, tiles

    def _attention(self, tiles: AttentionTiles) -> dict[str, Any]:
        return self.shape | {
            "PACK": min(self.group, tiles.rows),
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.keys,
            "BLOCK_D": self.block_d,
            "WIDEN": is_interpreted(),
        }

    def splits(self) -> dict[str, int]:
        """Return where sequences are split; the same whatever else is in a step."""
        least, most = MOST_SPLITS
        packs = self.packs(self._single_tiles)
        allowed = power_of_2(_SPLIT_PROGRAMS // packs) if packs <= _SPLIT_PROGRAMS else 1
        return {"SPLIT_TOKENS": LEAST_SPLIT, "MAX_SPLITS": min(max(allowed, least), most)}

    def combine(self) -> dict[str, Any]:
        """Return the constants of `combine_kernel`, but for WINDOWED."""
        tiles = self._single_tiles
        return self.splits() | {
            "HEADS": self.heads,
            "HEAD_SIZE": self.head_size,
            "BLOCK_N": tiles.keys,
            "BLOCK_D": self.block_d,
            "BLOCK_SPLITS": 16,
        }
