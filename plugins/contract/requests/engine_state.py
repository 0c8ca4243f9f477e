"""Reports of an engine to its clients, in addition to the outputs of their requests."""

from __future__ import annotations

import msgspec

BLOCK_KEY_BYTES = 8
"""Length of the name of a block in `KVCacheChanges`: it steers requests, and finds no content."""


class EngineLoad(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """Load of an engine by the requests of all its clients.

    Attributes:
        num_running: requests that run.
        num_waiting: requests that do not run, for any reason.
        kv_cache_usage: share of the blocks that requests reference, from 0 to 1.
        num_steps: steps that computed any token, since the engine's start.
        adapters: names of the loaded adapters.
        last_request: id of the last request that the engine had read of the client that gets this;
            later requests are not counted. None before the first.
        is_leaving: whether it takes no more requests, because its process was asked to end.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_steps: int = 0
    adapters: list[str] = []
    last_request: str | None = None
    is_leaving: bool = False


class KVCacheChanges(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """Changes of the blocks that can be found in the first group of an engine's KV cache.

    Changes of several steps may be in one message, which has the last change of each block. A block
    is named by the first `BLOCK_KEY_BYTES` of its hash, which covers all inputs of its content.

    The steps with changes are numbered from 0. Where `first` is not the number after the `last` one
    of the message before, changes are missing: the engine drops changes that a client leaves unread
    once they are too many. The state of the engine may then be wrong, until `cleared`, or
    until the control call `cached_blocks` has returned all blocks.

    Attributes:
        first: number of the first step.
        last: number of the last step; less than `first` if there is none, all were dropped.
        cleared: whether all blocks were dropped; blocks in `stored` came later.
        stored: blocks that can be found now.
        removed: blocks that cannot be found any more.
    """

    first: int
    last: int
    cleared: bool = False
    stored: set[bytes] = set()
    removed: set[bytes] = set()
