"""A connection to a Redis server: the few commands that blocks need, read straight into buffers.

A client library reads a value into one object of its own, which takes several times as long as the
transfer itself for blocks of some megabytes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_END = b"\r\n"
_MAX_LINE = 4096

Credentials = Callable[[], tuple[str | None, str | None]]
"""Returns user and password, which may change."""


class RedisError(Exception):
    """The server cannot be reached, or does not answer as it should."""


class RedisReplyError(RedisError):
    """The server answered with an error; the connection can be used again.

    Attributes:
        code: the first word of the server's message, "OOM" for example.
    """

    def __init__(self, message: str) -> None:
        """`message` is the server's."""
        super().__init__(f"the server answered: {message}")
        self.code = message.partition(" ")[0]


@dataclass(frozen=True)
class RedisAddress:
    """Where a server is.

    Attributes:
        host: its name or address; empty for a socket file.
        port: on that host.
        path: of a socket file.
        db: number of the database.
        tls: whether the connection is encrypted.
    """

    host: str = ""
    port: int = 6379
    path: str = ""
    db: int = 0
    tls: bool = False

    def __str__(self) -> str:
        """Return it for a message."""
        return self.path or f"{self.host}:{self.port}"


def parse_url(url: str) -> RedisAddress:
    """Return the address that a URL names.

    Raises:
        ValueError: it is none. The message does not repeat it, since a password may be in it.
    """
    if "@" in url:
        raise ValueError(
            "expected no user or password in it; set username, and password_file or password_env"
        )
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise ValueError("expected a URL such as redis://127.0.0.1:6379/0") from None
    if parts.query or parts.fragment or parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            "expected redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS) or unix:///PATH, without "
            "parameters"
        )
    if parts.scheme == "unix":
        if parts.netloc or len(parts.path) < 2:
            raise ValueError("expected the path of a socket: unix:///run/redis/redis.sock")
        return RedisAddress(path=parts.path)
    db = parts.path.strip("/") or "0"
    if not parts.hostname or not (db.isascii() and db.isdigit()):
        raise ValueError("expected a host, and a number of a database: redis://127.0.0.1:6379/0")
    return RedisAddress(parts.hostname, port, db=int(db), tls=parts.scheme == "rediss")


