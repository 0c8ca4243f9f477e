"""Redis servers: a real one in a folder, and one in a thread that follows a test's script."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .waiting import wait_until


class FakeRedis:
    """Knows the commands that the store "redis" sends.

    Attributes:
        values: what is stored.
        commands: what was sent, besides PING and the library's own commands.
        answer: called with each command; what it returns is sent instead of an answer, unless it
            is None.
        connections: how many there were.
        open: those that are there.
    """

    def __init__(self, path: Path, password: str | None = None) -> None:
        self.path = path
        self.password = password
        self.values: dict[bytes, bytes] = {}
        self.commands: list[list[bytes]] = []
        self.answer: Callable[[list[bytes]], bytes | None] = lambda _command: None
        self.connections = 0
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                fake.serve(self.request, self.rfile)

        self.open: set[socket.socket] = set()
        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """End it as a server that is killed ends."""
        self._server.shutdown()
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def serve(self, connection: socket.socket, file) -> None:
        self.connections += 1
        self.open.add(connection)
        known = self.password is None
        try:
            while line := file.readline():
                command = []
                for _ in range(int(line[1:])):
                    size = int(file.readline()[1:])
                    command.append(file.read(size + 2)[:-2])
                if command[0] not in (b"PING", b"CLIENT"):
                    self.commands.append(command)
                if (answer := self.answer(command)) is None:
                    if command[0] == b"AUTH":
                        known = command[-1] == (self.password or "").encode()
                    answer = self._result(command) if known else self._refusal(command)
                connection.sendall(answer)
        except OSError:
            pass
        finally:
            self.open.discard(connection)
            connection.close()

    def _refusal(self, command: list[bytes]) -> bytes:
        if command[0] == b"AUTH":
            return b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        return b"-NOAUTH Authentication required.\r\n"

    def _result(self, command: list[bytes]) -> bytes:
        match command:
            case [b"PING"]:
                return b"+PONG\r\n"
            case [b"AUTH" | b"CLIENT" | b"SELECT", *_]:
                return b"+OK\r\n"
            case [b"SET", key, value, *_]:
                self.values[key] = value
                return b"+OK\r\n"
            case [b"GET", key] if key in self.values:
                return b"$%d\r\n%b\r\n" % (len(self.values[key]), self.values[key])
            case [b"GET", _]:
                return b"$-1\r\n"
            case [b"STRLEN", key]:
                return b":%d\r\n" % len(self.values.get(key, b""))
        return b"-ERR unknown command\r\n"


class RedisServer:
    """A process of `redis-server` on a socket in a folder."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.path = folder / "redis.sock"
        self._settings = [
            *("--port", "0", "--unixsocket", str(self.path), "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no", *settings),
        ]
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            ["redis-server", *self._settings], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        try:
            wait_until(self._answers, what="redis-server")
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, "redis-server ended"
        try:
            return self.call(b"PING")[:1] in (b"+", b"-")
        except OSError:
            return False

    def call(self, *command: bytes) -> bytes:
        """Send a command, and return the first bytes of its answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.path))
            words = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in command)
            connection.sendall(b"*%d\r\n%b" % (len(command), words))
            return connection.recv(1000)

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()


def seconds_of(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
