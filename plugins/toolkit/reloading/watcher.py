"""A thread that reloads plugins when one of their files is saved."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from hardpoint.errors import ConfigError, install_command
from hardpoint.plugins.component.manifest import Manifest

from .copies import CopiedPackages
from .reloader import PluginReloader, ReplacePlugins

__all__ = ["PluginWatcher", "open_watcher"]

_DEBOUNCE_MS = 100
_STEP_MS = 20
_STOP_SECONDS = 10.0


def open_watcher() -> PluginWatcher:
    """Return a watcher; call it before the engine opens, and `start` afterwards.

    Raises:
        ConfigError: the package watchfiles is not installed.
    """
    try:
        import watchfiles  # noqa: F401, PLC0415 - an extra
    except ModuleNotFoundError:
        raise ConfigError(
            "reload_plugins: expected the package watchfiles to be installed: "
            f"{install_command('reload')}"
        ) from None
    return PluginWatcher()


class PluginWatcher:
    """Watches the files of enabled plugins in a thread of its own."""

    def __init__(self) -> None:
        """Create the folder for copies, which processes that start later can import from."""
        self._copies = CopiedPackages()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self,
        manifest: Callable[[], Manifest],
        replace: ReplacePlugins,
        report: Callable[[str], object] | None = None,
    ) -> None:
        """Watch the files.

        Args:
            manifest, replace: as for `PluginReloader`.
            report: called with messages; by default they go to standard error.
        """
        reloader = PluginReloader(self._copies, manifest, replace, report or _print)
        name = "hardpoint-reload"
        self._thread = threading.Thread(
            target=self._watch, args=(reloader,), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and delete the copies."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
        self._copies.close()

    def _watch(self, reloader: PluginReloader) -> None:
        import watchfiles  # noqa: PLC0415 - an extra

        while not self._stop.is_set():
            folders = reloader.folders()
            reloader.reload()  # saved before the watch began
            if not folders:
                self._stop.wait(1.0)
                continue
            for _ in watchfiles.watch(
                *folders,
                watch_filter=watchfiles.PythonFilter(),
                debounce=_DEBOUNCE_MS,
                step=_STEP_MS,
                rust_timeout=1000,
                yield_on_timeout=True,
                stop_event=self._stop,
                raise_interrupt=False,
            ):
                reloader.reload()
                if reloader.folders() != folders:  # other plugins are enabled
                    break


def _print(message: str) -> None:
    print(f"hardpoint: {message}", file=sys.stderr, flush=True)
