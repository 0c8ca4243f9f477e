"""Decides which engine may join, and under which rank."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from hardpoint.host.system.encoding import WireError
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.toolkit.curve_keys import KeyPair

from .comparison import difference
from .joined_host import JoinedHost
from .messages import (
    LINK_PROTOCOL,
    MOST_HELLO_BYTES,
    MOST_TEXT,
    Hello,
    HelloVersion,
    JoinRefusal,
    decode,
    printable,
)
from .session import EngineSession

_log = logging.getLogger("hardpoint")

_LOG_INTERVAL_S = 10.0
_NOTICED_AFTER_S = 5.0  # besides the time without a heartbeat


class Admission:
    """The ranks that wait for an engine, and the conditions for an engine to take one."""

    def __init__(
        self, head: Hello, parallel: ParallelConfig, *, needs_equal_bits: bool = False
    ) -> None:
        """Begin with no rank.

        Args:
            head: versions and model of the head.
            needs_equal_bits: whether all engines have to be of one kind of processor.
        """
        self._head, self._parallel = head, parallel
        self._needs_equal_bits = needs_equal_bits
        self._processor = head.processor if parallel.num_local else None  # that of all engines
        self._waiting: dict[int, JoinedHost] = {}
        self._ranks = set(range(parallel.num_local, parallel.data))
        self._num_refused, self._last_reason = 0, ""
        self._logged = -math.inf
        self._lock = threading.Lock()  # of the count

    def offer(self, host: JoinedHost) -> None:
        """Let an engine take the place of a rank."""
        self._ranks.add(host.rank)
        self._waiting[host.rank] = host

    def withdraw(self, host: JoinedHost) -> None:
        """Offer it no more."""
        if self._waiting.get(host.rank) is host:
            del self._waiting[host.rank]

    def read(self, frame: bytes) -> tuple[Hello | None, JoinRefusal | None]:
        """Return a hello, and why its sender may not join; neither, if it is no hello."""
        try:
            if len(frame) > MOST_HELLO_BYTES:
                raise WireError(f"a hello of {len(frame)} bytes")
            if (theirs := decode(frame, HelloVersion).protocol) != LINK_PROTOCOL:
                reason = f"join protocol: the head has version {LINK_PROTOCOL}, the engine {theirs}"
                return None, self._refusal(reason)
            hello = decode(frame, Hello)
        except WireError as error:
            self.refused(str(error))
            return None, None
        mismatch = difference(self._head, hello)
        return hello, None if mismatch is None else self._refusal(mismatch)

    def choose(
        self, hello: Hello, sessions: Collection[EngineSession]
    ) -> tuple[JoinedHost | None, JoinRefusal | None]:
        """Return the place of an engine, which is offered no more, or why there is none.

        Args:
            hello: versions and model of the engine.
            sessions: those of the engines that have joined, or are about to.
        """
        rank, head = hello.rank, self._head.host
        taken = {session.host.rank: session.where for session in sessions}
        if rank is not None and rank not in self._ranks:
            joining = ", ".join(map(str, sorted(self._ranks))) or "none"
            reason = f"rank: expected one of {joining}, which join the head {head}, got {rank}"
            return None, self._refusal(reason)
        if rank is not None and rank in taken:
            # The head may not have noticed yet that its owner is gone.
            noticed_s = self._parallel.heartbeat_seconds + _NOTICED_AFTER_S
            return None, self._refusal(f"rank {rank} is taken by {taken[rank]}", noticed_s)
        if rank is None:
            rank = min(self._waiting, default=None)
        if rank is None or rank not in self._waiting:
            places = "; ".join(
                f"{taken_rank} by {where}" for taken_rank, where in sorted(taken.items())
            )
            reason = f"no rank waits for an engine{f'; taken: {places}' if places else ''}"
            return None, JoinRefusal(reason=reason, retry_seconds=math.inf)
        processor = self._processor
        if processor is None:
            processor = next((s.hello.processor for s in sessions), hello.processor)
        if self._needs_equal_bits and hello.processor != processor:
            # An engine that does not serve yet may never do so.
            retry_seconds = math.inf if self._processor is None else 0.0
            reason = (
                f"processor: the engines of the head {head} have {processor!r}, {hello.host} "
                f"has {hello.processor!r}, so a request could not go on there with the same tokens "
                '(engine.resume = "exact"); set that to "any" or "off", or use such a processor'
            )
            return None, self._refusal(reason, retry_seconds)
        return self._waiting.pop(rank), None

    def serves(self, hello: Hello) -> None:
        """Note that an engine has started; the first one decides on the processor of all."""
        if self._processor is None:
            self._processor = hello.processor

    def refused(self, reason: str) -> None:
        """Count an attempt to join that was refused. In any thread."""
        with self._lock:
            self._num_refused += 1
            self._last_reason = printable(reason, MOST_TEXT)

    def log_refused(self, now: float | None = None) -> None:
        """Log the attempts that were refused, once per interval."""
        now = time.monotonic() if now is None else now
        with self._lock:
            if not self._num_refused or now - self._logged < _LOG_INTERVAL_S:
                return
            count, reason, self._num_refused, self._logged = (
                self._num_refused,
                self._last_reason,
                0,
                now,
            )
        _log.warning("refused attempts to join: %d; the last one: %s", count, reason)

    def _refusal(self, reason: str, retry_seconds: float = 0.0) -> JoinRefusal:
        self.refused(reason)
        return JoinRefusal(reason=reason, retry_seconds=retry_seconds)


class Keys(Protocol):
    """The keys of a head, and of the engines that may connect to it."""

    @property
    def pair(self) -> KeyPair:
        """The head's own."""

    def names(self) -> Mapping[bytes, str]:
        """Return the names of the engines that may connect now, by their public keys."""


class Doorkeeper:
    """Lets the owners of keys connect; a key that is added or removed counts at once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys,
        refused: Callable[[str], None],
    ) -> None:
        """`refused`: called with the reason for each connection that is refused."""
        self._keys, self._refused = keys, refused
        self._lock = threading.Lock()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of a key may connect; in the authenticator's thread."""
        del domain
        if key in self.names():
            return True
        self._refused("a key that is not among the keys that may join")
        return False

    def names(self) -> Mapping[bytes, str]:
        """Return the names of the keys that are accepted, by their public keys."""
        with self._lock:
            return self._keys.names()

    def stop(self) -> None:
        """Stop; sockets must be closed before."""
        self._authenticator.stop()


def key_of(frame: zmq.Frame) -> bytes:
    """Return the public key of the sender of a frame, in Z85; empty without one."""
    with contextlib.suppress(zmq.ZMQError):
        return str(frame.get("User-Id")).encode()
    return b""
