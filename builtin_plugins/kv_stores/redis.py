"""Blocks in a Redis server."""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import ConfigError, KVStore
from hardpoint.plugins.kv_store import BlockBuffer

from .redis_connection import RedisConnection, RedisError, RedisReplyError, parse_url

_Seconds = Annotated[float, Meta(gt=0, le=3600)]

_BATCH = 512  # keys that are asked for at once
_MAX_PASSWORD = 4096
_NOT_WRITABLE = {"OOM", "MISCONF", "READONLY", "NOREPLICAS", "NOPERM"}
"""Codes of a server that keeps nothing more for us, and can be read all the same."""


class RedisStore(KVStore):
    """Keeps blocks in a Redis server, or one that speaks its protocol, for many engines.

    How much the server keeps, and what it drops first, is its own configuration: `maxmemory` and
    `maxmemory-policy allkeys-lru`.
    """

    contract = 1

    class Options(plugins.Options):
        """Where the server is.

        Attributes:
            url: `redis://HOST:PORT/DB`, `rediss://HOST:PORT/DB` for TLS, or `unix:///PATH`;
                without user and password.
            username: of an access control list; None is the default user.
            password_file: whose text is the password; owned by the user or root, and not readable
                by others. It is read for each new connection.
            password_env: environment variable that holds the password, instead.
            ssl_ca_certs: file of the certificates that the server's is checked with; None is the
                system's.
            ssl_certfile: the client's certificate, if the server wants one.
            ssl_keyfile: its key.
            prefix: of all keys.
            ttl_seconds: for which a block is kept; None is until the server drops it.
            timeout_seconds: of each command.
            connect_timeout_seconds: until a connection stands.
        """

        url: str = "redis://127.0.0.1:6379/0"
        username: str | None = None
        password_file: str | None = None
        password_env: str | None = None
        ssl_ca_certs: str | None = None
        ssl_certfile: str | None = None
        ssl_keyfile: str | None = None
        prefix: str = "hardpoint:"
        ttl_seconds: Annotated[float, Meta(ge=0.001, le=1e9)] | None = None
        timeout_seconds: _Seconds = 2.0
        connect_timeout_seconds: _Seconds = 1.0

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Try to connect; a server that cannot be reached is tried again with each call.

        Raises:
            ConfigError: a file or variable that an option names cannot be used.
        """
        super().__init__(context)
        options = self.options
        self._check(options)
        self._address = parse_url(options.url)
        self._prefix = options.prefix.encode()
        ttl = options.ttl_seconds
        self._expire_ms = None if ttl is None else max(1, round(ttl * 1000))
        self._tls = self._tls_context() if self._address.tls else None
        self._lock = threading.Lock()
        self._idle: list[RedisConnection] = []
        self._closed = False
        self._refused = False
        self._credentials()
        try:
            with self._connection() as connection:
                connection.ping()
        except RedisError as error:
            context.report_fault(f"KV store {self.name!r}: {error}")

    def _check(self, options: RedisStore.Options) -> None:
        """Check options together; a URL is never repeated, since a password may be in it."""
        where = f"plugin.{self.name}"
        try:
            parse_url(options.url)
        except ValueError as cause:
            raise ConfigError(f"{where}.url: {cause}") from None
        passwords = [options.password_file, options.password_env]
        if None not in passwords:
            raise ConfigError(f"{where}.password_env: expected none besides password_file")
        if options.username is not None and not any(passwords):
            raise ConfigError(f"{where}.username: expected password_file or password_env, too")

    def _tls_context(self) -> ssl.SSLContext:
        options = self.options
        where = f"plugin.{self.name}"
        try:
            tls = ssl.create_default_context(cafile=options.ssl_ca_certs)
        except OSError as cause:
            raise ConfigError(f"{where}.ssl_ca_certs: {options.ssl_ca_certs!r}: {cause}") from None
        if options.ssl_certfile is not None:
            try:
                # Without a password, an encrypted key would be asked for on the terminal.
                tls.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
            except OSError as cause:
                raise ConfigError(
                    f"{where}.ssl_certfile: {options.ssl_certfile!r} and its key: {cause}"
                ) from None
        return tls

    # Connections

    @contextlib.contextmanager
    def _connection(self) -> Iterator[RedisConnection]:
        """Yield a connection for one call."""
        connection = self._idle_connection() or RedisConnection(
            self._address,
            self._credentials,
            self._tls,
            connect_timeout=self.options.connect_timeout_seconds,
            timeout=self.options.timeout_seconds,
        )
        try:
            yield connection
        except RedisReplyError:
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)

    def _idle_connection(self) -> RedisConnection | None:
        """Return a connection that still stands; None if there is none."""
        while True:
            with self._lock:
                if self._closed:
                    raise RedisError("the store is closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()

    def _give_back(self, connection: RedisConnection) -> None:
        with self._lock:
            if not self._closed and not connection.is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _credentials(self) -> tuple[str | None, str | None]:
        """Return user and password.

        Raises:
            ConfigError: the password cannot be read.
        """
        options = self.options
        if options.password_file is not None:
            path = f"plugin.{self.name}.password_file"
            return options.username, _read_password(options.password_file, path)
        if options.password_env is None:
            return None, None
        password = os.environ.get(options.password_env)
        if not password:
            raise ConfigError(
                f"plugin.{self.name}.password_env: the environment of this process has no variable "
                f"{options.password_env!r}, or it is empty"
            )
        return options.username, password

    # Blocks

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are there and have the right size."""
        size, found = self.context.block_bytes, []
        with self._connection() as connection:
            for start in range(0, len(keys), _BATCH):
                batch = [self._key(key) for key in keys[start : start + _BATCH]]
                found += [one == size for one in connection.sizes(batch)]
        return found

    def store(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Send a block."""
        try:
            with self._connection() as connection:
                connection.set(self._key(key), buffer.whole, self._expire_ms)
        except RedisReplyError as error:
            if error.code not in _NOT_WRITABLE:
                raise
            if not self._refused:
                self._refused = True
                self.context.report_fault(
                    f"KV store {self.name!r}: blocks are not stored for now: {error}"
                )
            return False
        self._refused = False
        return True

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Read a block straight into the buffer."""
        with self._connection() as connection:
            return connection.get(self._key(key), buffer.whole)

    def close(self) -> None:
        """Close the connections; those that are in use, once they are not."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _read_password(file: str, path: str) -> str:
    """Return the text of a file without the end of its line.

    Args:
        file: the file.
        path: the option that names it.

    Raises:
        ConfigError: it cannot be read, others can read it, or there is no password in it.
    """
    try:
        with open(file, "rb", opener=_open_for_reading) as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: {file!r}: expected a regular file")
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o037:
                raise ConfigError(
                    f"{path}: {file!r}: expected a file of yours or root's with mode 0600 or 0640, "
                    f"got mode {stat.S_IMODE(found.st_mode):04o} of user {found.st_uid}"
                )
            text = opened.read(_MAX_PASSWORD + 1)
    except OSError as cause:
        raise ConfigError(f"{path}: {file!r}: {cause.strerror}") from None
    try:
        password = text.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        password = ""
    if not password or len(text) > _MAX_PASSWORD:
        raise ConfigError(f"{path}: {file!r}: expected a password, in UTF-8, and nothing else")
    return password


def _open_for_reading(file: str, flags: int) -> int:
    """Open a file; one that is a pipe is not waited for."""
    return os.open(file, flags | os.O_NONBLOCK)
