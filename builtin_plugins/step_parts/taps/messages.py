"""Messages between the halves of activation taps, as msgpack."""

from __future__ import annotations

import msgspec


class TapValues(msgspec.Struct, array_like=True):
    """Numbers that a tap has read of a request at a site, in one step.

    Attributes:
        key: "NAME/LAYER/PLACE".
        dtype: dtype of numpy, little-endian.
        shape: [tokens, ...].
        data: content.
    """

    key: str
    dtype: str
    shape: list[int]
    data: bytes


class TapReport(msgspec.Struct, array_like=True):
    """Results of taps in one step.

    Attributes:
        values: by request.
        failed: why a request ends with an error: the message, and the name of the tap; "" if no
            tap is to blame.
    """

    values: dict[str, list[TapValues]] = {}
    failed: dict[str, tuple[str, str]] = {}
