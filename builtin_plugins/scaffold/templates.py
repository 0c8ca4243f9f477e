"""The templates of packages: files in the wheel, with names in their places.

A folder per version has the changes of the version: `common/`, the files of every package, and
`kinds/KIND.txt`, the parts that differ by kind. A file that a version lacks is the one of the
version before; an empty one is removed. So each version that a package was made from can be
rendered again, which an update needs.

A wheel has no files that begin with a dot: `dot_` stands for it. Each has the ending `.txt`, since
none is what it becomes before it is rendered.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import TypeAlias

from hardpoint.plugins import RequestError

from .names import PackageSpec

Files: TypeAlias = dict[str, str]
"""Text by path in the package, with / between folders."""

_PLACE = re.compile(r"@([A-Z_]+)@")
_SECTION = re.compile(r"^=== (\w+)\n", re.MULTILINE)


def templates_folder() -> Traversable:
    """Return the folder of the templates in the wheel."""
    return files(__package__) / "templates"


class Templates:
    """All versions of the templates."""

    def __init__(self, folder: Traversable | None = None) -> None:
        """Read the folder; None is the one in the wheel."""
        folder = folder or templates_folder()
        versions = {int(version.name): version for version in folder.iterdir()}
        self._versions: list[Mapping[str, str]] = [
            dict(_texts(versions[n])) for n in sorted(versions)
        ]

    @property
    def newest(self) -> int:
        """The newest version; the first one is 1."""
        return len(self._versions)

    def kinds(self) -> list[str]:
        """Return the kinds that the newest version has templates of."""
        texts = self._texts(self.newest)
        return sorted(
            PurePosixPath(path).stem for path in texts if PurePosixPath(path).parts[0] == "kinds"
        )

    def render(self, spec: PackageSpec, changes: Mapping[str, str] | None = None) -> Files:
        """Return the files of a package, in the version that its specification names.

        Args:
            spec: inputs of the package.
            changes: sections that replace the kind's sections, by name; they have no placeholders.

        Raises:
            RequestError: the class's name is taken by something that a file imports.
        """
        texts = self._texts(spec.version)
        names = spec.places()
        _, *parts = _SECTION.split(texts[f"kinds/{spec.kind}.txt"])
        filled = (_filled(part.rstrip("\n"), names) for part in parts[1::2])
        sections = dict(zip(parts[::2], filled, strict=True)) | dict(changes or {})
        places = {name.upper(): text for name, text in sections.items()} | names
        rendered: Files = {}
        for path, text in texts.items():
            if path.startswith("common/"):
                target = _filled(path[len("common/") : -len(".txt")], places).replace("dot_", ".")
                rendered[target] = _filled(text, places)
        for path, text in rendered.items():
            if path.endswith(".py"):
                _check_names(text, spec)
        return rendered

    def _texts(self, version: int) -> Mapping[str, str]:
        texts: dict[str, str] = {}
        for changed in self._versions[:version]:
            texts |= changed
        return {
            path: text for path, text in texts.items() if text or path.endswith("/py.typed.txt")
        }


def _texts(folder: Traversable, prefix: str = "") -> Files:
    texts: Files = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            texts |= _texts(entry, f"{prefix}{entry.name}/")
        else:
            texts[f"{prefix}{entry.name}"] = entry.read_text(encoding="utf-8")
    return texts


def _filled(text: str, places: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda place: places[place[1]], text)


def _check_names(source: str, spec: PackageSpec) -> None:
    """Raise if a module has the class's name twice."""
    bound: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            from_itself = getattr(node, "module", None) == spec.module
            bound += [] if from_itself else [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.ClassDef) and node.name != spec.class_name:
            bound.append(node.name)
    if spec.class_name in bound:
        raise RequestError(
            f"NAME: expected another name than {spec.name!r}: its class would have the name "
            f"{spec.class_name}, which the module imports"
        )
