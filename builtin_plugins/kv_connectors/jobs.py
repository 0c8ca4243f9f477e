"""Messages between the two halves of the connector "stores"."""

from __future__ import annotations

import msgspec


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """How many leading blocks of these are stored?

    Attributes:
        serial: serial number of the answer.
        hashes: hashes of consecutive blocks.
    """

    serial: int
    hashes: list[bytes]


class TransferSource(msgspec.Struct, frozen=True, array_like=True):
    """Where blocks of a request come from, that another engine has computed.

    Attributes:
        peer: id of the engine.
        secret: the secret that it gave.
    """

    peer: str
    secret: bytes


class BlockLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load the blocks of a request.

    Attributes:
        hashes: hashes of consecutive blocks.
        block_ids: where to.
        in_step: whether the step reads them; if not, the request waits for them.
        transfer: the engine that offers them; None loads from the stores.
    """

    request_id: str
    hashes: list[bytes]
    block_ids: list[int]
    in_step: bool = False
    transfer: TransferSource | None = None


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Save blocks that are complete when the step has run.

    Attributes:
        secret: to offer them for one fetch of another engine; None stores them.
    """

    hashes: list[bytes]
    block_ids: list[int]
    secret: bytes | None = None


class Renewal(msgspec.Struct, frozen=True, array_like=True):
    """Keep blocks that are offered for longer.

    Attributes:
        hashes: hashes of the blocks.
        transfer: owner of the blocks; a peer of "" is this engine.
    """

    hashes: list[bytes]
    transfer: TransferSource


class Jobs(msgspec.Struct, array_like=True):
    """The jobs of a step.

    Attributes:
        used: hashes of the first blocks of requests that have just been used; they are looked up
            without an answer, so that stores replace others.
    """

    lookups: list[Lookup] = msgspec.field(default_factory=list)
    loads: list[BlockLoad] = msgspec.field(default_factory=list)
    saves: list[Save] = msgspec.field(default_factory=list)
    renewals: list[Renewal] = msgspec.field(default_factory=list)
    used: list[list[bytes]] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lookups or self.loads or self.saves or self.renewals or self.used)


class WorkerMessage(msgspec.Struct, array_like=True):
    """The answer of a worker.

    Attributes:
        found: number of leading blocks that are stored, by serial of the lookup.
        unsaved: hashes of blocks that were not stored.
        unoffered: secrets and hashes of blocks that were not offered.
    """

    found: dict[int, int] = msgspec.field(default_factory=dict)
    unsaved: list[bytes] = msgspec.field(default_factory=list)
    unoffered: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.found or self.unsaved or self.unoffered)


class Handshake(msgspec.Struct, frozen=True):
    """The message of a worker at its start.

    Attributes:
        peers: engines with fetchable blocks; None if no store can.
    """

    peers: list[str] | None = None
