"""The addresses of a server: sockets that are bound before the model loads."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import ConfigError

_log = logging.getLogger("hardpoint")

_UNIX = "unix:"
_OWNER_ONLY = 0o600
_HIGHEST_PORT = 65535
_SEND_BUFFER = 1 << 16
_SHORTEST_TIMEOUT = 10.0
_OTHER_DESCRIPTORS = 256


@dataclass(frozen=True)
class BoundAddress:
    """A socket that is bound, and does not listen yet.

    Attributes:
        host: host that it is bound to; None for a Unix socket.
        url: for people.
        path: path of a Unix socket.
        inode: inode of that path.
        is_encrypted: whether it speaks HTTPS.
    """

    socket: socket.socket
    host: str | None
    url: str
    path: Path | None = None
    inode: tuple[int, int] | None = None
    is_encrypted: bool = False

    def check(self) -> None:
        """Check that the address is still this one's.

        Raises:
            ConfigError: the file of a Unix socket is gone, or another one's.
        """
        if self.path is not None and _inode(self.path) != self.inode:
            raise ConfigError(f"{self.url}: another program took the address")

    def close(self) -> None:
        """Close the socket, and remove the file of a Unix socket unless it is another one's."""
        self.socket.close()
        if self.path is not None and _inode(self.path) == self.inode:
            self.path.unlink(missing_ok=True)


def bind(settings: ServerConfig) -> BoundAddress:
    """Return the users' address.

    Raises:
        ConfigError: it is in use, or cannot be bound.
    """
    if settings.uds is not None:
        return _bind_unix(settings.uds, int(settings.uds_mode, 8), "server.uds")
    return _bind_port(settings.host, settings.port, "server.port", settings)


def bind_admin(settings: ServerConfig) -> BoundAddress | None:
    """Return the admin address; None if there is none.

    Raises:
        ConfigError: it is malformed, in use, or without keys where it needs them.
    """
    if settings.admin is None:
        return None
    if settings.admin.startswith(_UNIX):
        return _bind_unix(settings.admin.removeprefix(_UNIX), _OWNER_ONLY, "server.admin")
    host, _, port = settings.admin.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise ConfigError(
            f'server.admin: expected "unix:PATH" or "HOST:PORT", got {settings.admin!r}'
        )
    if settings.admin_keys_file is None:
        raise ConfigError(
            f"server.admin_keys_file: expected a file of keys, because server.admin is a port, "
            f"{settings.admin!r}; a Unix socket needs none"
        )
    host = host.removeprefix("[").removesuffix("]")
    return _bind_port(host, int(port), "server.admin", settings)


def _bind_port(host: str, port: int, field: str, settings: ServerConfig) -> BoundAddress:
    bound: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of connections: what a client does not read waits here, and then in the engine, merged.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for hosts that vanish without a word
            milliseconds = round(1000 * max(settings.send_seconds, _SHORTEST_TIMEOUT))
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        bound.bind(address)
    except (OSError, UnicodeError) as cause:
        if bound is not None:
            bound.close()
        malformed = "a part of the name is empty or too long"
        reason = cause.strerror if isinstance(cause, OSError) else malformed
        raise ConfigError(f"{field}: {_joined(host, port)} cannot be bound: {reason}") from None
    actual = bound.getsockname()[1]
    scheme = "http" if settings.tls_certificate is None else "https"
    url = f"{scheme}://{_joined(host, actual)}"
    return BoundAddress(bound, host, url, is_encrypted=scheme == "https")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind_unix(name: str, mode: int, field: str) -> BoundAddress:
    path = Path(name).absolute()
    _remove_stale(path, field)
    bound = socket.socket(socket.AF_UNIX)
    try:
        with _umask(0o777 & ~mode):  # so that no one connects before a chmod
            bound.bind(str(path))
        return BoundAddress(bound, None, f"{_UNIX}{path}", path, _inode(path))
    except OSError as cause:
        bound.close()
        raise ConfigError(
            f"{field}: {str(path)!r} cannot be bound: {cause.strerror or cause}"
        ) from None


def _remove_stale(path: Path, field: str) -> None:
    """Remove a socket that no one listens on.

    Raises:
        ConfigError: somebody does, or there is another file.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(
                f"{field}: expected no file, or a socket that is not in use, at {str(path)!r}"
            )
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
            except OSError as cause:
                raise ConfigError(f"{field}: {str(path)!r}: {cause.strerror or cause}") from None
        raise ConfigError(f"{field}: another program listens on {str(path)!r}")


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def allow_descriptors(connections: int) -> None:
    """Raise the soft limit of open files, if so many connections need it; log it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised < needed:
        _log.warning(
            "server.limits.connections: %d need %d open files; this process may have %d",
            connections,
            needed,
            raised,
        )
    else:
        _log.info("the limit of open files was raised from %d to %d", soft, raised)
