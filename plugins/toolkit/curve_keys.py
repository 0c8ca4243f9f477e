"""A folder of CURVE keys: the server's key and the keys of permitted clients.

    DIR/server.key, server.key_secret    the server's
    DIR/clients/NAME.key                 the public key of each client that may connect
    DIR/NAME/                            files for the client NAME, to be moved to its machine

A client may connect as long as its file is in `clients`; the folder is read again when it changes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq.auth

from hardpoint.errors import ConfigError, shown

__all__ = [
    "KeyFolder",
    "KeyPair",
    "check_new",
    "client_keys",
    "is_loopback",
    "make_client",
    "revoke_client",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SERVER, _CLIENT, _CLIENTS = "server", "client", "clients"
_PUBLIC, _SECRET = ".key", ".key_secret"


class KeyPair(NamedTuple):
    """The keys of one side, and the public key of the server.

    Attributes:
        public, secret: its own, in Z85.
        server: the public key of the server.
    """

    public: bytes
    secret: bytes
    server: bytes


class KeyFolder:
    """The keys of a server.

    Attributes:
        path: the folder.
        pair: the server's own keys.
    """

    def __init__(self, path: str, setting: str) -> None:
        """Read the server's keys.

        Args:
            setting: names it in messages.

        Raises:
            ConfigError: it has none, or others can read them.
        """
        self.path = Path(path)
        public, secret = _load(self.path / f"{_SERVER}{_SECRET}", setting)
        self.pair = KeyPair(public, secret, public)
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._names: dict[bytes, str] = {}
        self.names()

    def names(self) -> dict[bytes, str]:
        """Return the names of the clients that may connect now, by their public keys."""
        files = []
        with contextlib.suppress(OSError), os.scandir(self.path / _CLIENTS) as listed:
            for entry in listed:
                if entry.name.endswith(_PUBLIC) and entry.is_file():
                    state = entry.stat()
                    files.append((entry.name, state.st_mtime_ns, state.st_ino))
        seen = tuple(sorted(files))
        if seen != self._seen:
            self._seen, self._names = seen, {}
            for name, _, _ in seen:
                with contextlib.suppress(OSError, ValueError):  # removed or half written just now
                    public, _secret = zmq.auth.load_certificate(self.path / _CLIENTS / name)
                    self._names[public] = name.removesuffix(_PUBLIC)
        return self._names


def client_keys(path: str, setting: str) -> KeyPair:
    """Return the keys in the folder of a client.

    Raises:
        ConfigError: a file is missing, or others can read the secret one.
    """
    folder = Path(path)
    public, secret = _load(folder / f"{_CLIENT}{_SECRET}", setting)
    return KeyPair(public, secret, _load(folder / f"{_SERVER}{_PUBLIC}", setting)[0])


def make_client(path: str, name: str) -> Path:
    """Create a client's key pair, and the server's if missing; return the client's folder.

    Raises:
        ConfigError: as `check_new`; or the folder cannot be written.
    """
    check_new(path, name)
    folder = Path(path)
    client, listed = folder / name, folder / _CLIENTS / f"{name}{_PUBLIC}"
    try:
        with _private_files():
            (folder / _CLIENTS).mkdir(parents=True, exist_ok=True)
            if not (folder / f"{_SERVER}{_SECRET}").exists():
                zmq.auth.create_certificates(folder, _SERVER)
            client.mkdir()
            zmq.auth.create_certificates(client, _CLIENT)
            shutil.copyfile(folder / f"{_SERVER}{_PUBLIC}", client / f"{_SERVER}{_PUBLIC}")
            shutil.copyfile(client / f"{_CLIENT}{_PUBLIC}", listed)
    except OSError as cause:
        raise ConfigError(f"{str(folder)!r}: {cause.strerror or cause}") from None
    return client


def check_new(path: str, name: str) -> None:
    """Check that keys can be made for a client of a name.

    Raises:
        ConfigError: the name is malformed, or has keys.
    """
    _check_name(name)
    folder = Path(path)
    if (folder / name).exists() or (folder / _CLIENTS / f"{name}{_PUBLIC}").exists():
        raise ConfigError(f"{name}: expected a name without keys, {str(folder)!r} has some for it")


def revoke_client(path: str, name: str) -> None:
    """Let a client connect no more; a connection that it has ends.

    Raises:
        ConfigError: there is no such client.
    """
    _check_name(name)
    try:
        (Path(path) / _CLIENTS / f"{name}{_PUBLIC}").unlink()
    except OSError as cause:
        known = ", ".join(sorted(KeyFolder(path, "keys").names().values())) or "none"
        reason = f"expected the name of a client ({known}): {cause.strerror or cause}"
        raise ConfigError(f"{name}: {reason}") from None


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in (_SERVER, _CLIENTS):
        raise ConfigError(
            f"name: expected letters, digits, '_', '-' and '.', 64 at most, but not {_SERVER!r} or "
            f"{_CLIENTS!r}, got {shown(name)}"
        )


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _load(file: Path, setting: str) -> tuple[bytes, bytes]:
    """Return the keys in a file; the secret one is empty if the file has none."""
    where = f"{setting}: {str(file)!r}"
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        if file.name.endswith(_SECRET) and mode & 0o077:
            raise ConfigError(
                f"{where}: expected a file that its owner alone can read (0600), got {mode:04o}"
            )
        public, secret = zmq.auth.load_certificate(file)
    except OSError as cause:
        advice = "; `hardpoint keys new` makes keys" if isinstance(cause, FileNotFoundError) else ""
        raise ConfigError(f"{where}: {cause.strerror or cause}{advice}") from None
    except ValueError as cause:
        raise ConfigError(f"{where}: expected a file of keys: {cause}") from None
    return public, secret or b""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address or host name, which needs no keys."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
