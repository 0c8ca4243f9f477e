"""An adapter as one rank needs it: cut to the rows and columns of its matrices, in its dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hardpoint.plugins import ModelError
from hardpoint.plugins.model import LinearMatrix

from .files import AdapterFiles, Change, read_adapter
from .identity import TENSORS


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in CPU memory.

    Attributes:
        content: hash of its files.
        changes: by the name that `WorkerHalf.linear` gets for a matrix of this rank.
        unknown: modules for which this rank has no matrix.
    """

    content: str
    changes: Mapping[str, Change]
    unknown: list[str]

    @property
    def rank(self) -> int:
        """The largest rank of its changes."""
        return max((len(change.a) for change in self.changes.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""
        return sum(c.a.nbytes + c.b.nbytes for c in self.changes.values())


def load_adapter(
    path: str, max_rank: int, matrices: Mapping[str, LinearMatrix], dtype: torch.dtype
) -> HostAdapter:
    """Read an adapter, and cut it to the matrices of this rank.

    Raises:
        ModelError: see `read_adapter`; or a matrix has another shape than the model's.
    """
    files: AdapterFiles = read_adapter(path, max_rank)
    places: dict[str, list[str]] = {}
    for name, matrix in matrices.items():
        places.setdefault(matrix.stored_as, []).append(name)
    changes: dict[str, Change] = {}
    unknown: list[str] = []
    for module, change in files.changes.items():
        if module not in places:
            unknown.append(module)
        for name in places.get(module, ()):
            changes[name] = _cut(f"{path}/{TENSORS}: {module}", change, matrices[name], dtype)
    return HostAdapter(files.content, changes, sorted(unknown))


def _cut(where: str, change: Change, matrix: LinearMatrix, dtype: torch.dtype) -> Change:
    rows, columns = matrix.shape
    got = (change.b.shape[0], change.a.shape[1])
    if got != (rows, columns):
        raise ModelError(
            f"{where}: expected lora_A of {columns} columns and lora_B of {rows} rows, as the "
            f"model's matrix is [{rows}, {columns}], got {got[1]} and {got[0]}"
        )
    own_rows, own_columns = matrix.rows, matrix.columns
    a = change.a[:, own_columns.start : own_columns.stop].to(dtype, copy=True).contiguous()
    b = change.b[own_rows.start : own_rows.stop].to(dtype, copy=True).contiguous()
    for name, tensor in (("lora_A", a), ("lora_B", b)):
        if not bool(tensor.isfinite().all()):
            raise ModelError(
                f"{where}.{name}: expected numbers that {dtype} holds, got larger ones"
            )
    return Change(a, b, change.scale)
