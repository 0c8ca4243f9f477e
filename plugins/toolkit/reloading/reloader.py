"""Replacement of the plugins whose files have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hardpoint.errors import BusyError, HardpointError
from hardpoint.plugins.component.manifest import Manifest, PluginEntry

from .copies import CopiedPackages, SourceCode, original_module, source_of

__all__ = ["PluginReloader", "ReplacePlugins"]

ReplacePlugins = Callable[[Mapping[str, str], str], object]
"""Replaces components live: takes new FQCNs by `kind/name`, and the origin of the change.

It raises a HardpointError if nothing has changed.
"""

_BUSY_SECONDS = 0.05
_STILL_SECONDS = 0.05
_WRITING_SECONDS = 1.0
_DISTRIBUTION = "hardpoint"


class PluginReloader:
    """Compares the files of enabled plugins with their last versions, and replaces the plugins.

    A changed package is copied under another name, because requests in flight use the earlier
    version. Plugins that import a changed module are replaced together.
    """

    def __init__(
        self,
        copies: CopiedPackages,
        manifest: Callable[[], Manifest],
        replace: ReplacePlugins,
        report: Callable[[str], object],
    ) -> None:
        """Read the files of the enabled plugins.

        Args:
            copies: folder for copies.
            manifest: returns the enabled plugins.
            replace: replaces plugins.
            report: called with a message about each reload or error.
        """
        self._copies, self._manifest = copies, manifest
        self._replace, self._report = replace, report
        self._packages: dict[str, SourceCode] = {}
        self._contents: dict[str, dict[str, bytes]] = {}
        self._pending: dict[str, set[str]] = {}
        self._find_packages()

    def folders(self) -> set[Path]:
        """Return the folders with the files of the enabled plugins."""
        self._find_packages()
        paths = (code.path for code in self._packages.values())
        return {path.parent if path.is_file() else path for path in paths}

    def reload(self) -> None:
        """Replace the plugins whose files have changed since the last call.

        After an error the earlier version stays, and the next change of a file tries again. A call
        waits for files that are being written, a second at most.
        """
        self._find_packages()
        for name, code in self._packages.items():
            before = self._contents[name]
            now = _read_when_written(code, before)
            changed = {
                module for module in {*before, *now} if before.get(module) != now.get(module)
            }
            if not changed:
                continue
            self._contents[name] = now
            self._reload_package(code, now, changed)

    def _reload_package(
        self, code: SourceCode, contents: dict[str, bytes], changed: set[str]
    ) -> None:
        """Replace the plugins that import changed modules.

        Modules that failed before are tried again. If they still fail, other plugins are replaced
        without them.
        """
        began = time.monotonic()
        pending = self._pending.pop(code.name, set())
        try:
            names = self._replace_users(code, contents, changed | pending)
        except (HardpointError, OSError) as error:
            self._report(f"reload of {code.name} failed, the earlier version stays: {error}")
            self._pending[code.name] = changed | pending
            if not pending - changed:
                return
            try:
                names = self._replace_users(code, contents, changed)
            except (HardpointError, OSError):
                return
            self._pending[code.name] = pending - changed
        if names:
            seconds = time.monotonic() - began
            self._report(f"reloaded {', '.join(names)} from {code.path} in {seconds:.2f} s")

    def _replace_users(
        self, code: SourceCode, contents: dict[str, bytes], changed: set[str]
    ) -> list[str]:
        """Replace the plugins that import some modules, and return their names.

        Raises:
            HardpointError: one cannot be replaced; nothing has changed.
        """
        modules = {**dict.fromkeys(changed, b""), **contents}  # also those that were deleted
        entries = [
            (entry, module)
            for entry, module in self._entries()
            if module.partition(".")[0] == code.name
            and not code.dependencies(module, modules).isdisjoint(changed)
        ]
        if not entries:
            return []
        copy = self._copies.add(code, contents)
        uses = {}
        for entry, module in entries:
            _, colon, attribute = entry.value.partition(":")
            uses[f"{entry.kind}/{entry.name}"] = (
                f"{copy}{module[len(code.name) :]}{colon}{attribute}"
            )
        origin = f"reload of {code.path}"
        while True:
            try:
                self._replace(uses, origin)
            except BusyError:  # another change is under way
                time.sleep(_BUSY_SECONDS)
            else:
                return [entry.name for entry, _ in entries]

    def _entries(self) -> list[tuple[PluginEntry, str]]:
        """Return the enabled third-party plugins with their modules."""
        return [
            (entry, original_module(entry.value.partition(":")[0]))
            for entry in self._manifest().entries
            if entry.distribution != _DISTRIBUTION
        ]

    def _find_packages(self) -> None:
        for _, module in self._entries():
            name = module.partition(".")[0]
            if name not in self._packages and (code := source_of(module)) is not None:
                self._packages[name], self._contents[name] = code, code.read()


def _read_when_written(code: SourceCode, before: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a package when they no longer change.

    Editors empty a file, or move it away, before they write it. So a file that had content
    and has none is waited for.
    """
    until = time.monotonic() + _WRITING_SECONDS
    now = code.read()
    while now != before and time.monotonic() < until:
        time.sleep(_STILL_SECONDS)
        earlier, now = now, code.read()
        if now == earlier and all(now.get(module) for module, text in before.items() if text):
            break
    return now
