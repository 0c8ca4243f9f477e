"""The keys of engines on Ray, each made for one launch."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import zmq

from hardpoint.toolkit.curve_keys import KeyPair


class LaunchKeys:
    """Keys of a head and of the engines that it has started, in memory alone.

    Attributes:
        pair: the head's own.
    """

    def __init__(self) -> None:
        """Make the head's."""
        public, secret = zmq.curve_keypair()
        self.pair = KeyPair(public, secret, public)
        self._names: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def names(self) -> Mapping[bytes, str]:
        """Return the names of the engines that may connect now, by their public keys."""
        with self._lock:
            return dict(self._names)

    def make(self, name: str) -> KeyPair:
        """Make the keys of an engine."""
        public, secret = zmq.curve_keypair()
        with self._lock:
            self._names[public] = name
        return KeyPair(public, secret, self.pair.public)

    def revoke(self, keys: KeyPair) -> None:
        """Let their owner connect no more; a connection that it has ends."""
        with self._lock:
            self._names.pop(keys.public, None)
