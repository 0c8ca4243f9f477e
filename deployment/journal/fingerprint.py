"""The fingerprint of a model's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hardpoint.plugins import ModelFiles

_WHOLE_BYTES = 1 << 20
"""Files up to this size are hashed as a whole."""
_PIECE_BYTES = 1 << 16
"""Of larger ones, so much of their begin, their middle and their end."""


def model_fingerprint(files: ModelFiles) -> str:
    """Return a hash of names, sizes and pieces of a model's files; not of where they are."""
    path = files.path
    every = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    digest = hashlib.sha256()
    for file in every:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(_pieces(file))
    return digest.hexdigest()[:32]


def _pieces(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _WHOLE_BYTES:
            return opened.read()
        pieces = []
        for start in (0, size // 2, size - _PIECE_BYTES):
            opened.seek(start)
            pieces.append(opened.read(_PIECE_BYTES))
        return b"".join(pieces)
