"""The jobs of a step, from the scheduler half for the worker halves."""

from __future__ import annotations

import msgspec


class Move(msgspec.Struct):
    """Blocks of a request to load or to save.

    Attributes:
        hashes: hashes of the blocks.
        block_ids: where they are in the KV cache.
    """

    request_id: str
    hashes: list[bytes]
    block_ids: list[int]


class Jobs(msgspec.Struct):
    """The jobs of a step."""

    loads: list[Move]
    saves: list[Move]
