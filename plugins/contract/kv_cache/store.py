"""KV stores: keep blocks of the KV cache in host memory, on disk or on other machines.

A store keeps bytes under keys, and knows nothing of requests, layers or models. The connector
"stores" does all the rest for the stores that `kv_connector.stores` names: it copies blocks to and
from the KV cache, makes keys, writes a header with a checksum before each block and checks it after
each load, calls stores in threads of its own with time limits, and leaves out for a while a store
that keeps failing. So whatever a store does, no request gets a token that it would not have got
without it.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import overload

from hardpoint.plugins.component.base import Component, Context

__all__ = ["BlockBuffer", "KVStore", "KVStoreContext", "PeerKVStore"]


class BlockBuffer(Sequence[memoryview]):
    """Host memory for a block: the parts are a header, then one memoryview per layer.

    Attributes:
        whole: all parts, one after the other; contiguous.
    """

    __slots__ = ("_parts", "whole")

    def __init__(self, whole: memoryview, sizes: Sequence[int]) -> None:
        """Divide memory into parts.

        Args:
            whole: as long as all parts.
            sizes: bytes of each part.

        Raises:
            ValueError: they are longer, or shorter.
        """
        if sum(sizes) != len(whole):
            raise ValueError(f"sizes: expected {len(whole)} bytes in all, got {sum(sizes)}")
        ends = list(itertools.accumulate(sizes))
        self.whole = whole
        self._parts = tuple(whole[end - size : end] for size, end in zip(sizes, ends, strict=True))

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        """Return a part, or several."""
        return self._parts[index]

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self._parts)

    def read_only(self) -> BlockBuffer:
        """Return a read-only view of the same memory."""
        return BlockBuffer(self.whole.toreadonly(), [len(part) for part in self._parts])


@dataclass(frozen=True, kw_only=True)
class KVStoreContext(Context["KVStore"]):
    """Context of a KV store.

    Attributes:
        sizes: bytes of each memoryview of a buffer: the header, then one per layer. All buffers of
            an engine's rank have these sizes.
        identity: hexadecimal digest of the inputs that all blocks of this rank share, the weights
            and the layout of the KV cache among others. Keys are made from it already.
        rank: rank of the worker in the engine; each has stores of its own.
        world_size: number of ranks.
        engine_id: `kv_connector.engine_id`.
        timeout_seconds: time after which the connector gives up a call.
        pin_memory: whether host memory should be pinned, since blocks are copied from a GPU.
        report_evicted: called with the keys of blocks that the store does not keep any more, for KV
            events. For any thread.
        host_memory: bytes of host memory that this process may still allocate; None is unknown.
        report_fault: called with a message when something failed that no caller gets to know, a
            write in the background for example; it is counted in `LLM.plugins.health()`.
    """

    sizes: Sequence[int]
    identity: str
    rank: int = 0
    world_size: int = 1
    engine_id: str = ""
    timeout_seconds: float = 10.0
    pin_memory: bool = False
    report_evicted: Callable[[Sequence[bytes]], None] = lambda _keys: None
    host_memory: int | None = None
    report_fault: Callable[[str], None] = lambda _message: None

    @property
    def block_bytes(self) -> int:
        """Bytes of a buffer, header included."""
        return sum(self.sizes)


class KVStore(Component):
    """Keeps blocks by key.

    Its methods are called by several threads at once, of one worker, and may block. An exception
    counts as a fault of the store, and as a miss. Stored blocks may be gone at any time; results
    are checked. Engines and ranks that share a place share blocks: equal keys mean equal
    content.
    """

    context: KVStoreContext

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether `load` would find it, without reading the blocks.

        Args:
            keys: 32 bytes each, of a request's blocks in order: results after the first missing one
                are of no use, and may be answered with False. So a store that
                runs out of room does best to drop the last of them first. Each request asks before
                it is computed, and once more when it has ended.
        """

    @abstractmethod
    def store(self, key: bytes, buffer: BlockBuffer) -> bool | Future[bool]:
        """Keep a block.

        Args:
            key: if it is there already, the block replaces the old one, which may be damaged.
            buffer: the block's bytes, in parts of `context.sizes`; read-only, and valid until this
                returns, or until the future that it returns is done.

        Returns:
            Whether the block is kept; False if there is no room, for example.
        """

    @abstractmethod
    def load(self, key: bytes, buffer: BlockBuffer) -> bool | Future[bool]:
        """Write a block into a buffer.

        Args:
            key: key of the block.
            buffer: as for `store`; writable.

        Returns:
            Whether the block was there. If not, the buffer may hold anything.
        """

    @property
    def used_bytes(self) -> int | None:
        """Bytes of the blocks that are kept, for statistics; None if that is not known.

        Read after a block was stored.
        """
        return None

    def drain(self) -> None:
        """Return once all that `store` has accepted is as durable as the store makes it."""


class PeerKVStore(KVStore):
    """A store that also hands single blocks to other engines, for split prefill and decode.

    The engine that computed a prompt offers its blocks under secret keys, and the engine that
    continues the request fetches them.
    """

    @property
    @abstractmethod
    def peers(self) -> frozenset[str]:
        """Ids of the engines that `fetch` can reach, as the configuration names them."""

    @abstractmethod
    def offer(self, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """Keep a block for one `fetch` of another engine.

        Args:
            key: key that no one can guess.
            buffer: as for `store`.
            seconds: after which the block is dropped, and no `fetch` gets it.

        Returns:
            Whether there was room.
        """

    @abstractmethod
    def fetch(self, peer: str, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """Write a block that another engine offers into a buffer; it can be fetched once.

        Args:
            peer: one of `peers`.
            key: under which it was offered.
            buffer: as for `load`.
            seconds: to wait for the peer's answer; a peer that has no such block yet, but may get
                it, answers when it has.

        Returns:
            Whether the block was there in time.
        """

    @abstractmethod
    def renew(self, keys: Sequence[bytes], peer: str | None = None) -> None:
        """Extend the leases of offered blocks; unknown keys are ignored.

        Args:
            keys: under which they are offered.
            peer: the engine that offers them; None is this one.
        """
