"""Hashes of the files of a wheel and of an installed distribution."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO

import importlib_metadata

from .statement import ProofError

__all__ = [
    "SIGNATURE_FILE",
    "STATEMENT_FILE",
    "find_module",
    "info_folder",
    "package_files",
    "package_paths",
    "read_metadata_file",
    "record_entry",
    "wheel_files",
]

STATEMENT_FILE = "hardpoint-proof.json"
SIGNATURE_FILE = "hardpoint-proof.sigstore.json"
_UNHASHED = frozenset(
    {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
    | {STATEMENT_FILE, SIGNATURE_FILE}
)
"""Files of `dist-info` that the installer writes, and the proof itself."""
_UNCHECKED_PYC = 0b01
"""Flags of bytecode that Python runs without a look at its source."""


def wheel_files(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Return the SHA-256 of each file of a wheel, by name, as `package_files` does.

    Raises:
        ProofError: a name leads out of the wheel, is there twice, or cannot be part of a proof.
    """
    files: dict[str, str] = {}
    for item in wheel.infolist():
        name = item.filename
        if item.is_dir() or _is_unhashed(name):
            continue
        _check_name(name)
        if name in files:
            raise ProofError(f"{name}: expected one file of this name in the wheel, got two")
        if stat.S_ISLNK(item.external_attr >> 16):
            raise ProofError(f"{name}: expected a file, got a symbolic link")
        if PurePosixPath(name).suffix in (".pth", ".pyc") or ".data/" in name:
            raise ProofError(
                f"{name}: expected no .pth file, no bytecode and no .data folder in a package with "
                f"a proof, since they change how Python starts or which code it runs"
            )
        with wheel.open(item) as file:
            files[name] = _sha256(file)
    return files


def package_files(distribution: importlib_metadata.Distribution) -> dict[str, str]:
    """Return the SHA-256 of each file of an installed distribution, by its name in the wheel.

    Raises:
        ProofError: a file is missing or a symbolic link, or a name leads elsewhere.
    """
    return {
        name: _file_hash(path, name) for name, path in sorted(package_paths(distribution).items())
    }


def package_paths(distribution: importlib_metadata.Distribution) -> dict[str, Path]:
    """Return the path of each file of an installed distribution, by its name in the wheel.

    Files that were added to the package's folders count, files that the installer writes do not.

    Raises:
        ProofError: a name leads elsewhere, or a folder is a symbolic link.
    """
    info = info_folder(distribution)
    root, editable = info.parent, _is_editable(info)
    paths: dict[str, Path] = {}
    for recorded in _recorded(distribution):
        name = recorded.as_posix()
        if _is_script(name):
            continue
        _check_name(name)
        is_cache = recorded.hash is None and _is_bytecode(name) and _is_cache_of_source(root / name)
        if name.endswith(".pth") and not (editable and name.startswith("__editable__")):
            raise ProofError(f"{name}: expected no .pth file in a package with a proof")
        if not is_cache:
            paths[name] = root / name
    outside = {name for name in paths if not name.startswith(f"{info.name}/")}
    for folder in _folders(outside):
        paths |= _walk(root, root / folder)
    paths |= _module_bytecode(root, outside)
    paths |= _walk(root, info)
    if editable:
        for module in _modules(distribution):
            paths |= _source_files(module)
    return {name: path for name, path in paths.items() if not _is_unhashed(name)}


def _recorded(
    distribution: importlib_metadata.Distribution,
) -> list[importlib_metadata.PackagePath]:
    try:
        return list(distribution.files or ())
    except (ValueError, TypeError, OSError, csv.Error) as cause:
        raise ProofError(f"RECORD: expected a list of files: {cause}") from cause


def info_folder(distribution: importlib_metadata.Distribution) -> Path:
    """Return the `dist-info` folder of an installed distribution.

    Raises:
        ProofError: it has none.
    """
    path = getattr(distribution, "_path", None)
    if not isinstance(path, Path) or path.suffix != ".dist-info" or path.is_symlink():
        raise ProofError("expected an installed package with a dist-info folder")
    return path


def read_metadata_file(
    distribution: importlib_metadata.Distribution, name: str, limit: int
) -> bytes | None:
    """Return a file of the `dist-info` folder, None if there is none.

    Raises:
        ProofError: it is not a plain file, or larger than `limit` bytes.
    """
    path = info_folder(distribution) / name
    try:
        with _open(path, name) as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    if len(data) > limit:
        raise ProofError(f"{name}: expected at most {limit} bytes, got more")
    return data


