"""Weights of a model with tensors replaced by files of later versions."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.errors import shown
from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightFormat, WeightLoader
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedWeight

from .cut_weights import cut_weights
from .kv_blocks.file_hashes import file_state

if TYPE_CHECKING:
    import torch

__all__ = ["UpdatedWeights", "tensor_files", "write_tensors"]

_log = logging.getLogger("hardpoint")

_HEAD = "lm_head.weight"
_SHOWN = 3  # names in a message
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class UpdatedWeights(WeightLoader):
    """A loader that reads some tensors from files, and the rest from another loader.

    Attributes:
        base: the other loader.
    """

    contract = 1

    def __init__(self, base: WeightLoader, paths: Sequence[str]) -> None:
        """Read which tensors the files have; of several, the last one's counts.

        Args:
            base: reads the model's own files.
            paths: safetensors files, or folders of them.

        Raises:
            ModelError: one is missing or broken.
        """
        super().__init__(base.context)
        self.base = base
        self._where: dict[str, Path] = {}
        for path in paths:
            for file, names in tensor_files(path).items():
                self._where |= dict.fromkeys(names, file)
        self._first_state = self._state()

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:  # noqa: ARG003
        """Return False: no model has this format."""
        return False

    def architecture(self) -> str | None:
        """Return the architecture in the model's files."""
        return self.base.architecture()

    def config(self) -> ModelConfig:
        """Return the configuration in the model's files."""
        return self.base.config()

    def weights(
        self, shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the weights in `shapes`."""
        return self.cut_weights(shapes, {})

    def cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the weights in `shapes`, cut.

        Raises:
            ModelError: a tensor has numbers that are not finite.
        """
        rest = {name: tuple(shape) for name, shape in shapes.items() if name not in self._where}
        if rest:
            of_rest = {name: cut for name, cut in cuts.items() if name in rest}
            for name, weight in cut_weights(self.base, rest, of_rest):
                if name in rest:
                    yield name, weight
        for name in shapes:
            if (file := self._where.get(name)) is None:
                continue
            tensor = _tensor(file, name, cuts.get(name))
            if not bool(tensor.isfinite().all()):
                raise ModelError(
                    f"{file}: {name!r} has numbers that are not finite, expected weights"
                )
            yield name, tensor

    def formats(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, WeightFormat]:
        """Return the formats in the files of the weights in `shapes`, of all stages.

        Raises:
            ModelError: a tensor is not the model's, or has another shape or kind of dtype.
        """
        updated = self._check(shapes)
        rest = {name: shape for name, shape in shapes.items() if name not in updated}
        return {**(self.base.formats(rest) if rest else {}), **updated}

    def _check(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, WeightFormat]:
        import torch  # noqa: PLC0415 - engines are imported without it

        formats: dict[str, WeightFormat] = {}
        unknown: dict[str, tuple[int, ...]] = {}
        for file in dict.fromkeys(self._where.values()):
            names = [name for name, where in self._where.items() if where == file]
            with _opened(file) as opened:
                for name in names:
                    outline = opened.get_slice(name)
                    if name not in shapes:
                        unknown[name] = tuple(outline.get_shape())
                        continue
                    shape, dtype = tuple(outline.get_shape()), outline.get_dtype()
                    if shape != tuple(shapes[name]):
                        raise ModelError(
                            f"{file}: {name!r} has shape {list(shape)}, the model needs "
                            f"{list(shapes[name])}"
                        )
                    if dtype not in _DTYPES:
                        raise ModelError(
                            f"{file}: {name!r} has the dtype {dtype}, expected {', '.join(_DTYPES)}"
                        )
                    size = int(getattr(torch, _DTYPES[dtype]).itemsize)
                    formats[name] = WeightFormat(_DTYPES[dtype], torch.Size(shape).numel() * size)
        left_out = self._left_out(unknown, shapes)
        for name in (name for name in unknown if name not in left_out):
            self._check_tied(self._where[name], name, shapes)
        return formats

    def _left_out(
        self, unknown: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]
    ) -> Mapping[str, object]:
        parts = [name.split(".") for name in shapes]
        modules = {"", *(".".join(p[:end]) for p in parts for end in range(1, len(p)))}
        others = {n: shape for n, shape in unknown.items() if n.rpartition(".")[0] not in modules}
        try:
            return self.base.formats(others) if others else {}
        except ModelError as cause:
            if len(others) == 1:
                return {}
            raise ModelError(f"tensors that are no weights of the model: {cause}") from cause

    def _check_tied(self, file: Path, name: str, shapes: Mapping[str, Sequence[int]]) -> None:
        import torch  # noqa: PLC0415 - engines are imported without it

        if name == _HEAD:
            head = _tensor(file, name, None)
            tables = [of for of, shape in shapes.items() if tuple(shape) == tuple(head.shape)]
            for table in (of for of in tables if of in self._where):
                if torch.equal(_tensor(self._where[table], table, None), head):
                    return
            if tables:
                raise ModelError(
                    f"{file}: {name!r}: the model's head is {tables[0]!r}; expected that tensor, "
                    f"and of this name none or an equal one"
                )
        some = ", ".join(list(shapes)[:_SHOWN])
        raise ModelError(
            f"{file}: the model has no weight {shown(name)}; it has {some}, ... ({len(shapes)})"
        )

    def content_hash(self, hash_file: Callable[[Path], str]) -> str | None:
        """Return a hash of the contents of all files; a random one if a file has changed.

        Workers may have read the earlier contents, since this loader was made.
        """
        base_hash = self.base.content_hash(hash_file)
        if base_hash is None:
            return None
        digest = hashlib.sha256(base_hash.encode())
        for name in sorted(self._where):
            digest.update(f"\0{name}\0{hash_file(self._where[name])}".encode())
        if self._state() != self._first_state:
            _log.warning("files of the weights changed during an update: KV blocks are not shared")
            digest.update(secrets.token_bytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return a text that differs whenever a file of either loader does."""
        return self._state()

    def _state(self) -> str:
        try:
            of_base = self.base.fingerprint()
        except Exception:  # of a plugin; the files' states remain
            of_base = None
        return "; ".join([str(of_base), *map(_state_of, dict.fromkeys(self._where.values()))])

    def close(self) -> None:
        """Close the other loader."""
        self.base.close()


def tensor_files(path: str) -> dict[Path, list[str]]:
    """Return the safetensors files at a path, with the names of their tensors.

    Raises:
        ModelError: there is none, one cannot be read, or two have the same tensor.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise ModelError(f"{path}: expected a safetensors file, or a folder of them; it has none")
    names_by_file: dict[Path, list[str]] = {}
    seen: dict[str, Path] = {}
    for file in files:
        with _opened(file) as opened:
            names_by_file[file] = list(opened.keys())
        for name in names_by_file[file]:
            if name in seen:
                raise ModelError(f"{path}: {seen[name].name} and {file.name} both have {name!r}")
            seen[name] = file
    if not seen:
        raise ModelError(f"{path}: expected tensors, it has none")
    return names_by_file


def _state_of(file: Path) -> str:
    try:
        return file_state(file, file.stat())
    except OSError:
        return f"{file} is missing"


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file of tensors.

    Raises:
        ModelError: it is missing or broken.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only updates of weights use it

    try:
        if not file.is_file():
            raise ModelError(f"{file}: expected a safetensors file, there is none")
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as cause:
        raise ModelError(f"{file}: expected a safetensors file; it cannot be read: {cause}") from (
            cause
        )


def _tensor(file: Path, name: str, cut: Cut | None) -> torch.Tensor:
    with _opened(file) as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor if cut is None else cut.of(tensor)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file.

    Raises:
        OSError: there is no room for it.
        SafetensorError: the same.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - only updates of weights use it

    # The library refuses tensors that share memory, as a head and its table do.
    alone = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file({name: tensor.clone() for name, tensor in alone.items()}, file)
