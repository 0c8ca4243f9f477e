"""The part of a plan that the scheduler half of a KV connector sends to its worker halves."""

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
