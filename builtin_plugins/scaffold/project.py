"""The folder of a package: made whole or not at all, and updated to newer templates."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hardpoint.plugins import HardpointError, RequestError
from hardpoint.typed import convert

from .merging import conflict_line, merge
from .names import PackageSpec, check_form
from .templates import Files, Templates

_TABLE = "tool.hardpoint.template"
_PROJECT = "pyproject.toml"


def check_new_folder(folder: Path) -> None:
    """Raise unless a package may be made in a folder: there is none, or it is empty.

    Raises:
        RequestError: it has something, which the message names.
    """
    try:
        if folder.is_dir():
            if file_name := next(iter(sorted(path.name for path in folder.iterdir())), None):
                raise RequestError(
                    f"--into: expected a new or empty folder, {folder} has {file_name}"
                )
        elif folder.exists() or folder.is_symlink():
            raise RequestError(f"--into: expected a folder, but {folder} is a file")
        elif not _existing(folder).is_dir():
            raise RequestError(f"--into: expected a folder, but {_existing(folder)} is a file")
    except OSError as cause:
        raise RequestError(f"--into: {folder} cannot be read: {cause.strerror}") from cause


def make(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a new package; if one cannot be written, none is.

    Raises:
        HardpointError: the system refuses a file.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        try:
            for path, text in files.items():
                file = scratch / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8", newline="\n")
            for entry in sorted(scratch.iterdir()):
                entry.rename(folder / entry.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as cause:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise HardpointError(f"{folder} cannot be written: {cause.strerror}") from cause


@dataclass(frozen=True)
class FileUpdate:
    """Change of a file by an update.

    Attributes:
        what: name of the change.
        text: its new text; None leaves it, or leaves it out.
        conflicts: number of places that the author has to decide.
    """

    what: str
    text: bytes | None = None
    conflicts: int = 0


def read_spec(folder: Path, templates: Templates) -> PackageSpec:
    """Return the specification that a package was made from.

    Raises:
        RequestError: it was not made by these templates, or by newer ones.
    """
    path = folder / _PROJECT
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise RequestError(f"--update: {path} cannot be read: {cause.strerror}") from cause
    except ValueError as cause:
        raise RequestError(f"--update: {path} is no TOML: {cause}") from cause
    table = tables.get("tool", {}).get("hardpoint", {}).get("template")
    if table is None:
        raise RequestError(
            f"--update: {path} has no table [{_TABLE}]: the package was not made by "
            "`hardpoint plugins new`"
        )
    spec = convert(table, PackageSpec, path=f"{path}: {_TABLE}", error=RequestError)
    if not 1 <= spec.version <= templates.newest:
        raise RequestError(
            f"{path}: {_TABLE}.version: expected 1 to {templates.newest}, got {spec.version}: "
            "a newer Hardpoint has made the package"
        )
    if spec.kind not in templates.kinds():
        raise RequestError(
            f"{path}: {_TABLE}.kind: expected one of {', '.join(templates.kinds())}, got "
            f"{spec.kind!r}"
        )
    check_form(spec, f"{path}: {_TABLE}.name")
    return spec


def plan_update(folder: Path, spec: PackageSpec, templates: Templates) -> dict[str, FileUpdate]:
    """Return the change of each file of a package by the newest templates, by path.

    The author's changes stay; later changes of the templates are added. A file that
    the author has removed stays removed, and a file that the templates no longer have is removed
    unless the author has changed it.

    Raises:
        RequestError: a file cannot be read, or has conflicts of an earlier update.
    """
    base = templates.render(spec)
    newest = msgspec.structs.replace(spec, version=templates.newest)
    wanted = templates.render(newest)
    label = f"template {newest.version}"
    paths = sorted({**base, **wanted})
    return {path: _change(folder / path, base, wanted, path, label) for path in paths}


def update(folder: Path, changes: Mapping[str, FileUpdate]) -> None:
    """Write the changes to the files of a package, each at once.

    The file with the version of the templates is the last: until then, the update can be
    made again.

    Raises:
        HardpointError: the system refuses a file.
    """
    for path, change in sorted(changes.items(), key=lambda item: item[0] == _PROJECT):
        try:
            if change.text is not None:
                _replace(folder / path, change.text)
            elif change.what == "removed":
                (folder / path).unlink()
        except OSError as cause:
            raise HardpointError(f"{folder / path} cannot be written: {cause.strerror}") from cause


def _change(file: Path, base: Files, wanted: Files, path: str, label: str) -> FileUpdate:
    ours = _read(file)
    old, new = base.get(path), wanted.get(path)
    if ours is not None and (line := conflict_line(ours)) is not None:
        raise RequestError(f"--update: {file}, line {line}: decide this conflict first")
    if old == new:
        return FileUpdate("unchanged")
    if ours is None:
        return FileUpdate("stays removed") if old is not None else _written("added", new or "")
    text = ours.replace("\r\n", "\n")
    if new is None:
        return FileUpdate("removed" if text == old else "kept, no longer part of the template")
    merged, conflicts = merge(old or "", text, new, label)
    if merged == text:
        return FileUpdate("unchanged")
    change = "in conflict" if conflicts else "updated" if text == old else "merged"
    return _written(change, merged.replace("\n", "\r\n") if "\r\n" in ours else merged, conflicts)


def _written(change: str, text: str, conflicts: int = 0) -> FileUpdate:
    return FileUpdate(change, text.encode(), conflicts)


def _read(file: Path) -> str | None:
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise RequestError(f"--update: {file} cannot be read: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise RequestError(f"--update: {file} is not in UTF-8: {cause}") from cause


def _replace(file: Path, text: bytes) -> None:
    """Write a file whole or not at all, with the mode that it has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mode = file.stat().st_mode if file.exists() else None
    target = file.resolve()  # a link stays one
    scratch = target.with_name(f".{target.name}.new")
    try:
        scratch.write_bytes(text)
        if mode is not None:
            scratch.chmod(mode)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def _existing(folder: Path) -> Path:
    return next(parent for parent in folder.absolute().parents if parent.exists())
