"""Messages between the engine half of KV transfer and its worker halves, as msgpack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hardpoint.plugins import KVTierStats
from hardpoint.plugins.kv_cache import KVEvent


class StepData(msgspec.Struct, frozen=True, array_like=True):
    """The data of a step for the worker halves.

    Attributes:
        metadata: metadata of the connector's scheduler half, as msgpack; None is nothing.
        cancelled: requests with loads that took too long.
    """

    metadata: bytes | None = None
    cancelled: list[str] = []


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """The transfers and faults of one rank since the last step.

    Attributes:
        loaded, saved: ids of requests with ended transfers, see `FinishedTransfers`.
        invalid_block_ids: blocks that could not be loaded.
        failure: why loads that are under way cannot be trusted; None if they can.
        left_out: whether the rank's half is not called any more, since it cannot be trusted.
        message: for the scheduler half, as msgpack.
        faults: (component, message) of each fault since the last report.
        tiers: totals by tier.
        events: to publish.
    """

    loaded: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    failure: str | None = None
    left_out: bool = False
    message: bytes | None = None
    faults: Sequence[tuple[str, str]] = ()
    tiers: Mapping[str, KVTierStats] | None = None
    events: Sequence[KVEvent] = ()
