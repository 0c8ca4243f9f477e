"""Files of tensors: their names, and one tensor after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.errors import ModelError
from hardpoint.plugins.parallel import Cut


def tensor_files(path: str) -> dict[Path, list[str]]:
    """Return the safetensors files at a path, with the names of their tensors.

    Raises:
        ModelError: there is none, one cannot be read, or two have the same tensor.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise ModelError(f"{path}: expected a safetensors file, or a folder of them; it has none")
    found: dict[Path, list[str]] = {}
    seen: dict[str, Path] = {}
    for file in files:
        with open_tensors(file) as opened:
            found[file] = list(opened.keys())
        for name in found[file]:
            if name in seen:
                raise ModelError(f"{path}: {seen[name].name} and {file.name} both have {name!r}")
            seen[name] = file
    if not seen:
        raise ModelError(f"{path}: expected tensors, it has none")
    return found


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a file of tensors.

    Raises:
        ModelError: it is missing or broken.
    """
    try:
        if not file.is_file():
            raise ModelError(f"{file}: expected a safetensors file, there is none")
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as cause:
        raise ModelError(f"{file}: expected a safetensors file; it cannot be read: {cause}") from (
            cause
        )


def read_tensor(file: Path, name: str, cut: Cut | None) -> torch.Tensor:
    """Read a tensor, or the part of it that is needed."""
    with open_tensors(file) as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor if cut is None else cut.of(tensor)
