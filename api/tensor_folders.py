"""Folders of tensors that a program gives, for the processes of the engine to read."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hardpoint.core.weights.updated_weights import write_tensors
from hardpoint.errors import shown, size_text
from hardpoint.plugins import HardpointError, RequestError

_MEMORY = Path("/dev/shm")


class TensorFolders:
    """Folders in shared memory, if it has room; they go with this object, if not before."""

    def __init__(self, prefix: str, field: str) -> None:
        """Write nothing yet.

        Args:
            prefix: start of the names of folders.
            field: names the tensors in messages.
        """
        self._prefix, self._field = prefix, field
        self._folders: set[Path] = set()
        weakref.finalize(self, _remove, self._folders)

    def write(self, name: str, tensors: Any, others: Mapping[str, bytes] | None = None) -> Path:
        """Write tensors to a folder of their own; return its path.

        Args:
            name: name of the safetensors file.
            tensors: by name.
            others: contents of other files, by name.

        Raises:
            RequestError: they are no tensors by their names.
            HardpointError: there is no room for them.
        """
        self._check(tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())
        folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=_place(size)))
        self._folders.add(folder)
        try:
            write_tensors(folder / name, tensors)
            for other, data in (others or {}).items():
                (folder / other).write_bytes(data)
        except Exception as cause:
            self.remove([folder])
            raise HardpointError(
                f"{self._field}: {size_text(size)} cannot be written to {folder.parent}: {cause}"
            ) from cause
        return folder

    def _check(self, tensors: Any) -> None:
        expected = f"{self._field}: expected tensors by their names"
        if not isinstance(tensors, Mapping):
            raise RequestError(f"{expected}, got {shown(tensors)}")
        if not tensors:
            raise RequestError(f"{expected}, got none")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise RequestError(f"{expected}, got {shown(tensor)} for {shown(name)}")

    def keep(self, used: Collection[Path]) -> None:
        """Remove all folders but these."""
        self.remove(self._folders - set(used))

    def remove(self, folders: Collection[Path]) -> None:
        """Remove folders."""
        self._folders -= set(folders)
        _remove(folders)


def _place(size: int) -> Path | None:
    """Return the folder of shared memory if it has room; None is that of temporary files."""
    with contextlib.suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > size:
            return _MEMORY
    return None


def _remove(folders: Collection[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
