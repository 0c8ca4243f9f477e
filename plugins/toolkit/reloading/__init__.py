"""Reloading of plugins whose files were saved, for `hardpoint serve --reload-plugins`."""

from .reloader import PluginReloader, ReplacePlugins
from .watcher import PluginWatcher, open_watcher

__all__ = ["PluginReloader", "PluginWatcher", "ReplacePlugins", "open_watcher"]
