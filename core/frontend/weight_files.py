"""Files of later weights: those that programs name, and those that hold tensors of theirs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from hardpoint import typed
from hardpoint.core.weights.updated_weights import tensor_files
from hardpoint.errors import shown, size_text
from hardpoint.plugins import EngineConfig, HardpointError, RequestError
from hardpoint.plugins.config_tables import LoadConfig, absolute_path

_MEMORY = Path("/dev/shm")
_PREFIX = "hardpoint-weights-"
_POLL_SECONDS = (0.002, 0.05)
"""The shortest and the longest time between two questions whether weights are prepared."""

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor]
"""Path of a safetensors file or a folder of them; or tensors by their names in the checkpoint."""


class WeightFiles:
    """The files of an engine's later weights; those of tensors are in shared memory, if it can."""

    def __init__(self) -> None:
        """Write nothing yet."""
        self._folders: set[Path] = set()

    def after(self, config: EngineConfig, weights: Weights, version: str | None) -> LoadConfig:
        """Return how weights are read after an update; tensors are written to a file.

        Earlier files of which later ones have all tensors are left out.

        Args:
            config: configuration of the engine.
            weights: the new ones.
            version: of the weights; None is the next number.

        Raises:
            RequestError: a field is wrong.
            ModelError: the files are missing or broken.
            HardpointError: there is no room for the tensors.
        """
        load = config.load
        version = _following(load.version) if version is None else version
        plain = {"use": load.use, "updates": (), "version": version}
        load = typed.convert(plain, LoadConfig, path="", error=RequestError)
        path = self._write(weights) if isinstance(weights, Mapping) else _path(weights)
        later, updates = _names(path), [path]
        for earlier in reversed(config.load.updates):
            if not (names := _names(earlier)) <= later:
                updates.append(earlier)
                later |= names
        return msgspec.structs.replace(load, updates=tuple(reversed(updates)))

    def keep(self, updates: Collection[str]) -> None:
        """Remove the files that were written and are none of these."""
        for folder in self._folders - {Path(path).parent for path in updates}:
            shutil.rmtree(folder, ignore_errors=True)
            self._folders.discard(folder)

    def close(self) -> None:
        """Remove all files that were written."""
        self.keep(())

    def _write(self, tensors: Mapping[str, Any]) -> str:
        """Write tensors to a file of their own; return its path.

        Raises:
            RequestError: they are no tensors by their names.
            HardpointError: there is no room for them.
        """
        if not tensors:
            raise RequestError("weights: expected tensors by their names, got none")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise RequestError(
                    f"weights: expected tensors by their names, got {shown(tensor)} for "
                    f"{shown(name)}"
                )
        size = sum(tensor.nbytes for tensor in tensors.values())
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_place(size)))
        self._folders.add(folder)
        # The library refuses tensors that share memory, as a head and its table do.
        alone = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        alone = {name: tensor.clone() for name, tensor in alone.items()}
        try:
            save_file(alone, folder / "weights.safetensors")
        except Exception as cause:
            self.keep([str(other / "_") for other in self._folders - {folder}])
            raise HardpointError(
                f"weights: {size_text(size)} cannot be written to {folder.parent}: {cause}"
            ) from cause
        return str(folder / "weights.safetensors")


def _place(size: int) -> Path | None:
    """Return the folder of shared memory if it has room; None is that of temporary files."""
    with contextlib.suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > size:
            return _MEMORY
    return None


def _path(weights: Any) -> str:
    """Return the absolute path of files.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(weights, str | os.PathLike) or not os.fspath(weights):
        raise RequestError(
            f"weights: expected a path, or tensors by their names, got {shown(weights)}"
        )
    return absolute_path(os.fspath(weights))


def _names(path: str) -> set[str]:
    return {name for names in tensor_files(path).values() for name in names}


def _following(version: str) -> str:
    """Return the number after a version.

    Raises:
        RequestError: it is no number.
    """
    if not version.isdecimal():
        raise RequestError(
            f"version: expected one, since the current version {version!r} is no number"
        )
    return str(int(version) + 1)


def poll_pauses() -> Iterator[float]:
    """Yield seconds to wait between two questions whether weights are prepared."""
    pause, longest = _POLL_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, longest)
