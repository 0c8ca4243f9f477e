"""The handshake messages between an engine process and its frontend.

An engine that its frontend starts has the contents of Hello and HandshakeMetadata from its launch,
and sends EngineCoreReadyResponse alone. The other three are for engines on other hosts.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, msgpack

from hardpoint.system.encoding.codec import Decoder
from hardpoint.system.encoding.errors import MALFORMED, WireError, explain
from hardpoint.system.encoding.tensors import Buffer

PROTOCOL_VERSION = 4
"""Raised with every change of the order, number or meaning of message fields."""

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class EngineAddresses(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """The addresses that an engine connects to: one input and one output per client."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish: str | None = None


# The version is always encoded, and always second: a default that is left out would be decoded as
# the reader's version, and so match any writer.


class Hello(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False, tag="HELLO"):
    """The first message of an engine process to its frontend.

    Attributes:
        local: the engine runs on the host of its frontend.
        headless: no frontend runs on the engine's host.
    """

    protocol: int = PROTOCOL_VERSION
    local: bool
    headless: bool


class HandshakeMetadata(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="INIT"):
    """The answer to a Hello.

    Attributes:
        manifest_hash: hash of the frontend's plugin set; an engine with another one does not start.
        parallel_config: settings that replace the engine's own, by name.
    """

    protocol: int = PROTOCOL_VERSION
    addresses: EngineAddresses
    manifest_hash: str
    parallel_config: dict[str, Any] = {}


class Ready(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False, tag="READY"):
    """The last message of the handshake: the engine is initialised.

    Attributes:
        local: the engine runs on the host of its frontend.
        headless: no frontend runs on the engine's host.
        num_gpu_blocks: 0 if there is no KV cache.
        dp_stats_address: address of the coordinator's statistics; None without data parallel.
        parallel_config_hash: must be the same in all data-parallel ranks; None without them.
    """

    protocol: int = PROTOCOL_VERSION
    local: bool
    headless: bool
    num_gpu_blocks: Count = 0
    dp_stats_address: str | None = None
    parallel_config_hash: str | None = None


class EngineCoreReadyResponse(
    msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False, tag="SERVING"
):
    """The first message of an engine on each input socket.

    Attributes:
        manifest_hash: hash of the plugin set that it loaded; its clients have the same one.
        max_model_len: may be smaller than what was configured.
        num_gpu_blocks: 0 if there is no KV cache.
        dp_stats_address: address of the coordinator's statistics; None without data parallel.
    """

    protocol: int = PROTOCOL_VERSION
    manifest_hash: str
    max_model_len: Positive
    num_gpu_blocks: Count = 0
    dp_stats_address: str | None = None


class _Opening(msgspec.Struct, array_like=True):
    """The first fields of the handshake messages of all versions."""

    status: str
    protocol: int


T = TypeVar("T", Hello, HandshakeMetadata, Ready, EngineCoreReadyResponse)


def decode_handshake(frame: Buffer, *types: type[T]) -> T:
    """Return a message of the handshake that is of one of the types.

    Raises:
        WireError: it is malformed, of another type, or of another version of the protocol.
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
    message: T = Decoder(reduce(or_, types)).decode(frame)
    return message


_read_opening = msgpack.Decoder(_Opening).decode
