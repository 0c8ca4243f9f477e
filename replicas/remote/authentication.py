"""Decides by their keys who may connect to a head."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import zmq
from zmq.auth.thread import ThreadAuthenticator

from hardpoint.toolkit.curve_keys import KeyFolder


class Doorkeeper:
    """Lets the owners of keys connect; a key that is added or removed counts at once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: KeyFolder,
        refused: Callable[[str], None],
    ) -> None:
        """Start.

        Args:
            context: the one of the guarded sockets.
            keys: the folder.
            refused: called with the reason for each connection that is refused.
        """
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
        self._refused("a key that is not among those of parallel.keys")
        return False

    def names(self) -> dict[bytes, str]:
        """Return the names of the keys that are accepted, by their public keys."""
        with self._lock:
            return self._keys.names()

    def name_of(self, key: bytes) -> str:
        """Return the name of a key's owner."""
        return self.names().get(key, "revoked")

    def stop(self) -> None:
        """Stop; sockets must be closed before."""
        self._authenticator.stop()


def key_of(frame: zmq.Frame) -> bytes:
    """Return the public key of the sender of a frame, in Z85; empty without one."""
    with contextlib.suppress(zmq.ZMQError):
        return str(frame.get("User-Id")).encode()
    return b""
