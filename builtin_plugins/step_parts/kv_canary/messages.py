"""Message of the KV canary, as msgpack."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The first wrong entry of a request.

    Attributes:
        text: where it is, and what was found there.
        block_id: its block.
    """

    text: str
    block_id: int
