"""Checks of `WeightLoader.content_hash`, by which blocks of other weights are distinguished."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hardpoint.plugins import ModelError, WeightLoader
from hardpoint.testing.suite import Rule, Violation, short_repr

Tensors = Mapping[str, torch.Tensor]

_CHANGED_BYTES = 8

CONTENT_HASH = Rule(
    "content hash: a text that says what the weights are, the same wherever their files lie",
    "return what hash_file returns for each of the weights' files, in an order that does not "
    "depend on their folder; or None",
)


def check_content_hash(
    path: Path, make: Callable[[Path], WeightLoader], read: Callable[[WeightLoader], Tensors]
) -> None:
    """Compare the hash with that of a copy, and of changed copies.

    Args:
        path: path of a checkpoint.
        make: returns a new loader of one.
        read: returns all weights of a loader.

    Raises:
        Violation: a hash is wrong.
    """
    loader = make(path)
    first = _content_hash(loader)
    if first is None:
        return
    if not isinstance(first, str) or not first:
        raise CONTENT_HASH.violation(
            f"content_hash returned {short_repr(first)}, expected a text or None"
        )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copy(path, copy)
        files = [file for file in (copy, *copy.rglob("*")) if file.is_file()]
        for file in files:
            os.utime(file, ns=(1, 1))
        read(loader)
        for what, again in (
            ("after loading", loader),
            ("of a new instance", make(path)),
            ("of a copy in another folder", make(copy)),
        ):
            if (found := _content_hash(again)) != first:
                raise CONTENT_HASH.violation(f"it was {first!r}, {what} {found!r}")
        before = read(make(copy))
        for file in files:
            _check_changed(file, first, before, lambda: make(copy), read)


def _check_changed(
    file: Path,
    first: str,
    before: Tensors,
    make: Callable[[], WeightLoader],
    read: Callable[[WeightLoader], Tensors],
) -> None:
    """Change single bytes of a file; where other weights are read, the hash is another one."""
    content, times = file.read_bytes(), file.stat()
    for changed in _with_changed_bytes(content):
        file.write_bytes(changed)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        try:
            loader = make()
            found = read(loader)
        except (Violation, ModelError):
            continue
        if _differ(before, found) and _content_hash(loader) == first:
            raise CONTENT_HASH.violation(
                f"a byte of {file.name} was changed, and weights with it; it is still {first!r}"
            )
    file.write_bytes(content)


def _content_hash(loader: WeightLoader) -> Any:
    return loader.content_hash(lambda path: hashlib.sha256(path.read_bytes()).hexdigest())


def _with_changed_bytes(content: bytes) -> Iterator[bytes]:
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


def _differ(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    return any(name not in after or not torch.equal(w, after[name]) for name, w in before.items())
