"""The messages between an engine process and its clients, other than requests and their outputs.

Structs travel as arrays, so the order of their fields is part of the protocol: change one, and
raise PROTOCOL_VERSION. An engine gets its launch in another way: its part of the handshake is
EngineCoreReadyResponse alone.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Annotated, Any

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

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The last message of an engine that failed, raw, on every output socket."""

ENGINE_CORE_EXITED = b"ENGINE_CORE_EXITED"
"""The last message of an engine that ends in order, raw, on every output socket."""

END_MARKERS = (ENGINE_CORE_DEAD, ENGINE_CORE_EXITED)

SHUTDOWN_REASON = "the engine is shutting down"
"""The error of requests and calls that come to an engine that ends in order."""


class RequestType(bytes, Enum):
    """The first frame of a message to an engine; may be sent as it is."""

    ADD = b"\x00"
    """One request."""
    ABORT = b"\x01"
    UTILITY = b"\x03"
    ADD_ALL = b"\x06"
    """The requests of one call, a list: all are added, or none."""

    @classmethod
    def from_wire(cls, frame: Buffer) -> RequestType:
        """Return the type that a frame encodes.

        Raises:
            WireError: it is unknown.
        """
        request_type = _FROM_WIRE.get(bytes(frame[:2]))
        if request_type is None:
            known = ", ".join(f"{kind.hex()} ({kind.name})" for kind in _FROM_WIRE.values())
            raise WireError(f"request type: expected one of {known}, got {_hex(frame)}")
        return request_type


_FROM_WIRE = {bytes(kind): kind for kind in RequestType}


class ShutdownState(IntEnum):
    """The states of an engine's shutdown."""

    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """A call of one of the engine's methods.

    Attributes:
        client_index: where the answer goes; the engine sets it to the client of the connection.
        call_id: chosen by the client; the answer repeats it.
        args: positional, as plain data; the engine converts them to what the method declares.
    """

    client_index: int
    call_id: int
    method: str
    args: list[Any] = []


class UtilityResult(msgspec.Struct, array_like=True, frozen=True):
    """The return value of a call; may be None.

    Attributes:
        value: plain data; the client converts it to what the method declares.
    """

    value: Any


class UtilityOutput(msgspec.Struct, frozen=True, tag=True):
    """The answer to a call: either an error message, or a result.

    Attributes:
        kind: with a failure, the name of the error's class in Hardpoint's tree.

    Raises:
        WireError: on construction, with both or neither.
    """

    call_id: int
    failure: str | None = None
    result: UtilityResult | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if (self.failure is None) == (self.result is None):
            count = "neither" if self.failure is None else "both"
            raise WireError(f"a utility output has either a failure or a result, got {count}")

    @classmethod
    def succeeded(cls, call_id: int, value: Any) -> UtilityOutput:
        """Return the answer to a call that returned."""
        return cls(call_id, result=UtilityResult(value))

    @classmethod
    def failed(cls, call_id: int, message: str, kind: str | None = None) -> UtilityOutput:
        """Return the answer to a call that failed."""
        return cls(call_id, failure=message, kind=kind)


def _hex(frame: Buffer) -> str:
    data = bytes(frame[:8])
    return (data.hex() or "nothing") + ("..." if len(frame) > len(data) else "")
