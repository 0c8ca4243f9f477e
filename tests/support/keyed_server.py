"""A server with a real engine on the scripted model, and keys of two clients."""

from __future__ import annotations

import contextlib

from hardpoint import AsyncLLM
from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed
from hardpoint.testing import ScriptedClock

from .http_server import running
from .scripted_server import server_config, write_model

ALICE, BOB = "alices-key-of-many-characters", "bobs-key-of-many-characters"


def keys_text(requests_per_minute=None):
    """Return a file of keys; only bob's key has a rate, if there is one."""
    rate = "" if requests_per_minute is None else f"requests_per_minute = {requests_per_minute}"
    return f"""
[[key]]
name = "alice"
key = "{ALICE}"

[[key]]
name = "bob"
key = "{BOB}"
{rate}
"""


def write_keys(folder, requests_per_minute=None):
    """Write a file of keys that only its owner reads; return its path."""
    path = folder / "keys.toml"
    path.write_text(keys_text(requests_per_minute))
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def keyed_server(folder, requests_per_minute=None, **tables):
    """Run a server with further tables of configuration.

    Its `keys` is the path of the file of keys, and its `clock` the clock of their rates.
    """
    path, clock = write_keys(folder, requests_per_minute), ScriptedClock()
    keys = installed(KeyStore(str(path), clock=clock))
    config = server_config(write_model(folder), **tables)
    with running(AsyncLLM(config=config), authenticators=[keys]) as server:
        server.keys, server.clock = path, clock
        yield server
