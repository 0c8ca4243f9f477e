"""Reloading of plugins whose files are saved: `LLM(reload_plugins=True)`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from hardpoint.toolkit.reloading import open_watcher

from .plugins import PluginGroup

__all__ = ["watching_plugins"]


@contextlib.contextmanager
def watching_plugins(*, enabled: bool) -> Iterator[Callable[[PluginGroup], None]]:
    """Yield a function that starts to watch the files of plugins.

    Args:
        enabled: without it, nothing is watched.

    Raises:
        ConfigError: the package watchfiles is not installed.
    """
    if not enabled:
        yield lambda _: None
        return
    watcher = open_watcher()
    try:
        yield lambda plugins: plugins.watch(watcher)
    except BaseException:
        watcher.close()
        raise
