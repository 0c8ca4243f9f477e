"""Copies of the packages of plugins, which can be imported next to the earlier versions."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .import_graph import dependencies, renamed

__all__ = ["CopiedPackages", "SourceCode", "original_module", "source_of"]

_SUFFIX = re.compile(r"__reload_\d+")


def original_module(module: str) -> str:
    """Return the name of a module without the suffix of a copy."""
    return _SUFFIX.sub("", module, count=1)


@dataclass(frozen=True)
class SourceCode:
    """The source code of a top-level package or module.

    Attributes:
        name: its name.
        path: its folder, or its file.
    """

    name: str
    path: Path

    def files(self) -> dict[str, Path]:
        """Return its Python files by the dotted names of their modules."""
        if self.path.is_file():
            return {self.name: self.path}
        files: dict[str, Path] = {}
        for file in sorted(self.path.rglob("*.py")):
            parts = [self.name, *file.relative_to(self.path).with_suffix("").parts]
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        return files

    def read(self) -> dict[str, bytes]:
        """Return the content of its files by the names of their modules."""
        contents: dict[str, bytes] = {}
        for module, file in self.files().items():
            try:
                contents[module] = file.read_bytes()
            except FileNotFoundError:
                continue
        return contents

    def dependencies(self, module: str, contents: dict[str, bytes]) -> set[str]:
        """Return a module and those of the package that it imports, directly or not."""
        packages = {name for name, file in self.files().items() if file.stem == "__init__"}
        return dependencies(module, contents, packages)


def source_of(module: str) -> SourceCode | None:
    """Return the source code of a module's top-level package; None if it has no Python files."""
    name = module.partition(".")[0]
    if name == "__main__":
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return SourceCode(name, file.parent if spec.submodule_search_locations else file)


class CopiedPackages:
    """A temporary folder on `sys.path` with copies of packages; child processes inherit it."""

    def __init__(self) -> None:
        """Create the folder; open the engine after it."""
        self._folder, self._owner = Path(tempfile.mkdtemp(prefix="hardpoint-reload-")), os.getpid()
        self._count = 0
        sys.path.append(str(self._folder))

    def add(self, code: SourceCode, contents: dict[str, bytes]) -> str:
        """Copy a package, and return the name of the copy.

        Args:
            contents: content of its files by the names of their modules.
        """
        self._count += 1
        name = f"{code.name}__reload_{self._count}"
        files = code.files()
        copied = {
            files[module]: renamed(content, code.name, name)
            for module, content in contents.items()
            if module in files
        }
        if code.path.is_file():
            (self._folder / f"{name}.py").write_bytes(copied[code.path])
            return name
        for file in code.path.rglob("*"):
            if not file.is_file() or "__pycache__" in file.parts:
                continue
            copy = self._folder / name / file.relative_to(code.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if file in copied:
                copy.write_bytes(copied[file])
            else:
                copy.symlink_to(file.absolute())
        return name

    def close(self) -> None:
        """Delete the folder; a fork of the process that made it keeps it."""
        if os.getpid() != self._owner:
            return
        if str(self._folder) in sys.path:
            sys.path.remove(str(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)
