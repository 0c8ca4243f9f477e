"""Blocks in a Redis server, by the library redis, which is optional."""

from __future__ import annotations

import contextlib
import importlib
import os
import ssl
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta

from hardpoint import plugins
from hardpoint.builtin_plugins.http_calls import is_host
from hardpoint.builtin_plugins.secret_files import read_secret
from hardpoint.errors import install_command
from hardpoint.plugins import ConfigError, KVStore
from hardpoint.plugins.kv_store import BlockBuffer

_Seconds = Annotated[float, Meta(gt=0, le=3600)]

_BATCH = 512  # keys that are asked for at once
_MAX_PASSWORD = 4096
_READ_BYTES = (
    1 << 18
)  # at once; four times the library's default, in which large values take longer
_COPIED_BYTES = 6000  # longer values are sent from where they are
_NOT_WRITABLE = ("MISCONF", "NOREPLICAS")
"""Codes of a server that keeps nothing more for now; for others, the library has classes."""


class RedisStore(KVStore):
    """Keeps blocks in a Redis server, or a compatible server, for many engines.

    The server's own configuration decides its size and its eviction: `maxmemory` and
    `maxmemory-policy allkeys-lru`.
    """

    contract = 1

    class Options(plugins.Options):
        """Where the server is.

        Attributes:
            url: `redis://HOST:PORT/DB`, `rediss://HOST:PORT/DB` for TLS, or `unix:///PATH`;
                without user and password.
            username: user of an access control list; None is the default user.
            password_file: file with the password; owned by the user or root, and not readable
                by others. It is read for each new connection.
            password_env: environment variable with the password, instead of a file.
            ssl_ca_certs: file of certificate authorities, in addition to the system's.
            ssl_certfile: file of the client's certificate.
            ssl_keyfile: file of its key.
            prefix: prefix of all keys.
            ttl_seconds: time to live of a block; None keeps it until the server evicts it.
            timeout_seconds: time limit without a byte of the server's answer.
            connect_timeout_seconds: time limit of a connection.
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
            ImportError: the library redis is not installed.
        """
        super().__init__(context)
        self._library = _import_library()
        self._check(self.options)
        ttl = self.options.ttl_seconds
        self._expire_ms = None if ttl is None else max(1, round(ttl * 1000))
        self._prefix = self.options.prefix.encode()
        self._closed = False
        self._refused = False
        self._pool = self._connection_pool()
        self._client = self._library.Redis(connection_pool=self._pool)
        try:
            with self._server() as client:
                client.ping()
        except self._library.RedisError as error:
            context.report_fault(f"KV store {self.name!r}: {error}")

    def _check(self, options: RedisStore.Options) -> None:
        """Check options together; a URL is never repeated, since a password may be in it."""
        where = f"plugin.{self.name}"
        try:
            _check_url(options.url)
        except ValueError as cause:
            raise ConfigError(f"{where}.url: {cause}") from None
        passwords = [options.password_file, options.password_env]
        if None not in passwords:
            raise ConfigError(f"{where}.password_env: expected none besides password_file")
        if options.username is not None and not any(passwords):
            raise ConfigError(f"{where}.username: expected password_file or password_env, too")
        if any(passwords):
            self._password()
        if self._has_tls:
            self._check_certificates()

    @property
    def _has_tls(self) -> bool:
        return self.options.url.startswith("rediss:")

    def _check_certificates(self) -> None:
        options = self.options
        where = f"plugin.{self.name}"
        try:
            tls = ssl.create_default_context(cafile=options.ssl_ca_certs)
        except OSError as cause:
            raise ConfigError(f"{where}.ssl_ca_certs: {options.ssl_ca_certs!r}: {cause}") from None
        if options.ssl_certfile is not None:
            try:
                tls.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
            except OSError as cause:
                raise ConfigError(
                    f"{where}.ssl_certfile: {options.ssl_certfile!r} and its key: {cause}"
                ) from None

    # Connections

    def _connection_pool(self) -> Any:
        options = self.options
        connection = self._library.connection
        encoder = connection.Encoder("utf-8", "strict", decode_responses=False)
        settings: dict[str, Any] = {
            "protocol": 2,  # which all servers know, and which needs no right to use HELLO
            "socket_timeout": options.timeout_seconds,
            "socket_connect_timeout": options.connect_timeout_seconds,
            "socket_read_size": _READ_BYTES,
            # The parser of hiredis copies each value twice.
            "command_packer": connection.PythonRespSerializer(_COPIED_BYTES, encoder.encode),
        }
        if options.password_file is not None or options.password_env is not None:
            settings["credential_provider"] = _Credentials(self)
        if self._has_tls:
            settings |= {
                "ssl_ca_certs": options.ssl_ca_certs,
                "ssl_certfile": options.ssl_certfile,
                "ssl_keyfile": options.ssl_keyfile,
                "ssl_password": "",  # else an encrypted key would be asked for on the terminal
                "ssl_check_hostname": True,
            }
        return self._library.ConnectionPool.from_url(options.url, **settings)

    @contextlib.contextmanager
    def _server(self) -> Iterator[Any]:
        """Yield the client for one call; each call has a connection to itself."""
        if self._closed:
            raise self._library.ConnectionError("the store is closed")
        try:
            yield self._client
        except self._library.TimeoutError as cause:
            answer, connection = self.options.timeout_seconds, self.options.connect_timeout_seconds
            raise self._library.TimeoutError(
                f"no answer in {answer:g} s, or no connection in {connection:g} s: {cause}"
            ) from cause
        finally:
            if self._closed:  # during the call
                self._pool.disconnect(inuse_connections=False)

    def credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, or user and password, for a new connection."""
        try:
            password = self._password()
        except ConfigError as cause:
            # Other exceptions would leave a connection in the pool that has no user.
            raise self._library.AuthenticationError(str(cause)) from cause
        username = self.options.username
        return (password,) if username is None else (username, password)

    def _password(self) -> str:
        """Return the password.

        Raises:
            ConfigError: it cannot be read.
        """
        options = self.options
        if options.password_file is not None:
            return _read_password(options.password_file, f"plugin.{self.name}.password_file")
        assert options.password_env is not None
        password = os.environ.get(options.password_env)
        if not password:
            raise ConfigError(
                f"plugin.{self.name}.password_env: the environment of this process has no variable "
                f"{options.password_env!r}, or it is empty"
            )
        return password

    # Blocks

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are there and have the right size."""
        sizes: list[Any] = []
        with self._server() as client:
            for start in range(0, len(keys), _BATCH):
                pipeline = client.pipeline(transaction=False)
                for key in keys[start : start + _BATCH]:
                    pipeline.strlen(self._key(key))
                sizes += pipeline.execute(raise_on_error=False)
        for size in sizes:
            if isinstance(size, Exception) and not str(size).startswith("WRONGTYPE"):
                raise size
        return [size == self.context.block_bytes for size in sizes]

    def store(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Send a block."""
        try:
            with self._server() as client:
                is_kept = bool(client.set(self._key(key), buffer.whole, px=self._expire_ms))
        except self._library.ResponseError as error:
            if not self._is_refusal(error):
                raise
            if not self._refused:
                self._refused = True
                self.context.report_fault(
                    f"KV store {self.name!r}: blocks are not stored for now: the server answered: "
                    f"{error}"
                )
            return False
        self._refused = False
        return is_kept

    def _is_refusal(self, error: Exception) -> bool:
        errors = self._library.exceptions
        kinds = (errors.OutOfMemoryError, errors.ReadOnlyError, errors.NoPermissionError)
        return isinstance(error, kinds) or str(error).startswith(_NOT_WRITABLE)

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Read a block; not several at once, since replies of many megabytes are parsed slowly."""
        with self._server() as client:
            value = client.get(self._key(key))
        if not isinstance(value, bytes) or len(value) != len(buffer.whole):
            return False
        buffer.whole[:] = value
        return True

    def close(self) -> None:
        """Close the connections; connections in use are closed after their use."""
        self._closed = True
        self._pool.disconnect(inuse_connections=False)


class _Credentials:
    """Gives the library a user and a password for each new connection."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        return self._store.credentials()


def _import_library() -> Any:
    """Return the module redis.

    Raises:
        ImportError: it is not installed, or its import fails.
    """
    try:
        return importlib.import_module("redis")
    except ImportError as cause:
        raise ImportError(
            f"it needs the library redis: {install_command('redis')} ({cause})"
        ) from cause


def _check_url(url: str) -> None:
    """Check the database number: the library would accept any text.

    Raises:
        ValueError: it is no URL of a server. The message does not repeat it, since a password may
            be in it.
    """
    if "@" in url:
        raise ValueError(
            "expected no user or password in it; set username, and password_file or password_env"
        )
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError("expected a URL such as redis://127.0.0.1:6379/0") from None
    scheme = url.partition("://")[0]
    if parts.query or parts.fragment or scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            "expected redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS) or unix:///PATH, without "
            "parameters"
        )
    if scheme == "unix":
        if parts.netloc or len(parts.path) < 2:
            raise ValueError("expected the path of a socket: unix:///run/redis/redis.sock")
        return
    db = parts.path.strip("/") or "0"
    if not is_host(parts.hostname or "") or not (db.isascii() and db.isdigit()):
        raise ValueError("expected a host, and a number of a database: redis://127.0.0.1:6379/0")


def _read_password(file: str, path: str) -> str:
    """Return the text of a file without the end of its line.

    Args:
        path: the option that names it.

    Raises:
        ConfigError: it cannot be read, others can read it, or there is no password in it.
    """
    text = read_secret(file, path, _MAX_PASSWORD + 1)
    try:
        password = text.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        password = ""
    if not password or len(text) > _MAX_PASSWORD:
        raise ConfigError(f"{path}: {file!r}: expected a password, in UTF-8, and nothing else")
    return password
