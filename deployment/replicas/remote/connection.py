"""The connection of an engine to its head: until it is secured, refused or cut."""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from hardpoint.errors import ConfigError
from hardpoint.host.system.encoding import MOST_BYTES
from hardpoint.toolkit.curve_keys import KeyPair

from .polling import readable

_HANDSHAKE_MS = 5000
_RECONNECT_MS, _MOST_RECONNECT_MS = 200, 2000
_MOST_FAILURES = 3
_FAILING_S = 5.0  # a proxy cuts connections while the head behind it starts
UNEXPLAINED_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Events of handshakes that fail before a key is refused."""
_FAILURES = UNEXPLAINED_FAILURES | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSED = 400  # the status of ZAP for a key that is not among the allowed ones


class HandshakeError(ConfigError):
    """The two sides do not agree on security.

    Attributes:
        is_key_refused: whether the head answered that it does not accept the key.
    """

    def __init__(self, message: str, *, is_key_refused: bool) -> None:
        super().__init__(message)
        self.is_key_refused = is_key_refused


class HeadConnection:
    """A DEALER that is connected once: a cut connection is not restored.

    Attributes:
        socket: to be read and written, once `wait` returned True.
        events: to be polled as well; `is_cut` reads it.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: KeyPair | None
    ) -> None:
        self._address = address
        self._num_failures, self._failing_since = 0, 0.0
        self.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MOST_BYTES),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS),
            (zmq.IPV6, int("[" in address)),
        ):
            self.socket.setsockopt(option, value)
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
            self.socket.curve_serverkey = keys.server
        self.events: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            _FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            self.socket.connect(address)
        except zmq.ZMQError as cause:
            self.close()
            raise ConfigError(
                f"--join: {address} cannot be used: {zmq.strerror(cause.errno or 0)}"
            ) from None

    def wait(self, seconds: float, stop: int) -> bool:
        """Wait until it is secured; return whether it is.

        Args:
            seconds: at most.
            stop: a descriptor that ends the waiting.

        Raises:
            HandshakeError: the head refuses the key, or speaks otherwise.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready = readable([self.events, stop], left)
            if stop in ready:
                return False
            if self.events in ready and self._read_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
        return False

    def is_cut(self) -> bool:
        """Return whether it was cut; call when `events` is readable."""
        return self._read_event() == zmq.EVENT_DISCONNECTED

    def close(self) -> None:
        """Close it; unsent messages are lost, unless its socket lingers."""
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close()

    def _read_event(self) -> int:
        message = recv_monitor_message(self.events)
        event = int(message["event"])
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and message["value"] == _REFUSED:
            raise HandshakeError(
                f"--keys: the head at {self._address} refuses the key: it is not, or no more, in "
                "the folder of its parallel.keys",
                is_key_refused=True,
            )
        if not event & _FAILURES:
            return event
        now = time.monotonic()
        if not self._num_failures:
            self._failing_since = now
        self._num_failures += 1
        # After an error of the protocol, libzmq does not connect again.
        is_last = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        is_long = now - self._failing_since >= _FAILING_S
        if is_last or (self._num_failures >= _MOST_FAILURES and is_long):
            raise HandshakeError(
                f"--keys: the program at {self._address} does not agree on security: either side "
                "has keys and the other has none, or server.key is not the key of this head",
                is_key_refused=False,
            )
        return event
