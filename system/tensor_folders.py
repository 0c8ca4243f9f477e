"""Tensors that a program gives to the processes of an engine: safetensors files in folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.errors import HardpointError, RequestError, shown, size_text

if TYPE_CHECKING:
    import torch

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
            _write_tensors(folder / name, tensors)
            for other, data in (others or {}).items():
                (folder / other).write_bytes(data)
        except Exception as cause:
            self.remove([folder])
            raise HardpointError(
                f"{self._field}: {size_text(size)} cannot be written to {folder.parent}: {cause}"
            ) from cause
        return folder

    def _check(self, tensors: Any) -> None:
        import torch  # noqa: PLC0415 - LLM and AsyncLLM are imported without it

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


def _write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file.

    Raises:
        OSError: there is no room for it.
        SafetensorError: the same.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - no need of the core distribution

    # The library refuses tensors that share memory, as a head and its table do.
    alone = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file({name: tensor.clone() for name, tensor in alone.items()}, file)


def _place(size: int) -> Path | None:
    """Return the folder of shared memory if it has room; None is that of temporary files."""
    with contextlib.suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > size:
            return _MEMORY
    return None


def _remove(folders: Collection[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
