"""Messages between the halves of the part, as msgpack."""

from __future__ import annotations

import msgspec


class SampledPosition(msgspec.Struct, frozen=True, array_like=True):
    """A traced position.

    Attributes:
        position: output position.
        record: a `TokenTrace` as JSON, without its step.
    """

    position: int
    record: bytes


Report = dict[str, list[SampledPosition]]
"""By request id."""

Asked = dict[str, int]
"""Candidates that the requests of a step ask for, by request id, if they give a number."""
