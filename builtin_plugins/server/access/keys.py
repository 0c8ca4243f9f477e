"""Keys of clients: hashed, compared in constant time, read from a file and read again on change.

A key is found by its SHA-256. That is no password hash: keys are random and long, such as those of
`openssl rand -hex 32`, so that no one finds one by trying.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import ConfigError
from hardpoint.plugins.server import Authenticator, Client, InstalledExtension
from hardpoint.typed import Strict, convert

_log = logging.getLogger("hardpoint")

ENVIRONMENT = "HARDPOINT_API_KEY"
"""Environment variable of a single key."""

_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_KEY = re.compile(r"[\x21-\x7e]{1,1024}")
_SHORT = 16
_MAX_BYTES = 1 << 20
_MAX_KEYS = 10_000
_CHECK_SECONDS = 1.0


class _Settings(Strict):
    """The fields of a table `[[key]]` besides the key itself; for the meaning, see `Client`."""

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    cache_salt: str | None = None
    tags: dict[str, str] = {}
    min_priority: int = 0
    max_priority: int = 2**31 - 1
    max_timeout: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    kv_transfer: bool = False
    trace: bool = False
    requests_per_minute: Annotated[int, Meta(ge=1)] | None = None


@dataclass(frozen=True)
class KeyEntry:
    """The hash of a key and its client.

    Attributes:
        digest: SHA-256 of the key; in no representation of the object.
    """

    digest: bytes = field(repr=False)
    client: Client = field(repr=False)

    @property
    def name(self) -> str:
        """Name of the client."""
        return self.client.name


class KeyStore:
    """The keys that requests may have."""

    def __init__(
        self,
        path: str | None,
        single: str | None = None,
        *,
        setting: str = "server.keys_file",
        admin: bool = False,
        apart_from: KeyStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the keys.

        Args:
            path: path of the TOML file; None if there is no file.
            single: a further key, of the client "default".
            setting: the field of the configuration that names the file, for messages.
            admin: whether they are keys of administrators.
            apart_from: keys that these must not be.
            clock: seconds.

        Raises:
            ConfigError: the file is wrong, or others may read or change it.
        """
        self._path = None if path is None else Path(path)
        self._what, self._admin, self._clock = setting, admin, clock
        self._apart_from = apart_from
        self._single = (
            [] if single is None else [entry_of(single, Client(name="default", admin=admin))]
        )
        self._seen, self._problem = self._state(), ""
        self._checked_at = clock()
        self._entries = self._read()

    @property
    def entries(self) -> Sequence[KeyEntry]:
        """The keys as they are now."""
        return self._entries

    @property
    def names(self) -> list[str]:
        """Names of the clients."""
        return [entry.name for entry in self._entries]

    def find(self, key: str) -> Client | None:
        """Return the entry of a key. The time depends on the number of keys alone."""
        entry = self._entry(key)
        return None if entry is None else entry.client

    def _entry(self, key: str) -> KeyEntry | None:
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        match: KeyEntry | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                match = entry
        return match

    async def authenticate(
        self,
        headers: Mapping[str, str],
        path: str,  # noqa: ARG002
    ) -> Client | None:
        """Return the client of the key in `Authorization: Bearer` or `x-api-key`, if it is one."""
        self.reload_changed()
        scheme, _, token = headers.get("authorization", "").partition(" ")
        keys = [token.strip()] if scheme.lower() == "bearer" else []
        if "x-api-key" in headers:
            keys.append(headers["x-api-key"].strip())
        entry: KeyEntry | None = None
        for key in keys:
            entry = self._entry(key) or entry
        return None if entry is None else entry.client

    def reload_changed(self) -> None:
        """Read the file again if it is another one than before; look at most once a second."""
        if self._path is None or self._clock() - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = self._clock()
        if self._state() != self._seen:
            self.reload()

    def reload(self) -> None:
        """Read the file again; keep the keys there are, and log why, if it is wrong."""
        state = self._state()
        try:
            self._entries = self._read()
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):
                state = None  # so that it is read again: the cause may pass
            if str(error) != self._problem:
                _log.error("%s; the keys from before stay", error)
            self._problem = str(error)
        else:
            self._problem = ""
            _log.info("%s: %d keys were read", self._what, len(self._entries))
        self._seen = state

    def _state(self) -> tuple[int, ...] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)

    def _read(self) -> list[KeyEntry]:
        if self._path is None:
            return list(self._single)
        text = _read_private(self._path, self._what)
        entries = [*self._single, *_parsed(text, self._what, admin=self._admin)]
        names: dict[str, int] = {}
        digests: dict[bytes, str] = {}
        for index, entry in enumerate(entries):
            if entry.name in names:
                raise ConfigError(f"{self._what}: two keys have the name {entry.name!r}")
            if entry.digest in digests:
                raise ConfigError(
                    f"{self._what}: {digests[entry.digest]!r} and {entry.name!r} have the same key"
                )
            names[entry.name], digests[entry.digest] = index, entry.name
        others = () if self._apart_from is None else self._apart_from.entries
        for other in others:
            if other.digest in digests:
                raise ConfigError(
                    f"{self._what}: the key of {digests[other.digest]!r} is that of the user "
                    f"{other.name!r}; expected keys of administrators alone"
                )
        return entries


