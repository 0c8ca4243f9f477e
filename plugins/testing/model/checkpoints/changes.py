"""Modified checkpoints: a loader detects each change, or loads the present contents."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hardpoint.plugins import ModelConfig, ModelError, WeightLoader
from hardpoint.testing.suite import Rule, Violation

__all__ = [
    "CHANGED",
    "SECOND",
    "TAGS",
    "Reader",
    "Tensors",
    "changed_bytes",
    "check_changed_bits",
    "check_second",
    "check_tags",
    "copied",
    "differ",
    "files_of",
]

Tensors = Mapping[str, torch.Tensor]

CHANGED = Rule(
    "changed bits: a flipped bit is detected, or appears in the loaded weights",
    "read the files in each call, and keep nothing of an earlier instance; a cache needs the "
    "content, or the times of change, of the files in its key",
)
SECOND = Rule(
    "second checkpoint: a process that has loaded one checkpoint loads another one as it is",
    "keep the data of a checkpoint in the instance, not in its class or module",
)
TAGS = Rule(
    "tags: a file that begins with another tag is a ModelError, or loads as other weights",
    "compare the tag (magic number, version) at the beginning of a file with the format's tag",
)

_CHANGED_BYTES = 8
_TAG_BYTES = 4
_CONFIG = "config.json"


@dataclass(frozen=True)
class Reader:
    """Makes loaders of a suite, and reads checkpoints with them.

    Attributes:
        make: returns a new loader of a path.
        read: returns all weights of a loader.
    """

    make: Callable[[Path], WeightLoader]
    read: Callable[[WeightLoader], Tensors]

    def load(self, path: Path) -> tuple[ModelConfig, Tensors]:
        """Return configuration and weights by a new loader; copies, since files may be mapped."""
        loader = self.make(path)
        try:
            weights = {name: weight.clone() for name, weight in self.read(loader).items()}
            return loader.config(), weights
        finally:
            loader.close()

    def notices(self, path: Path, before: tuple[ModelConfig, Tensors]) -> bool:
        """Return whether a new loader refuses a checkpoint, or has something else than before."""
        try:
            config, weights = self.load(path)
        except (ModelError, Violation):
            return True
        return config != before[0] or differ(before[1], weights)


def check_changed_bits(path: Path, reader: Reader) -> None:
    """Flip bits of the weights, and digits of the configuration; load each time, and once more.

    Raises:
        Violation: no flip of a file is detected, or a later load has the earlier contents.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(path, Path(folder))
        before = reader.load(copy)
        for file in _weights_and_config(copy):
            content = file.read_bytes()
            noticed = count = 0
            for changed in changed_bytes(content):
                _write(file, changed)
                noticed += reader.notices(copy, before)
                count += 1
            _write(file, content)
            if not noticed:
                raise CHANGED.violation(
                    f"a bit of {file.name} was flipped at each of {count} places, and config() and "
                    f"weights() returned the same as before; expected a ModelError, or other "
                    f"values, for one of them"
                )
            if reader.notices(copy, before):
                raise CHANGED.violation(
                    f"{file.name} has its content of the start again, and config() or weights() "
                    f"gave something else than at the start; expected the same"
                )


def check_second(path: Path, reader: Reader) -> None:
    """Load two checkpoints of the same form and other numbers, one after the other and in turn.

    Raises:
        Violation: one of them has something of the other.
    """
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        first_copy, two = copied(path, Path(first)), copied(path, Path(second))
        before = reader.load(first_copy)
        if not _make_other(two, reader, before):
            raise SECOND.violation(
                f"a checkpoint with other numbers, at another path, gave the weights of "
                f"{path.name}, which was loaded before; expected its own"
            )
        other = reader.load(two)
        loaders = {"first": reader.make(first_copy), "second": reader.make(two)}
        for name in ("second", "first", "second"):
            actual = (loaders[name].config(), reader.read(loaders[name]))
            config, weights = before if name == "first" else other
            if actual[0] != config or differ(weights, actual[1]):
                raise SECOND.violation(
                    f"with two loaders in a process, the one of the {name} checkpoint gave other "
                    f"weights than when it was alone; expected the same"
                )
        for loader in loaders.values():
            loader.close()


def check_tags(path: Path, reader: Reader) -> None:
    """Change the first bytes of the file of weights.

    Raises:
        Violation: the loader does not notice.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(path, Path(folder))
        before = reader.load(copy)
        file = _largest(copy)
        content = file.read_bytes()
        tag = content[:_TAG_BYTES]
        other = bytes(byte ^ 0xFF for byte in tag)
        _write(file, other + content[_TAG_BYTES:])
        if not reader.notices(copy, before):
            raise TAGS.violation(
                f"{file.name} begins with {other!r} instead of {tag!r}, and config() and weights() "
                f"returned the same as before; expected a ModelError"
            )


def copied(path: Path, folder: Path) -> Path:
    """Return the path of a copy of a checkpoint in a folder."""
    copy = folder / path.name
    if path.is_dir():
        shutil.copytree(path, copy)
    else:
        shutil.copy(path, copy)
    return copy


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint."""
    return sorted(file for file in (path, *path.rglob("*")) if file.is_file())


def changed_bytes(content: bytes) -> Iterator[bytes]:
    """Yield the content with one byte changed, at several places; a digit is changed to another."""
    digits = [i for i, byte in enumerate(content) if byte in b"12345678"]
    places = [len(content) * part // _CHANGED_BYTES for part in range(1, _CHANGED_BYTES)]
    if digits:
        places += [
            digits[len(digits) * part // _CHANGED_BYTES] for part in range(1, _CHANGED_BYTES)
        ]
    for place in (*places, len(content) - 1):
        if 0 <= place < len(content):
            yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def differ(before: Tensors, after: Tensors) -> bool:
    """Return whether weights are missing or have other values."""
    return any(name not in after or not torch.equal(w, after[name]) for name, w in before.items())


def _make_other(path: Path, reader: Reader, before: tuple[ModelConfig, Tensors]) -> bool:
    """Change a byte of a checkpoint so that it can be loaded, and has other weights.

    Returns:
        Whether there is such a byte among the tried ones.
    """
    file = _largest(path)
    content = file.read_bytes()
    for changed in changed_bytes(content):
        _write(file, changed)
        try:
            _, weights = reader.load(path)
        except (ModelError, Violation):
            continue
        if differ(before[1], weights):
            return True
    _write(file, content)
    return False


def _largest(path: Path) -> Path:
    return max(files_of(path), key=lambda file: file.stat().st_size)


def _weights_and_config(path: Path) -> list[Path]:
    configs = [file for file in files_of(path) if file.name == _CONFIG]
    return list(dict.fromkeys([_largest(path), *configs]))


def _write(path: Path, content: bytes) -> None:
    """Replace a file, which may be mapped, by a newer one."""
    newest = path.stat().st_mtime_ns + 10**9
    other = path.with_name(f"{path.name}.new")
    other.write_bytes(content)
    os.utime(other, ns=(newest, newest))
    other.replace(path)
