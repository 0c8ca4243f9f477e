"""Message of the KV canary, as msgpack."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The first wrong entry of a request.

    Attributes:
        text: location and content of the wrong entries.
        block_id: its block.
    """

    text: str
    block_id: int
