"""Reloading of plugins after their files are saved: `reload_plugins=True` of LLM and AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Protocol

from hardpoint.errors import EngineClosedError
from hardpoint.toolkit.reloading import PluginWatcher, open_watcher

__all__ = ["LoopChanges", "watching_plugins"]

_POLL_SECONDS = 0.05


class WatchedPlugins(Protocol):
    """The plugins of an LLM or AsyncLLM."""

    def watch(self, watcher: PluginWatcher) -> None:
        """Replace plugins when a watcher reports that their files were saved."""


@contextlib.contextmanager
def watching_plugins(*, enabled: bool) -> Iterator[Callable[[WatchedPlugins], None]]:
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


class LoopChanges:
    """Replaces plugins for a thread that watches their files.

    A change waits for the first use of the engine, which binds it to an event loop.
    """

    def __init__(
        self,
        loop: Callable[[], asyncio.AbstractEventLoop | None],
        change: Callable[..., Coroutine[Any, Any, object]],
    ) -> None:
        """Use a function that returns the engine's loop, and the engine's `plugins.change`."""
        self._loop, self._change = loop, change
        self._ended = threading.Event()

    def end(self) -> None:
        """End the change that runs, if there is one, and refuse others. For any thread."""
        self._ended.set()

    def replace(self, uses: Mapping[str, str], origin: str) -> object:
        """Replace plugins, and wait until the engine has done so.

        Raises:
            HardpointError: nothing has changed.
            EngineClosedError: the engine was closed, or its loop was.
        """
        while (loop := self._loop()) is None:
            if self._ended.wait(_POLL_SECONDS):
                raise EngineClosedError("the engine was closed")
        if loop.is_closed():
            raise EngineClosedError("the event loop of the engine was closed")
        change = self._change(replace=dict(uses), origin=origin)
        future = asyncio.run_coroutine_threadsafe(change, loop)
        while not future.done():
            try:
                return future.result(_POLL_SECONDS)
            except TimeoutError:
                if self._ended.is_set() or loop.is_closed():
                    future.cancel()
                    raise EngineClosedError("the engine was closed") from None
        return future.result()
