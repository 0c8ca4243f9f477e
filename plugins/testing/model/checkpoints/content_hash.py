"""Checks of `WeightLoader.content_hash`, by which blocks of other weights are distinguished."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardpoint.plugins import ModelError, WeightLoader
from hardpoint.testing.suite import Rule, Violation, short_repr

from .changes import Tensors, changed_bytes, copied, differ, files_of

CONTENT_HASH = Rule(
    "content hash: a text that identifies the weights, wherever their files are",
    "return the results of hash_file for each of the weights' files, in an order that does not "
    "depend on their folder; or None",
)


def check_content_hash(
    path: Path, make: Callable[[Path], WeightLoader], read: Callable[[WeightLoader], Tensors]
) -> None:
    """Compare the content hash with the hashes of a copy and of modified copies.

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
        copy = copied(path, Path(folder))
        files = files_of(copy)
        for file in files:
            os.utime(file, ns=(1, 1))
        read(loader)
        for label, again in (
            ("after loading", loader),
            ("of a new instance", make(path)),
            ("of a copy in another folder", make(copy)),
        ):
            if (other_hash := _content_hash(again)) != first:
                raise CONTENT_HASH.violation(f"it was {first!r}, {label} {other_hash!r}")
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
    for changed in changed_bytes(content):
        file.write_bytes(changed)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        try:
            loader = make()
            other_weights = read(loader)
        except (Violation, ModelError):
            continue
        if differ(before, other_weights) and _content_hash(loader) == first:
            raise CONTENT_HASH.violation(
                f"a byte of {file.name} was changed, and weights with it; it is still {first!r}"
            )
    file.write_bytes(content)


def _content_hash(loader: WeightLoader) -> Any:
    return loader.content_hash(lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
