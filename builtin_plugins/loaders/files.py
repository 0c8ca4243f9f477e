"""Reading the files of a model, which may be damaged or hostile."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hardpoint.plugins import HardpointError, ModelError, ModelFiles
from hardpoint.toolkit.folders import real_path
from hardpoint.toolkit.hf_config import short

_MAX_TEXT_BYTES = 1 << 28
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def regular_file(path: Path, where: str) -> Path:
    """Return the path of a regular file, or of a link to one.

    Raises:
        ModelError: there is none; opening a pipe or a device could wait for ever.
    """
    try:
        if path.is_file():
            return path
        kind = "something else, a directory or a pipe for example" if path.exists() else None
    except (OSError, ValueError) as cause:  # the name is too long, for example
        raise ModelError(f"{where}: expected a file, got an invalid path: {cause}") from cause
    if kind is None:
        raise ModelError(f"{where} cannot be read: No such file or directory")
    raise ModelError(f"{where}: expected a regular file, got {kind}")


def refuse_missing(files: ModelFiles, names: Iterable[str]) -> None:
    """Refuse files that lack weights.

    Args:
        files: files of the model.
        names: names of the weights that they lack.

    Raises:
        ModelError: there is one.
    """
    if missing := list(names):
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"model: {files.name!r} lacks {len(missing)} weights: {some}")


def fingerprint(paths: Iterable[Path]) -> str | None:
    """Return a text that differs whenever a file has other content; None if one is missing."""
    try:
        stats = [(path.resolve(), path.stat()) for path in paths]
    except (OSError, RuntimeError, ValueError):
        return None
    # The time of change is the system's own; the time of modification can be set to any value.
    return "; ".join(f"{p} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for p, s in stats)


def refuse_pickle(name: str, where: str) -> None:
    """Reject a pickle file, by its name.

    Raises:
        ModelError: it is one.
    """
    if name.lower().endswith(_PICKLES):
        raise ModelError(
            f"{where}: {name} is a pickle, which can run any code when it is read, and is never "
            f"read; expected weights in .safetensors or .gguf files (transformers converts them: "
            f"save_pretrained)"
        )


def file_inside(folder: Path, name: str, where: str) -> Path:
    """Return the path of a regular file in a folder, which a file there names.

    Links may lead where `real_path` allows.

    Raises:
        ModelError: the name is not a name, leads out of the folder, or belongs to a pickle or to no
            file.
    """
    if not name or "\0" in name:
        raise ModelError(f"{where}: expected the name of a file, got {short(name)}")
    refuse_pickle(name, where)
    try:
        exists = real_path(folder, name, where).exists()
    except OSError as cause:  # the name is too long, for example
        raise ModelError(f"{where}: {short(name)} cannot be read: {cause.args[-1]}") from cause
    if not exists:
        raise ModelError(f"{folder.name}: {name} is missing; {where} names it")
    return regular_file(folder / name, f"{folder.name}/{name}")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file of text or of a vocabulary.

    Raises:
        ModelError: it is missing, no regular file or too large.
    """
    where = f"{path.parent.name}/{path.name}"
    regular_file(path, where)
    try:
        if (size := path.stat().st_size) > _MAX_TEXT_BYTES:
            raise ModelError(f"{where}: expected at most {_MAX_TEXT_BYTES} bytes, got {size}")
        return path.read_bytes()
    except OSError as cause:
        raise ModelError(f"{where} cannot be read: {cause.strerror}") from cause


def read_text(path: Path) -> str:
    """Return the content of a text file, with line ends as Unix has them.

    Raises:
        ModelError: it is missing, no regular file, too large or not UTF-8.
    """
    try:
        text = read_bytes(path).decode()
    except ValueError as cause:
        raise ModelError(f"{path.parent.name}/{path.name} is not valid UTF-8: {cause}") from cause
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelError: the file is missing, is no JSON or has no object.
    """
    where = f"{path.parent.name}/{path.name}"
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{where} is not valid JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise ModelError(f"{where}: expected an object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def refusing_damage(where: str) -> Iterator[None]:
    """Turn errors of libraries over a damaged file into a ModelError."""
    try:
        yield
    except (HardpointError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as cause:  # a panic in Rust is no Exception
        kind = type(cause).__name__
        raise ModelError(f"{where} is damaged: {kind}: {str(cause)[:400]}") from cause
