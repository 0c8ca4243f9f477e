"""Blocks in the memory of other engines."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

import zmq
from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import ConfigError
from hardpoint.plugins.kv_store import BlockBuffer, PeerKVStore

from .p2p_addresses import (
    PeerKeys,
    SocketPlace,
    address_of_rank,
    has_socket,
    is_ipv6,
    is_tcp,
    public_key,
    read_key_pair,
)
from .p2p_client import PeerClient, ask
from .p2p_messages import (
    KEYS_PER_MESSAGE,
    MOST_QUESTION_BYTES,
    Get,
    Has,
    Question,
    Renew,
    Take,
)
from .p2p_pool import PeerBlocks
from .p2p_server import BlockServer

Socket = zmq.Socket[bytes]

_MOST_REMEMBERED = 1 << 16  # keys with a known owner
_ANSWERS_PER_CLIENT = 64  # that wait to be sent; a client that does not read loses others
_MOST_ANSWER_BYTES = 4096  # of one without a block
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 3000
_CLOSE_S = 2.0

_T = TypeVar("_T")
_Id = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class PeerToPeerStore(PeerKVStore):
    """Shares blocks in memory with other engines."""

    contract = 1

    class Options(plugins.Options):
        """Addresses, keys, size and time limits.

        Attributes:
            listen: address of this engine, ipc:///PATH or tcp://HOST:PORT. "{rank}" is replaced by
                the rank, and "{engine_id}" by `kv_connector.engine_id`, which replicas need
                (`parallel.data`).
            peers: addresses of other engines by `kv_connector.engine_id`, with the same
                placeholders. The entry of this engine is ignored, so all can have the same table.
            public_keys: public keys of other engines by id, required for TCP; only these engines
                may connect.
            secret_key_file: file with the secret key of this engine, required for TCP; owned by
                the user or root, with mode 0600 or 0640.
            size_bytes: maximum size of all blocks in each rank.
            lookup_seconds: time limit of a lookup at all peers.
            connect_seconds: time limit of a connection to a peer.
            wait_seconds: time limit for a block that a peer has offered but not stored yet.
            retry_seconds: pause before a silent peer is asked again.
        """

        listen: str
        peers: dict[_Id, str] = {}
        public_keys: dict[_Id, str] = {}
        secret_key_file: str | None = None
        size_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
        lookup_seconds: _Seconds = 0.5
        connect_seconds: _Seconds = 1.0
        wait_seconds: _Seconds = 2.0
        retry_seconds: _Seconds = 5.0

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Listen; connect to peers later.

        Raises:
            ConfigError: an option is wrong, there is not so much memory, the address is in use, or
                others could read the keys.
        """
        super().__init__(context)
        options, table = self.options, f"plugin.{self.name}"
        rank_of = functools.partial(
            address_of_rank, rank=context.rank, world_size=context.world_size
        )
        listen = rank_of(options.listen, f"{table}.listen", engine_id=context.engine_id)
        addresses = {
            name: rank_of(address, f"{table}.peers.{name}", engine_id=name)
            for name, address in options.peers.items()
            if name != context.engine_id
        }
        if addresses and not context.engine_id:
            raise ConfigError(
                f"kv_connector.engine_id: expected the name of this engine, for {table}.peers "
                f"names others"
            )
        keys = {
            name: public_key(text, f"{table}.public_keys.{name}")
            for name, text in options.public_keys.items()
        }
        pair = self._key_pair([listen, *addresses.values()])
        for name, address in addresses.items():
            if is_tcp(address) and name not in keys:
                raise ConfigError(f"{table}.public_keys: expected one of {name!r}, at {address}")
        if is_tcp(listen) and not keys:
            raise ConfigError(
                f"{table}.public_keys: expected the keys of peers that may connect to {listen}"
            )
        self._pool = PeerBlocks(self._capacity(), context.report_evicted)
        self._where: OrderedDict[bytes, PeerClient] = OrderedDict()
        self._lock = threading.Lock()
        self._place = None if is_tcp(listen) else SocketPlace(listen, f"{table}.listen")
        self._zmq: zmq.Context[Socket] = zmq.Context()
        try:
            self._server = self._listen(listen, pair, frozenset(keys.values()))
        except BaseException:
            self._release()
            raise
        self._clients = {
            name: PeerClient(
                name,
                functools.partial(self._connect, address, pair, keys.get(name)),
                options.retry_seconds,
                context.report_fault,
            )
            for name, address in addresses.items()
        }

    def _capacity(self) -> int:
        path, size = f"plugin.{self.name}.size_bytes", self.options.size_bytes
        block, available = self.context.block_bytes, self.context.host_memory
        if size < block:
            raise ConfigError(f"{path}: expected at least {block}, the size of a block, got {size}")
        if available is not None and size > available:
            raise ConfigError(
                f"{path}: {size} bytes are more host memory than a rank's process may still "
                f"allocate, {available} bytes; make it smaller, or the KV cache"
            )
        return size // block

    def _key_pair(self, addresses: Sequence[str]) -> PeerKeys | None:
        path, file = f"plugin.{self.name}.secret_key_file", self.options.secret_key_file
        if file is not None:
            return read_key_pair(file, path)
        if address := next(filter(is_tcp, addresses), None):
            raise ConfigError(
                f"{path}: expected a file, got none. {address} has no other protection; use "
                "ipc:///PATH to listen without keys"
            )
        return None

    def _listen(
        self, address: str, pair: PeerKeys | None, allowed: frozenset[bytes]
    ) -> BlockServer:
        path = f"plugin.{self.name}.listen"
        listening, keys = self._zmq.socket(zmq.ROUTER), None
        listening.router_mandatory = True  # raises for clients that are gone or do not read
        listening.maxmsgsize = MOST_QUESTION_BYTES
        listening.sndhwm = listening.rcvhwm = _ANSWERS_PER_CLIENT
        listening.heartbeat_ivl = _HEARTBEAT_MS
        listening.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        listening.ipv6 = is_ipv6(address)
        if is_tcp(address):
            assert pair is not None
            keys = self._zmq.socket(zmq.REP)
            keys.bind("inproc://zeromq.zap.01")
            listening.curve_server = True
            listening.curve_secretkey, listening.curve_publickey = pair.secret, pair.public
            listening.zap_domain = b"hardpoint"
        try:
            listening.bind(address)
            if not is_tcp(address):
                os.chmod(address.removeprefix("ipc://"), 0o600)
        except (zmq.ZMQError, OSError) as cause:
            raise ConfigError(f"{path}: cannot listen at {address!r}: {cause.strerror}") from cause
        return BlockServer(
            listening,
            keys,
            allowed,
            self._pool,
            self.context.identity,
            self.context.report_fault,
        )

    def _connect(
        self, address: str, pair: PeerKeys | None, key: bytes | None, *, queues: bool = False
    ) -> Socket | None:
        """Return a socket that is connected to a peer in the background; see `Connect`."""
        if not is_tcp(address) and not has_socket(address):
            return None
        connecting = self._zmq.socket(zmq.DEALER)
        connecting.immediate = not queues
        connecting.linger = 0
        connecting.maxmsgsize = self.context.block_bytes + _MOST_ANSWER_BYTES
        connecting.sndhwm = connecting.rcvhwm = _ANSWERS_PER_CLIENT
        connecting.reconnect_ivl, connecting.reconnect_ivl_max = 50, 1000
        connecting.heartbeat_ivl = _HEARTBEAT_MS
        connecting.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        connecting.ipv6 = is_ipv6(address)
        if is_tcp(address):
            assert pair is not None
            assert key is not None
            connecting.curve_serverkey = key
            connecting.curve_secretkey, connecting.curve_publickey = pair.secret, pair.public
        try:
            connecting.connect(address)
        except zmq.ZMQError:
            connecting.close()
            raise
        return connecting

    # For anybody

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are here or at a peer; all peers are asked at the same time."""
        results = [key in self._pool for key in keys]
        missing = [index for index, is_there in enumerate(results) if not is_there]
        for some in _batches(missing):
            where = self._look_up([keys[index] for index in some])
            for index, client in zip(some, where, strict=True):
                results[index] = client is not None
        return results

    def _look_up(self, keys: Sequence[bytes]) -> list[PeerClient | None]:
        clients, question = list(self._clients.values()), Has(list(keys))
        answers = ask(
            [(client, question) for client in clients],
            self.options.lookup_seconds,
            connect_seconds=self.options.connect_seconds,
        )
        where: list[PeerClient | None] = [None] * len(keys)
        for client, payload in reversed(list(zip(clients, answers, strict=True))):
            flags = b"" if payload is None else payload.bytes
            if len(flags) == len(keys):
                where = [client if flag else old for flag, old in zip(flags, where, strict=True)]
        with self._lock:
            for key, peer in zip(keys, where, strict=True):
                if peer is not None:
                    self._where[key] = peer
                    self._where.move_to_end(key)
            while len(self._where) > _MOST_REMEMBERED:
                self._where.popitem(last=False)
        return where

    def store(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Keep a block for this engine and others."""
        return self._pool.keep(key, buffer)

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Copy a block from here or from a peer."""
        if (block := self._pool.get(key)) is not None:
            return _copy(memoryview(block), buffer)
        with self._lock:
            client = self._where.get(key)
        if client is None:
            (client,) = self._look_up([key])
        if client is not None:
            payload = self._ask(client, Get(key), self.context.timeout_seconds)
            if payload is not None:
                return _copy(payload.buffer, buffer)
            with self._lock:
                self._where.pop(key, None)
        return False

    def _ask(
        self,
        client: PeerClient,
        question: Question,
        seconds: float,
        *,
        even_if_silent: bool = False,
    ) -> zmq.Frame | None:
        (payload,) = ask(
            [(client, question)],
            seconds,
            connect_seconds=self.options.connect_seconds,
            even_if_silent=even_if_silent,
        )
        return payload

    # For one

    @property
    def peers(self) -> frozenset[str]:
        """Ids of the other engines."""
        return frozenset(self._clients)

    def offer(self, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """Keep a block for the engine that takes it."""
        has_room = self._pool.offer(key, buffer, seconds)
        self._server.offered()
        return has_room

    def fetch(self, peer: str, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """Copy a block that another engine offers; wait for it, but not long."""
        began = time.monotonic()
        wait = min(seconds, self.options.wait_seconds)
        question = Take(key, wait, self.context.identity)
        payload = self._ask(self._clients[peer], question, seconds, even_if_silent=True)
        if payload is None or time.monotonic() - began > seconds:
            return False
        return _copy(payload.buffer, buffer)

    def renew(self, keys: Sequence[bytes], peer: str | None = None) -> None:
        """Let the leases of blocks that are offered begin again."""
        if peer is None:
            self._pool.renew(keys)
            return
        for some in _batches(keys):
            self._clients[peer].notify(Renew(list(some)))

    def close(self) -> None:
        """Drop the blocks and close the sockets."""
        for client in self._clients.values():
            client.close(_CLOSE_S)
        self._server.close()
        self._release()
        self._pool.clear()

    def _release(self) -> None:
        self._zmq.destroy(linger=0)
        if self._place is not None:
            self._place.release()


def _batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield items in batches, each as large as a message may be."""
    for start in range(0, len(items), KEYS_PER_MESSAGE):
        yield items[start : start + KEYS_PER_MESSAGE]


def _copy(block: memoryview, buffer: BlockBuffer) -> bool:
    if len(block) != len(buffer.whole):
        return False
    buffer.whole[:] = block
    return True
