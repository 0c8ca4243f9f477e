"""An adapter as one rank needs it: cut to the rows and columns of its matrices, in its dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hardpoint.plugins import ModelError
from hardpoint.plugins.model import LinearMatrix

from .files import AdapterFiles, Change, read_adapter
from .identity import TENSORS

_WRAPPERS = {"", "model", "language_model", "text_model"}
"""Parts of names by which classes of transformers with and without images differ."""


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
        ModelError: see `read_adapter`; a matrix has another shape than the model's, or two modules
            are the same one.
    """
    files: AdapterFiles = read_adapter(path, max_rank)
    places: dict[str, list[str]] = {}
    for name, matrix in matrices.items():
        places.setdefault(matrix.stored_as, []).append(name)
    layers = _layers(places)
    changes: dict[str, Change] = {}
    found: dict[str, str] = {}
    unknown: list[str] = []
    for module, change in files.changes.items():
        layer = module if module in places else layers.get(_in_text_model(module))
        if layer is None:
            unknown.append(module)
            continue
        if (other := found.setdefault(layer, module)) != module:
            raise ModelError(
                f"{path}/{TENSORS}: {module}: expected one change of each layer, got {other} too"
            )
        for name in places[layer]:
            changes[name] = _cut(f"{path}/{TENSORS}: {module}", change, matrices[name], dtype)
    return HostAdapter(files.content, changes, sorted(unknown))


def _layers(names: Iterable[str]) -> dict[str, str]:
    """Return layers by their names without what wraps a text model; no ambiguous ones."""
    listed: dict[str, list[str]] = {}
    for name in names:
        listed.setdefault(_in_text_model(name), []).append(name)
    return {short: found[0] for short, found in listed.items() if len(found) == 1}


def _in_text_model(module: str) -> str:
    """Return the name of a module from `layers.` on, if what is before it only wraps a text model.

    Towers of images and sound have layers of the same names, and stay apart.
    """
    before, found, after = module.partition("layers.")
    wraps = found and set(before.split(".")) <= _WRAPPERS
    return found + after if wraps else module


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
