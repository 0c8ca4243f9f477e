"""The handshake between an engine process and its frontend.

An engine gets its launch in another way, and sends EngineCoreReadyResponse alone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, msgpack

from hardpoint.host.system.encoding.codec import Decoder
from hardpoint.host.system.encoding.errors import MALFORMED, WireError, explain
from hardpoint.host.system.encoding.tensors import Buffer

PROTOCOL_VERSION = 5
"""Raised with every change of the order, number or meaning of message fields."""

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class EngineAddresses(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """The addresses that an engine connects to: one input and one output per client."""

    inputs: list[str]
    outputs: list[str]


# The version is always encoded, and always second: a default that is left out would be decoded as
# the reader's version, and so match any writer.


class EngineCoreReadyResponse(
    msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False, tag="SERVING"
):
    """The first message of an engine on each input socket.

    Attributes:
        manifest_hash: hash of the plugin set that it loaded; its clients have the same one.
        max_model_len: may be smaller than what was configured.
        num_gpu_blocks: 0 if there is no KV cache.
    """

    protocol: int = PROTOCOL_VERSION
    manifest_hash: str
    max_model_len: Positive
    num_gpu_blocks: Count = 0


class _Opening(msgspec.Struct, array_like=True):
    """The first fields of the handshake messages of all versions."""

    status: str
    protocol: int


def decode_handshake(frame: Buffer) -> EngineCoreReadyResponse:
    """Return the ready response in a frame.

    Raises:
        WireError: it is malformed, or of another version of the protocol.
    """
    try:
        opening = _read_opening(frame)
    except MALFORMED as cause:
        raise WireError(explain(cause, _Opening, "handshake")) from None
    if opening.protocol != PROTOCOL_VERSION:
        raise WireError(
            f"protocol version: expected {PROTOCOL_VERSION}, got {opening.protocol}; "
            "frontend and engine need the same version of Hardpoint"
        )
    return Decoder(EngineCoreReadyResponse).decode(frame)


_read_opening = msgpack.Decoder(_Opening).decode