class RedisConnection:
    """One connection; one thread at a time uses it.

    After a `RedisError` other than `RedisReplyError` it is closed.
    """

    def __init__(
        self,
        address: RedisAddress,
        credentials: Credentials,
        tls: ssl.SSLContext | None,
        *,
        connect_timeout: float,
        timeout: float,
    ) -> None:
        """Connect and authenticate.

        Args:
            address: of the server.
            credentials: of this client.
            tls: how the server is verified, if the address says so.
            connect_timeout: seconds until the connection stands.
            timeout: seconds of each command.

        Raises:
            RedisError: that failed.
        """
        self._address = address
        self._timeout = timeout
        self._received = bytearray()
        self._deadline = 0.0
        try:
            self._socket = _connect(address, tls, connect_timeout)
        except OSError as cause:
            raise RedisError(f"cannot connect to {address}: {cause}") from cause
        try:
            self._authenticate(*credentials())
        except BaseException:
            self.close()
            raise

    def _authenticate(self, username: str | None, password: str | None) -> None:
        if password is not None:
            user = [] if username is None else [username.encode()]
            self._expect_ok(b"AUTH", *user, password.encode())
        if self._address.db:
            self._expect_ok(b"SELECT", b"%d" % self._address.db)

    def _expect_ok(self, *command: bytes) -> None:
        self._begin()
        self._send([_packed(*command)])
        self._read_ok()

    def ping(self) -> None:
        """Wait for an answer of the server."""
        self._begin()
        self._send([_packed(b"PING")])
        if (line := self._read_line()) != b"+PONG":
            raise self._failure(f"PING was answered with {line[:40]!r}")

    @property
    def is_closed(self) -> bool:
        """Whether it cannot be used any more."""
        return self._socket.fileno() < 0

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent what was not asked for."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(self._received or waiting.poll(0))

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    # Commands

    def set(self, key: bytes, value: memoryview, expire_ms: int | None) -> None:
        """Store a value."""
        self._begin()
        count = 3 if expire_ms is None else 5
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (count, len(key), key, len(value))
        tail = _END if expire_ms is None else _END + _bulk(b"PX") + _bulk(b"%d" % expire_ms)
        self._send([head, value, tail])
        self._read_ok()

    def get(self, key: bytes, buffer: memoryview) -> bool:
        """Read a value into a buffer; return whether it is there and has the buffer's size."""
        self._begin()
        self._send([_packed(b"GET", key)])
        size = self._read_number(b"$")
        if size < 0:
            return False
        if size != len(buffer):
            self.close()  # rather than to read what may be large
            return False
        self._read_into(buffer)
        end = bytearray(2)
        self._read_into(memoryview(end))
        if end != _END:
            raise self._failure("a value does not end where it should")
        return True

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Return the size of each value; 0 if it is not there, or is no text."""
        self._begin()
        self._send([b"".join(_packed(b"STRLEN", key) for key in keys)])
        sizes = []
        for _ in keys:
            try:
                sizes.append(self._read_number(b":"))
            except RedisReplyError as error:
                if error.code != "WRONGTYPE":
                    self.close()  # there are answers left
                    raise
                sizes.append(0)
        return sizes

    # Bytes

    def _begin(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def _failure(self, message: str) -> RedisError:
        self.close()
        return RedisError(f"{self._address}: {message}")

    def _limit(self) -> None:
        """Let the next call of the socket end in time."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise self._failure(f"no answer in {self._timeout:g} s")
        self._socket.settimeout(seconds)

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                for part in parts:
                    self._limit()
                    self._socket.sendall(part)
                return
            left = [memoryview(part) for part in parts]
            while left:
                self._limit()
                left = _after(left, self._socket.sendmsg(left))
        except OSError as cause:
            raise self._broken(cause) from cause

    def _receive(self, room: memoryview) -> int:
        """Read some bytes, at least one."""
        self._limit()
        try:
            size = self._socket.recv_into(room)
        except OSError as cause:
            raise self._broken(cause) from cause
        if not size:
            raise self._failure("the server has closed the connection")
        return size

    def _broken(self, cause: OSError) -> RedisError:
        if isinstance(cause, TimeoutError):
            return self._failure(f"no answer in {self._timeout:g} s")
        return self._failure(f"the connection broke: {cause}")

    def _read_into(self, room: memoryview) -> None:
        """Fill a buffer."""
        start = min(len(room), len(self._received))
        room[:start] = self._received[:start]
        del self._received[:start]
        while start < len(room):
            start += self._receive(room[start:])

    def _read_line(self) -> bytes:
        """Return the next line without its end.

        Raises:
            RedisReplyError: it is an error.
        """
        while (end := self._received.find(_END)) < 0:
            if len(self._received) > _MAX_LINE:
                raise self._failure("the server's answer is not one of Redis")
            more = bytearray(_MAX_LINE)
            size = self._receive(memoryview(more))
            self._received += more[:size]
        line = bytes(self._received[:end])
        del self._received[: end + len(_END)]
        if line[:1] == b"-":
            raise RedisReplyError(line[1:].decode(errors="replace"))
        return line

    def _read_ok(self) -> None:
        if (line := self._read_line()) != b"+OK":
            raise self._failure(f"the server answered {line[:40]!r}, expected OK")

    def _read_number(self, kind: bytes) -> int:
        line = self._read_line()
        digits = line[1:].removeprefix(b"-")
        if line[:1] != kind or not digits.isdigit() or len(digits) > 18:
            raise self._failure(f"the server answered {line[:40]!r}, expected a number")
        return int(line[1:])


def _connect(
    address: RedisAddress, tls: ssl.SSLContext | None, timeout: float
) -> socket.socket | ssl.SSLSocket:
    if address.path:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout)
            connection.connect(address.path)
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection((address.host, address.port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if tls is None:
        return connection
    try:
        return tls.wrap_socket(connection, server_hostname=address.host)
    except BaseException:
        connection.close()
        raise


def _packed(*arguments: bytes) -> bytes:
    """Return a command as the protocol has it."""
    return b"*%d\r\n" % len(arguments) + b"".join(map(_bulk, arguments))


def _bulk(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def _after(parts: list[memoryview], size: int) -> list[memoryview]:
    """Return what is left of parts after their first bytes."""
    for index, part in enumerate(parts):
        if size < len(part):
            return [part[size:], *parts[index + 1 :]]
        size -= len(part)
    return []
