"""Heads and engines that join them: played by the test, or in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from hardpoint.host.boundary.activity import Activity
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.launch import Launch
from hardpoint.replicas.remote import admission
from hardpoint.replicas.remote.joined_host import JoinedHost
from hardpoint.replicas.remote.listener import JoinListener
from hardpoint.replicas.remote.messages import Hello, JoinRefusal, MessageKind, decode, encode
from hardpoint.toolkit.curve_keys import KeyFolder, KeyPair

from .process.forked_python import forked_python
from .waiting import PATIENCE_S, wait_until

HELLO = Hello(
    hardpoint="1.0", torch="2.0", wire=4, contracts={"models": 1}, host="there", model="m",
    fingerprint="f" * 64,
)  # fmt: skip
NO_PLUGINS = Manifest(hardpoint="1.0", entries=())


_PORTS = range(10_000, 32_000)
"""Ports below those that Linux gives to connections and to port 0 on its own."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens at; it stays free until it is used."""
    while True:
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port := secrets.choice(_PORTS)))
            return port


def free_address() -> str:
    """Return an address that nobody listens at."""
    return f"tcp://127.0.0.1:{free_port()}"


class Head:
    """A listener with clients of engines that have not joined; their messages are kept."""

    def __init__(self, data: int = 2, keys: Path | None = None, **parallel: Any) -> None:
        self.address = free_address()
        config = ParallelConfig(data=data, local=0, join_address=self.address, **parallel)
        folder = None if keys is None else KeyFolder(str(keys), "parallel.keys")
        hello = msgspec.structs.replace(HELLO, host="here")
        admits = admission.Admission(hello, config, needs_equal_bits=True)
        self.listener = JoinListener(config, folder, admits)
        self._undo = contextlib.ExitStack()
        self._undo.callback(self.listener.close)
        self.peers: list[Peer] = []

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.close()
        self._undo.close()

    def host(
        self, rank: int = 0, limit_s: float = PATIENCE_S, config: dict[str, Any] | None = None
    ) -> Place:
        place = Place(self.listener, rank, self.address, limit_s, config or {})
        self._undo.callback(place.close)
        return place

    def peer(self, keys: KeyPair | None = None) -> Peer:
        self.peers.append(Peer(self.address, keys))
        return self.peers[-1]


class Place:
    """The place of an engine, with its client's sockets; `launch` waits in a thread."""

    def __init__(
        self,
        listener: JoinListener,
        rank: int,
        address: str,
        limit_s: float,
        config: dict[str, Any],
    ) -> None:
        self.sockets = EngineSockets(rank)
        self.activity = Activity.create(self.sockets.folder)
        self.host = JoinedHost(listener.order, rank, address, limit_s)
        self.error: Exception | None = None
        launch = Launch(
            address=msgspec.json.encode(self.sockets.addresses).decode(),
            manifest=NO_PLUGINS, config=config, engine_index=rank, folder=str(self.sockets.folder),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._launch, args=(launch,))
        self._thread.start()

    def _launch(self, launch: Launch) -> None:
        try:
            self.host.launch(launch)
        except Exception as error:
            self.error = error

    def joined(self) -> None:
        self.returned()
        assert self.error is None

    def returned(self) -> None:
        """Wait until `launch` has returned, or raised `error`."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def failure(self) -> str:
        """Wait for the end of the engine; return how it ended."""
        assert select.select(self.host.sentinels, [], [], PATIENCE_S)[0]
        return str(self.host.failure())

    def has_output(self) -> bool:
        got: list[object] = []
        self.sockets.read(got.append, got.append)
        threading.Event().wait(0.05)
        return bool(got)

    def close(self) -> None:
        self.host.close(0)
        self._thread.join(PATIENCE_S)
        self.sockets.close()


class Peer:
    """An engine's side of a connection, as the test wants it."""

    def __init__(self, address: str, keys: KeyPair | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
            self.socket.curve_serverkey = keys.server
        self.socket.connect(address)
        self.session = b""

    def send(self, kind: bytes, *frames: bytes) -> None:
        self.socket.send_multipart([kind, self.session, *frames])

    def get(self, *kinds: MessageKind, seconds: float = PATIENCE_S) -> list[bytes] | None:
        """Return the next message of some kinds, None if none comes."""
        while self.socket.poll(seconds * 1000):
            frames = self.socket.recv_multipart()
            if frames[0] in kinds:
                return frames
        return None

    def hello(self, hello: Hello = HELLO, /, **fields: Any) -> JoinRefusal | None:
        """Say hello; return the refusal, or None after a welcome."""
        hello = msgspec.structs.replace(hello, **fields)
        self.socket.send_multipart([MessageKind.HELLO, b"", encode(hello)])
        answer = self.get(MessageKind.WELCOME, MessageKind.REFUSED)
        assert answer is not None
        kind, self.session, frame = answer
        return decode(frame, JoinRefusal) if kind == MessageKind.REFUSED else None

    def join(self, hello: Hello = HELLO, /, **fields: Any) -> None:
        # The place is offered in a thread.
        wait_until(lambda: self.hello(hello, **fields) is None, PATIENCE_S, "the place")
        self.send(MessageKind.STARTED, msgspec.msgpack.encode(4711))

    def close(self) -> None:
        self._context.destroy(0)


def toml(value: object) -> str:
    """Return a value of a configuration in TOML, in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


_ENGINE = """
import os, sys
from hardpoint.cli import main
os.setsid()
sys.exit(main())
"""


class JoiningEngine:
    """`hardpoint engine --join` in a process of its own."""

    def __init__(self, folder: Path, config: Mapping[str, Any], address: str, *more: str) -> None:
        number = len(list(folder.glob("engine-*.log")))
        file, self.log = folder / f"engine-{number}.toml", folder / f"engine-{number}.log"
        file.write_text("\n".join(f"{name} = {toml(value)}" for name, value in config.items()))
        command = ["-c", _ENGINE, "engine", "--config", str(file), "--join", address, *more]
        tests = str(Path(__file__).parents[1])
        with self.log.open("w") as log:
            environment = os.environ | {"PYTHONPATH": tests}
            self.process = forked_python().popen(command, stderr=log, env=environment)

    def has_logged(self, words: str) -> bool:
        return words in self.log.read_text()

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and the log."""
        return self.process.wait(PATIENCE_S), self.log.read_text()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class Proxy:
    """Forwards TCP data until it is told to drop it. It listens once its target does.

    Attributes:
        address: to connect to.
        swallows: while set, nothing is passed on, and no connection is closed.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = socket.socket()
        self._server.bind(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.swallows, self._is_closed = threading.Event(), threading.Event()
        self._sockets = [self._server]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        # An engine gives up if its connections are accepted and cut for some seconds.
        while (first := self._connected()) is None:
            if self._is_closed.wait(0.05):
                return
        with contextlib.suppress(OSError):
            self._server.listen()
            while True:
                incoming, _ = self._server.accept()
                other, first = first or self._connected(), None
                if other is None:
                    incoming.close()
                    continue
                self._sockets += [incoming, other]
                for pair in ((incoming, other), (other, incoming)):
                    self._threads.append(
                        threading.Thread(target=self._pass, args=pair, daemon=True)
                    )
                    self._threads[-1].start()

    def _connected(self) -> socket.socket | None:
        try:
            return socket.create_connection(self._target)
        except OSError:  # nobody listens
            return None

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.swallows.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._is_closed.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)
