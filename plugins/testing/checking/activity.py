"""Imports, writes, connections and processes of a plugin, from the interpreter's audit events."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOST = 100  # entries of a list; code that names files by a counter must not fill the report


def _opened(args: tuple[Any, ...]) -> str | None:
    path, mode, flags = args
    is_written = any(letter in mode for letter in "wax+") if isinstance(mode, str) else False
    if isinstance(path, int) or not (is_written or (flags or 0) & _WRITING):
        return None
    return os.fsdecode(path)


def _address(args: tuple[Any, ...]) -> str:
    address = args[1]
    if isinstance(address, tuple):
        return ":".join(map(str, address[:2]))
    return os.fsdecode(address) if isinstance(address, bytes) else str(address)


def _command(args: tuple[Any, ...]) -> str:
    command = args[1]
    if isinstance(command, list | tuple):
        return " ".join(os.fsdecode(part) for part in command)
    return os.fsdecode(command)


_EVENTS: dict[str, tuple[str, Callable[[tuple[Any, ...]], str | None]]] = {
    "open": ("wrote", _opened),
    "os.mkdir": ("wrote", lambda args: os.fsdecode(args[0])),
    "os.remove": ("wrote", lambda args: os.fsdecode(args[0])),
    "os.rename": ("wrote", lambda args: os.fsdecode(args[1])),
    "os.symlink": ("wrote", lambda args: os.fsdecode(args[1])),
    "os.link": ("wrote", lambda args: os.fsdecode(args[1])),
    "os.truncate": ("wrote", lambda args: str(args[0])),
    "socket.connect": ("connected", _address),
    "socket.sendto": ("connected", _address),
    "socket.bind": ("listened", _address),
    "subprocess.Popen": ("started", _command),
    "os.posix_spawn": ("started", _command),
    "os.exec": ("started", _command),
    "os.system": ("started", lambda args: os.fsdecode(args[0])),
    "os.fork": ("started", lambda _args: "a fork of the process"),
    "os.forkpty": ("started", lambda _args: "a fork of the process"),
}


class ActivityWatch:
    """Records activity of the code of some packages, from `start` until the process ends.

    An event counts if a function of the packages is on the stack: indirect calls count, too.
    Code that is not Python, and other processes, are not seen.
    """

    def __init__(self, packages: Iterable[str], folder: str) -> None:
        """Create a watch.

        Args:
            packages: names of packages or modules.
            folder: paths in it are shown as such; the child's own, which is deleted.
        """
        self._packages = tuple(packages)
        self._folder = os.path.realpath(folder)
        self._noting = threading.local()
        kinds = ["imported", *(kind for kind, _ in _EVENTS.values())]
        self._found: dict[str, dict[str, None]] = {kind: {} for kind in kinds}
        self._more = dict.fromkeys(self._found, 0)

    def start(self) -> None:
        """Start to note."""
        sys.addaudithook(self._hook)
        self._import, self._import_module = builtins.__import__, importlib.import_module
        builtins.__import__, importlib.import_module = self._importing, self._importing_module

    def _importing(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Import as Python does, and record it: audit events omit loaded modules."""
        level = kwargs.get("level", args[2] if len(args) > 2 else 0)
        if not level:
            self._note_import(name, sys._getframe(1))
        return self._import(name, globals, *args, **kwargs)

    def _importing_module(self, name: str, package: str | None = None) -> Any:
        """Import as `importlib.import_module` does; note it."""
        if not name.startswith("."):
            self._note_import(name, sys._getframe(1))
        return self._import_module(name, package)

    def _note_import(self, name: str, importer: FrameType) -> None:
        if self._owns(importer.f_globals.get("__name__") or ""):
            self._note("imported", name.partition(".")[0])

    def report(self) -> dict[str, list[str]]:
        """Return the noted names, paths, addresses and commands, by kind of event."""
        report = {kind: list(entries) for kind, entries in self._found.items()}
        known = {*sys.stdlib_module_names, "hardpoint", *self._packages}
        known |= {package.partition(".")[0] for package in self._packages}
        report["imported"] = sorted(name for name in report["imported"] if name not in known)
        for kind, count in self._more.items():
            if count:
                report[kind].append(f"and {count} more")
        return report

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        noted = _EVENTS.get(event)
        if noted is None or getattr(self._noting, "on", False):
            return
        self._noting.on = True  # what follows may itself open a file
        try:
            if self._is_plugins(sys._getframe(1)):
                kind, describe = noted
                self._note(kind, describe(args))
        except Exception:
            pass
        finally:
            self._noting.on = False

    def _note(self, kind: str, entry: str | None) -> None:
        if entry is None:
            return
        if kind == "wrote":
            path = os.path.realpath(entry)
            inside = path == self._folder or path.startswith(f"{self._folder}{os.sep}")
            if path.endswith(".pyc") or "__pycache__" in path:
                return
            entry = f"its temporary folder{path[len(self._folder) :]}" if inside else path
        entries = self._found[kind]
        if entry in entries:
            return
        if len(entries) < _MOST:
            entries[entry] = None
        else:
            self._more[kind] += 1

    def _is_plugins(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if self._owns(frame.f_globals.get("__name__") or ""):
                return True
            frame = frame.f_back
        return False

    def _owns(self, module: str) -> bool:
        return any(
            module == package or module.startswith(f"{package}.") for package in self._packages
        )
