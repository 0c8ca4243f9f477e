"""torch's settings around a plugin's call, for code that runs also where torch is not imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def read_nothing() -> None:
    """Return the settings where there are none."""


READ: list[Callable[[], Any]] = [read_nothing]
"""Its item reads the settings; `torch_state` puts its own in as soon as it is imported."""


def changed(before: Any, plugin: object, method: str, *, threads: bool = True) -> None:
    """Put settings back that a call has changed, and log which plugin it was.

    Args:
        before: the settings before the call; None if torch was not imported yet.
        plugin: names it.
        method: method of the call.
        threads: whether the number of threads is put back, too.
    """
    if before is not None:
        sys.modules["hardpoint.host.system.torch_state"].put_back(
            before, plugin, method, threads=threads
        )