def entry_of(key: str, client: Client) -> KeyEntry:
    """Return the entry of a key in plain text.

    Raises:
        ConfigError: it is not a key; the message does not quote it.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"key {client.name!r}: expected 1 to 1024 visible ASCII characters, such as "
            f"`openssl rand -hex 32` writes, got {len(key)} characters"
        )
    if len(key) < _SHORT:
        _log.warning(
            "key %r: it has %d characters; one of fewer than %d may be found by trying",
            client.name,
            len(key),
            _SHORT,
        )
    return _entry(hashlib.sha256(key.encode()).digest(), client)


def _entry(digest: bytes, client: Client) -> KeyEntry:
    # A salt of its own that shows neither the key nor its hash.
    if not client.cache_salt:
        salt = hashlib.sha256(b"hardpoint cache salt of a key\0" + digest).hexdigest()
        client = msgspec.structs.replace(client, cache_salt=salt)
    return KeyEntry(digest, client)


def single_key(option: str | None) -> str | None:
    """Return the key of the option `--api-key` or of the environment, which loses it.

    Programs that the server starts do not inherit it then.

    Raises:
        ConfigError: it is empty, which would leave a server open that was meant to be closed.
    """
    in_environment = os.environ.pop(ENVIRONMENT, None)
    if option is not None:
        _log.warning("--api-key: every user of this machine sees it; %s hides it", ENVIRONMENT)
    for name, key in (("--api-key", option), (ENVIRONMENT, in_environment)):
        if key is not None:
            if not key:
                raise ConfigError(f"{name}: expected a key, got an empty text")
            return key
    return None


@dataclass(frozen=True)
class Stores:
    """The keys of a server.

    Attributes:
        users: None if requests need no key.
        admin: keys of administrators; None without a file of them.
    """

    users: KeyStore | None
    admin: KeyStore | None

    def reload(self) -> None:
        """Read all files again."""
        for store in (self.users, self.admin):
            if store is not None:
                store.reload()


def stores_of(settings: ServerConfig, option: str | None) -> Stores:
    """Return the keys that a configuration names.

    Args:
        option: the key of `single_key`.

    Raises:
        ConfigError: a file or a key is wrong.
    """
    single, path = option, settings.keys_file
    users = KeyStore(path, single) if single or path else None
    admin = None
    if settings.admin_keys_file is not None:
        setting = "server.admin_keys_file"
        admin = KeyStore(settings.admin_keys_file, setting=setting, admin=True, apart_from=users)
    return Stores(users, admin)


def installed(store: KeyStore) -> InstalledExtension:
    """Return the keys as an authenticator of the server."""
    return InstalledExtension("keys", "keys", Authenticator(authenticate=store.authenticate))


def _read_private(path: Path, setting: str) -> str:
    """Return the text of a file that no other user can read or change.

    Raises:
        ConfigError: others can, or it cannot be read.
    """
    try:
        folder, real = path.parent.resolve(strict=True), path.resolve(strict=True)
        if not real.is_relative_to(folder):
            raise ConfigError(f"{setting}: {str(path)!r} is a link out of its folder")
        opened = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _check_private(os.fstat(opened), path, setting)
            content = os.read(opened, _MAX_BYTES + 1)
        finally:
            os.close(opened)
    except OSError as cause:
        raise ConfigError(f"{setting}: {str(path)!r} cannot be read: {cause.strerror}") from cause
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{setting}: {str(path)!r} has more than {_MAX_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{setting}: expected UTF-8, got none at byte {cause.start}") from None


def _check_private(status: os.stat_result, path: Path, setting: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{setting}: {str(path)!r} is no plain file")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{setting}: {str(path)!r} belongs to neither this user nor root")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o027:
        raise ConfigError(
            f"{setting}: {str(path)!r} has the mode {mode:04o}, with which others can read it or "
            "its group can change it; expected 0600 or 0640 (chmod 600)"
        )


def _parsed(text: str, setting: str, *, admin: bool) -> list[KeyEntry]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:  # its text may quote the key
        place = re.search(r"\(at [^()]*\)$", str(cause))
        where = place[0] if place else "somewhere"
        raise ConfigError(f"{setting}: expected TOML, got something else {where}") from None
    tables: Any = document.pop("key", None)
    if document:
        raise ConfigError(f"{setting}: expected tables [[key]] alone, got {next(iter(document))!r}")
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{setting}: expected at least one table [[key]]")
    if len(tables) > _MAX_KEYS:
        raise ConfigError(f"{setting}: expected at most {_MAX_KEYS} keys, got {len(tables)}")
    return [_entry_of(table, f"{setting}: key[{i}]", admin=admin) for i, table in enumerate(tables)]


def _entry_of(table: Any, path: str, *, admin: bool) -> KeyEntry:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected a table [[key]]")
    secrets: Sequence[Any] = [table.pop(name, None) for name in ("key", "hash")]
    settings = convert(table, _Settings, path=path)
    if settings.min_priority > settings.max_priority:
        raise ConfigError(
            f"{path}.min_priority: expected at most max_priority ({settings.max_priority}), "
            f"got {settings.min_priority}"
        )
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    fields["cache_salt"] = settings.cache_salt or ""
    client = Client(**fields, admin=admin)
    match secrets:
        case [str(key), None]:
            return entry_of(key, client)
        case [None, str(hashed)]:
            match = _HASH.fullmatch(hashed)
            if match is None:
                raise ConfigError(
                    f'{path}.hash: expected "sha256:" and 64 hexadecimal digits in lower case'
                )
            entry = _entry(bytes.fromhex(match[1]), client)
        case _:
            raise ConfigError(f"{path}: expected either `hash` or `key`, as a text")
    return entry
