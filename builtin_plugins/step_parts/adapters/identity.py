"""The files of an adapter, and its identity: their content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from hardpoint.plugins import ModelError
from hardpoint.toolkit.folders import real_path

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_LARGEST_CONFIG = 1 << 20
_LARGEST_TENSORS = 8 << 30
_LARGEST_HEADER = 16 << 20
_MOST_SHOWN = 4


class _Tensor(msgspec.Struct):
    """An entry of a header; metadata has no offsets."""

    data_offsets: tuple[int, int] | None = None


def content_hash(config: bytes, tensors: bytes) -> str:
    """Return the identity of an adapter: SHA-256 of its files."""
    digest = hashlib.sha256(struct.pack("<Q", len(config)))
    digest.update(config)
    digest.update(tensors)
    return digest.hexdigest()


def read_files(path: str) -> tuple[bytes, bytes]:
    """Return the contents of configuration and tensors of an adapter.

    Raises:
        ModelError: one is missing, too large, no regular file, or a link out of the folder.
    """
    folder = Path(path)
    return _read(folder, CONFIG, _LARGEST_CONFIG), _read(folder, TENSORS, _LARGEST_TENSORS)


class LinkedFolders:
    """Folders of links to the files of adapters.

    They stay when the files are removed, as by the program that wrote them.
    """

    def __init__(self) -> None:
        """Begin without a folder."""
        self._paths: set[str] = set()

    def __bool__(self) -> bool:
        """Return whether there is a folder."""
        return bool(self._paths)

    def add(self, path: str) -> str:
        """Return a new folder within an adapter's folder, with links to its two files.

        Raises:
            ModelError: a file is missing, or cannot be linked.
        """
        try:
            folder = tempfile.mkdtemp(dir=path)
            for name in (CONFIG, TENSORS):
                os.link(Path(path) / name, Path(folder) / name)
        except OSError as cause:
            raise ModelError(
                f"{path}: the files of the adapter cannot be linked: {cause}"
            ) from cause
        self._paths.add(folder)
        return folder

    def remove(self, used: Iterable[str] = ()) -> None:
        """Remove all folders but some, and the adapter's folder if nothing else is in it."""
        for folder in self._paths.difference(used):
            self._paths.discard(folder)
            with contextlib.suppress(OSError):  # the program may have removed it
                for name in (CONFIG, TENSORS):
                    (Path(folder) / name).unlink(missing_ok=True)
                Path(folder).rmdir()
                Path(folder).parent.rmdir()


def without_layers(modules: Sequence[str]) -> str:
    """Return the error of an adapter that changes layers which the model does not have."""
    listed = ", ".join(modules[:_MOST_SHOWN]) + (", ..." if len(modules) > _MOST_SHOWN else "")
    return f"the model has no linear layer {listed}, which the adapter changes"


def _read(folder: Path, name: str, limit: int) -> bytes:
    file = folder / name
    try:
        with open(real_path(folder, name, str(folder)), "rb", opener=_open_at_once) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{file}: expected a regular file")
            if status.st_size > limit:
                raise ModelError(f"{file}: expected at most {limit} bytes, got {status.st_size}")
            start = _checked_header(file, opened, status.st_size) if name == TENSORS else b""
            data = start + opened.read(status.st_size + 1 - len(start))
    except (OSError, ValueError) as error:
        pickles = [file.with_suffix(suffix) for suffix in (".bin", ".pt")]
        pickle_name = next((other.name for other in pickles if other.exists()), None)
        hint = f"; {pickle_name} is a pickle, which is never read" if pickle_name else ""
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{file}: cannot be read: {reason}{hint}") from None
    if len(data) != status.st_size:
        raise ModelError(f"{file}: its size, {status.st_size} bytes, changed while it was read")
    return data


def _checked_header(file: Path, opened: BinaryIO, size: int) -> bytes:
    """Return the header of a safetensors file, with the 8 bytes before it.

    Nothing else is read of a file with tensors that do not fill it.
    """
    start = opened.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
    if not 0 < length <= min(_LARGEST_HEADER, size - 8):
        raise ModelError(f"{file}: expected a safetensors file, got a header of {length} bytes")
    header = opened.read(length)
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{file}: expected the header of a safetensors file: {error}") from None
    ends = [tensor.data_offsets[1] for tensor in tensors.values() if tensor and tensor.data_offsets]
    if (end := max(ends, default=0)) != size - 8 - length:
        raise ModelError(
            f"{file}: expected {end} bytes of tensors, as the header has it, got "
            f"{size - 8 - length}"
        )
    return start + header


def _open_at_once(path: str, flags: int) -> int:
    """Open a path without links, and do not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