def record_entry(name: str, data: bytes) -> str:
    """Return the line of a file for the RECORD of a wheel."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def find_module(module: str) -> Path | None:
    """Return the file that an import of `module` would run, None for a namespace package.

    Imports nothing.
    """
    parts = module.split(".")
    try:
        spec = find_spec(parts[0])
    except (ValueError, ImportError):  # a module without a spec, set by a program
        return None
    for depth in range(2, len(parts) + 1):
        if spec is None:
            return None
        spec = PathFinder.find_spec(
            ".".join(parts[:depth]), list(spec.submodule_search_locations or ())
        )
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _source_files(module: str) -> dict[str, Path]:
    origin = find_module(module)
    if origin is None:
        raise ProofError(f"{module}: expected a module or a package with an __init__.py")
    if origin.name != "__init__.py":
        return {origin.name: origin, **_module_bytecode(origin.parent, {origin.name})}
    return _walk(origin.parent.parent, origin.parent)


def _module_bytecode(root: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return bytecode of single modules that does not follow their sources."""
    stems = [name.removesuffix(".py") for name in names if "/" not in name and name[-3:] == ".py"]
    caches = [path for stem in stems for path in (root / "__pycache__").glob(f"{stem}.*.pyc")]
    return {
        path.relative_to(root).as_posix(): path for path in caches if not _is_cache_of_source(path)
    }


def _modules(distribution: importlib_metadata.Distribution) -> set[str]:
    points = {point.value.partition(":")[0] for point in distribution.entry_points}
    top_level = (distribution.read_text("top_level.txt") or "").split()
    return {name.partition(".")[0] for name in (*points, *top_level)}


def _folders(names: Iterable[str]) -> set[str]:
    """Return the outermost regular packages, and folders of namespace packages with files."""
    folders = {str(PurePosixPath(name).parent) for name in names} - {"."}
    packages = {str(PurePosixPath(name).parent) for name in names if name.endswith("/__init__.py")}
    return {f for f in folders if not any(f.startswith(f"{other}/") for other in packages)}


def _walk(root: Path, folder: Path) -> dict[str, Path]:
    if folder.is_symlink():
        raise ProofError(f"{folder.name}: expected a folder, got a symbolic link")
    paths = {}
    for place, folders, files in os.walk(folder):
        for name in [*files, *(name for name in folders if Path(place, name).is_symlink())]:
            path = Path(place, name)
            relative = path.relative_to(root).as_posix()
            if not (_is_bytecode(relative) and _is_cache_of_source(path)):
                paths[relative] = path
    return paths


def _is_cache_of_source(path: Path) -> bool:
    """Return whether Python compares the bytecode of a file with its source."""
    source = path.parent.parent / f"{path.name.partition('.')[0]}.py"
    try:
        with _open(path, path.name) as file:
            header = file.read(8)
    except FileNotFoundError:
        return True
    return source.is_file() and int.from_bytes(header[4:8], "little") != _UNCHECKED_PYC


def _check_name(name: str) -> None:
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ":" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise ProofError(f"{name[:200]!r}: expected the relative path of a file of the package")


def _is_script(name: str) -> bool:
    """Return whether an installer made the file: a command, which imports the package."""
    parts = name.split("/")
    return parts[0] == ".." and parts[-2:-1] in (["bin"], ["Scripts"])


def _is_bytecode(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix == ".pyc" and path.parent.name == "__pycache__"


def _is_unhashed(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder.endswith(".dist-info") and "/" not in folder and file in _UNHASHED


def _is_editable(info: Path) -> bool:
    try:
        url = json.loads((info / "direct_url.json").read_bytes())
        return url["dir_info"]["editable"] is True
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _file_hash(path: Path, name: str) -> str:
    try:
        with _open(path, name) as file:
            return _sha256(file)
    except FileNotFoundError:
        raise ProofError(f"{name}: expected a file, but it is missing") from None


def _open(path: Path, name: str) -> IO[bytes]:
    """Open a plain file; never a symbolic link, a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as cause:
        raise ProofError(f"{name}: expected a plain file that can be read: {cause}") from cause
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProofError(f"{name}: expected a plain file")
    return os.fdopen(descriptor, "rb")


def _sha256(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
