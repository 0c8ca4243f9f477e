"""The part of a step's plan for the KV connectors of its workers."""

from __future__ import annotations

import msgspec


class KVStepMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The value of `SchedulerOutput.kv_connector_metadata`, as msgpack.

    Attributes:
        data: data of the scheduler half, as msgpack; None is nothing.
        cancelled: requests whose loads took too long.
    """

    data: bytes | None = None
    cancelled: list[str] = []
