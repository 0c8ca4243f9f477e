"""`hardpoint engine --join`: an engine that joins a head, again and again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import zmq

from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.host.system.encoding import WireError
from hardpoint.plugins import ConfigError, EngineConfig
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.zmq_resources import end_context
from hardpoint.toolkit.curve_keys import KeyPair, client_keys

from .address import check_address
from .comparison import check_manifest, hello_of
from .connection import HandshakeError, HeadConnection
from .engine_link import EngineLink
from .messages import NO_SESSION, Hello, JoinRefusal, MessageKind, Welcome, decode, encode, kind_of
from .polling import readable

_log = logging.getLogger("hardpoint")

_CONNECT_S = 5.0
_ANSWER_S = 10.0
_RETRY_S, _MOST_RETRY_S = 1.0, 30.0
_MOST_REFUSALS = 4  # of the key, one after the other, after it was accepted
_LOG_INTERVAL_S = 60.0


def join_engine(
    config: EngineConfig,
    config_sources: ConfigSources,
    address: str,
    *,
    keys: str | None = None,
    rank: int | None = None,
    once: bool = False,
) -> None:
    """Run engines for the head at an address, one after another, until a signal ends this.

    The head decides on the work of an engine; its code is installed and enabled here.

    Args:
        config: the model, the plugins, and what belongs to this machine.
        config_sources: sources of its values.
        address: `tcp://HOST:PORT`.
        keys: folder with the keys of a client; None is without, on one machine.
        rank: the rank to take; None is any that waits.
        once: end with the first engine, or when its head is gone.

    Raises:
        ConfigError: the address, the keys or the rank are wrong, or the two sides differ.
        PluginError: a plugin of the head is not enabled here.
        ModelError: the model is not there.
    """
    check_address(address, "--join", has_keys=keys is not None)
    pair = None if keys is None else client_keys(keys, "--keys")
    hello = msgspec.structs.replace(hello_of(config), rank=rank)
    manifest = resolve_plugins(config, config_sources).manifest
    with _stopping() as stop:
        joining = Joining(config, manifest, address, pair, hello, stop)
        try:
            while joining.run() and not once:
                pass
        finally:
            joining.close()


class Joining:
    """Joins a head, and joins again."""

    def __init__(
        self,
        config: EngineConfig,
        manifest: Manifest | None,
        address: str,
        keys: KeyPair | None,
        hello: Hello,
        stop: int,
        num_sharing: int = 1,
    ) -> None:
        """Do not connect yet.

        Args:
            manifest: the plugins that are enabled here; None enables what the head has enabled.
            address: where the head listens.
            keys: this side's, and the public key of the head; None is without.
            stop: a descriptor that is readable when this is to end.
            num_sharing: engines among which the memory of this machine is divided.
        """
        self._config, self._manifest = config, manifest
        self._address, self._keys, self._hello, self._stop = address, keys, hello, stop
        self._num_sharing = num_sharing
        self._context = zmq.Context(io_threads=1)
        self._former = NO_SESSION
        self._refused_since: float | None = None
        self._logged = -_LOG_INTERVAL_S
        self._has_joined = False
        self._num_refusals, self._retry_s = 0, _RETRY_S

    def close(self) -> None:
        """Close all sockets."""
        end_context(self._context, "the sockets of joined engines")

    def run(self) -> bool:
        """Join once, and run the engine; return whether to go on.

        Once it has joined, a handshake that fails, as when bytes are damaged on the way, is tried
        again with growing pauses, unless the head refuses the key again and again.

        Raises:
            HardpointError: it is of no use to try again.
        """
        connection = HeadConnection(self._context, self._address, self._keys)
        try:
            return self._connected(connection)
        except HandshakeError as error:
            if not self._has_joined:
                raise
            self._num_refusals += error.is_key_refused
            if self._num_refusals >= _MOST_REFUSALS:
                raise
            self._log(f"{error}; trying again in {self._retry_s:g} s")
            readable([self._stop], self._retry_s)
            self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)
            return not self._is_stopped()
        finally:
            connection.close()

    def _connected(self, connection: HeadConnection) -> bool:
        """Wait for a connection, and join by it; see `run`."""
        while True:
            if self._is_stopped():
                return False
            if connection.wait(_CONNECT_S, self._stop):
                break
            self._log(f"waiting for a head at {self._address}")
        self._num_refusals, self._retry_s = 0, _RETRY_S
        while (joined := self._join(connection)) is None:
            if self._is_stopped() or connection.socket.poll(0, zmq.POLLOUT) == 0:
                return not self._is_stopped()
        session, welcome = joined
        return self._serve(connection, session, welcome)

    def _serve(self, connection: HeadConnection, session: bytes, welcome: Welcome) -> bool:
        self._has_joined = True
        _log.info("joined %s as engine %d", self._address, welcome.rank)
        link = EngineLink(self._context, connection, session, welcome, self._num_sharing)
        link.run(self._config, self._manifest, self._address, self._stop)
        # A hello that names it would overtake its last outputs and its end.
        self._former = NO_SESSION if link.has_sent_end else session
        self._refused_since, self._logged = None, -_LOG_INTERVAL_S
        _log.warning("engine %d has ended: %s", welcome.rank, link.why_over)
        return not link.was_stopped

    def _join(self, connection: HeadConnection) -> tuple[bytes, Welcome] | None:
        """Say hello; return the session and the head's request, None to try again.

        Raises:
            HardpointError: the head refuses, or asks for what is not enabled here.
        """
        hello = msgspec.structs.replace(self._hello, former=self._former)
        connection.socket.send_multipart(
            [MessageKind.HELLO, NO_SESSION, encode(hello)], zmq.NOBLOCK
        )
        deadline = time.monotonic() + _ANSWER_S
        while (left := deadline - time.monotonic()) > 0 and not self._is_stopped():
            ready = readable([connection.socket, connection.events, self._stop], left)
            if connection.socket in ready:
                kind, session, *frames = connection.socket.recv_multipart()
                match kind_of(kind):
                    case MessageKind.REFUSED if frames:
                        self._refused(decode(frames[0], JoinRefusal))
                        self._pause()
                        return None
                    case MessageKind.WELCOME if frames:
                        return session, self._accepted(connection, session, frames[0])
            elif connection.events in ready and connection.is_cut():
                self._pause()
                return None
        self._log(f"the head at {self._address} does not answer")
        return None

    def _accepted(self, connection: HeadConnection, session: bytes, frame: bytes) -> Welcome:
        """Return the welcome of a head, if that may run here.

        Raises:
            HardpointError: a plugin is not enabled here, or the message is malformed.
        """
        try:
            welcome = decode(frame, Welcome)
            if self._manifest is not None:
                check_manifest(welcome.manifest, self._manifest, self._address)
            msgspec.convert(welcome.config, EngineConfig)
        except (WireError, msgspec.ValidationError) as cause:
            raise ConfigError(f"--join: the head {self._address}: {cause}") from None
        except Exception as error:
            declined = msgspec.msgpack.encode(str(error))
            connection.socket.send_multipart([MessageKind.DECLINED, session, declined])
            connection.socket.setsockopt(zmq.LINGER, 1000)
            raise
        return welcome

    def _refused(self, refusal: JoinRefusal) -> None:
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since >= refusal.retry_seconds:
            raise ConfigError(
                f"--join: the head at {self._address} refuses the engine: {refusal.reason}"
            )
        self._log(f"the head at {self._address} has no place yet: {refusal.reason}")

    def _pause(self) -> None:
        readable([self._stop], _RETRY_S)

    def _is_stopped(self) -> bool:
        return bool(readable([self._stop], 0))

    def _log(self, message: str) -> None:
        if (now := time.monotonic()) - self._logged >= _LOG_INTERVAL_S:
            self._logged = now
            _log.warning("%s", message)


@contextlib.contextmanager
def _stopping() -> Iterator[int]:
    """Yield a descriptor that gets a byte for each SIGTERM and SIGINT."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda *_: os.write(theirs.fileno(), b"!"))
    try:
        yield ours.fileno()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
