"""Where engines that exchange blocks listen, and the keys by which they know each other."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from hardpoint.builtin_plugins.secret_files import read_secret
from hardpoint.plugins import ConfigError

_RANK = "{rank}"
_ENGINE = "{engine_id}"
_MOST_PATH_BYTES = 107  # of a unix socket
_KEY_CHARACTERS = 40
_LOCK_TRIES = 16  # each fails only if another store is closed just then


@dataclass(frozen=True)
class PeerKeys:
    """The CURVE keys of this engine."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        """Return the public key only."""
        return f"<PeerKeys {self.public.decode()}>"


def address_of_rank(
    address: str, path: str, rank: int, world_size: int, engine_id: str = ""
) -> str:
    """Return the address of a rank, checked.

    Args:
        address: ipc:///PATH or tcp://HOST:PORT, in which "{rank}" stands for the rank, and
            "{engine_id}" for the id of the engine.
        path: path of the setting, for messages.
        rank: rank of the worker.
        world_size: number of ranks.
        engine_id: `kv_connector.engine_id`; empty for none.

    Raises:
        ConfigError: it is no such address, or the same for several ranks, or needs an id.
    """
    if world_size > 1 and _RANK not in address:
        raise ConfigError(
            f"{path}: expected {_RANK} in it, because this engine has {world_size} ranks and each "
            f"has an address of its own, got {address!r}"
        )
    if _ENGINE in address and not engine_id:
        raise ConfigError(f"kv_connector.engine_id: expected one, for {_ENGINE} in {path}")
    result = address.replace(_RANK, str(rank)).replace(_ENGINE, engine_id)
    scheme, _, rest = result.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        if len(os.fsencode(rest)) > _MOST_PATH_BYTES:
            raise ConfigError(
                f"{path}: expected a path of at most {_MOST_PATH_BYTES} bytes, got {result!r}"
            )
        return result
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(
            f"{path}: expected ipc:///PATH, an absolute one, or tcp://HOST:PORT, got {result!r}"
        )
    if not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{path}: expected a port from 1 to 65535, got {result!r}")
    return result


def is_tcp(address: str) -> bool:
    """Return whether others than this machine's users can reach an address."""
    return address.startswith("tcp://")


def is_ipv6(address: str) -> bool:
    """Return whether an address is tcp://[HOST]:PORT."""
    return address.startswith("tcp://[")


class SocketPlace:
    """The place of an ipc socket, which is locked so that no other store takes it.

    The lock belongs to a file next to the socket; it ends with the process.
    """

    def __init__(self, address: str, path: str) -> None:
        """Take the place; make its folder if there is none.

        Args:
            address: ipc:///PATH.
            path: path of the setting, for messages.

        Raises:
            ConfigError: others can reach files in the folder, or a process listens there already.
        """
        self._file = Path(address.removeprefix("ipc://"))
        self._lock_file = self._file.with_name(f"{self._file.name}.lock")
        folder = self._file.parent
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as cause:
            raise ConfigError(
                f"{path}: cannot make the folder {str(folder)!r}: {cause.strerror}"
            ) from None
        if fault := _folder_fault(folder):
            raise ConfigError(f"{path}: {fault}")
        try:
            lock = self._lock()
        except OSError as cause:
            raise ConfigError(f"{path}: cannot lock {address!r}: {cause.strerror}") from None
        if lock is None or self._is_used():
            if lock is not None:
                os.close(lock)
            raise ConfigError(f"{path}: another process listens at {address!r}")
        self._descriptor: int | None = lock
        if os.path.lexists(self._file) and not stat.S_ISSOCK(self._file.lstat().st_mode):
            self._unlock()
            raise ConfigError(f"{path}: {str(self._file)!r} exists and is no socket")

    def _lock(self) -> int | None:
        """Return the descriptor of the locked file; None if another one has locked it."""
        for _ in range(_LOCK_TRIES):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._lock_file, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.lstat(self._lock_file)):
                    return descriptor
            except FileNotFoundError:
                pass  # who had locked it has just removed it
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)
        return None

    def _is_used(self) -> bool:
        """Return whether something listens that has no lock."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._file))
            except OSError:
                return False  # of a process that was killed
        return True

    def _unlock(self) -> None:
        if self._descriptor is not None:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Remove the socket and the lock; further calls do nothing."""
        if self._descriptor is not None:
            self._file.unlink(missing_ok=True)
        self._unlock()


def _folder_fault(folder: Path) -> str:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"expected a folder, not a link, at {str(folder)!r}"
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return (
            f"expected a folder that only this user can enter (chmod 700), got {str(folder)!r} "
            f"with mode {stat.S_IMODE(status.st_mode):o} of user {status.st_uid}"
        )
    return ""


def has_socket(address: str) -> bool:
    """Return whether there is a socket at an ipc address.

    Raises:
        PermissionError: somebody else could have made it, or can make one.
    """
    file = Path(address.removeprefix("ipc://"))
    try:
        if fault := _folder_fault(file.parent):
            raise PermissionError(f"{address!r}: {fault}")
        status = file.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{address!r} is no socket of this user")
    return True


def read_key_pair(file: str, path: str) -> PeerKeys:
    """Return the keys of this engine.

    Args:
        file: holds the secret one, 40 characters in Z85 as `zmq.curve_keypair` makes them; "~" at
            its start is this user's home.
        path: path of the setting, for messages.

    Raises:
        ConfigError: the file cannot be read, others can read it, or it holds no key.
    """
    file = os.path.expanduser(file)
    secret = read_secret(file, path, 2 * _KEY_CHARACTERS).strip()
    if not _is_key(secret):
        raise ConfigError(
            f"{path}: expected a secret key of {_KEY_CHARACTERS} characters in {file!r}, as "
            f"zmq.curve_keypair() makes it"
        )
    return PeerKeys(zmq.curve_public(secret), secret)


def public_key(text: str, path: str) -> bytes:
    """Return a public key, checked.

    Raises:
        ConfigError: it is not a public key.
    """
    key = text.encode()
    if not _is_key(key):
        raise ConfigError(
            f"{path}: expected a public key of {_KEY_CHARACTERS} characters, as "
            f"zmq.curve_keypair() makes it, got {len(text)} characters"
        )
    return key


def _is_key(key: bytes) -> bool:
    if len(key) != _KEY_CHARACTERS:
        return False
    try:
        zmq.curve_public(key)  # of any 32 bytes in Z85
    except zmq.ZMQError:
        return False
    return True
