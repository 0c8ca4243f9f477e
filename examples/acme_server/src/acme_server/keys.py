"""An authenticator that knows clients by the keys of an environment variable."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from hardpoint.plugins.server import Authenticator, Client


def key_authenticator(pairs: str) -> Authenticator:
    """Return a function that identifies the client of a call.

    Args:
        pairs: `name=key` with commas between them; the client "admin" is an administrator.
    """
    names: dict[bytes, str] = {}
    for pair in pairs.split(","):
        name, _, key = pair.partition("=")
        names[_hashed(key.strip())] = name.strip()

    async def authenticate(headers: Mapping[str, str], path: str) -> Client | None:  # noqa: ARG001
        scheme, _, key = headers.get("authorization", "").partition(" ")
        hashed = _hashed(key.strip())
        client = None
        for known, name in names.items():  # all of them, so that the time reveals nothing
            if hmac.compare_digest(known, hashed) and scheme.lower() == "bearer":
                client = name
        if client is None:
            return None
        return Client(
            name=client, cache_salt=client, tags={"client": client}, admin=client == "admin"
        )

    return Authenticator(authenticate=authenticate)


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
