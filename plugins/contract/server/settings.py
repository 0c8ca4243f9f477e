"""The settings of an engine that runs, as `GET /engines/settings` shows them."""

from __future__ import annotations

from typing import Any

import msgspec


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One value of the configuration.

    Attributes:
        value: plain data.
        origin: where it came from: a file, the environment, an argument, a live change.
        change: whether it changes live, or needs a restart.
    """

    value: Any
    origin: str
    change: str


class LiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine.

    Attributes:
        generation: generation of the plugins; each live change makes a new one.
        fingerprint: hash of all values and of the plugins, in hexadecimal.
        values: by dotted path.
    """

    generation: int
    fingerprint: str
    values: dict[str, Setting]
