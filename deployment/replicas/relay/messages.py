"""The messages of a relayed client besides requests, outputs and control calls."""

from __future__ import annotations

from typing import Any

import msgspec

OWNER = "owner:"
"""The part that calls to the owner of the engines name; no step part can have this name."""

CALL, NOTICES = "call", "notices"
"""Methods of the owner that the relay itself answers: a control call to one rank, and a call that
is answered once there are notices.
"""


SEPARATOR = "\x1f"
"""Between the token of a frontend and the id of its request, where ids are those of engines."""


def own_id(request_id: str) -> str:
    """Return the id of a request that its own frontend gave it."""
    return request_id.rpartition(SEPARATOR)[2]


class EnginesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The engines as a client shows them without a call.

    Attributes:
        ranks, pids, is_serving, num_restarts: as those of `EngineCoreClient`.
    """

    ranks: tuple[int, ...]
    pids: dict[int, int]
    is_serving: bool
    num_restarts: int


class Notice(msgspec.Struct, frozen=True):
    """A message of the owner of the engines to all frontends.

    Attributes:
        topic: names what has changed.
        value: plain data.
    """

    topic: str
    value: Any = None
