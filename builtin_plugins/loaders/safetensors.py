"""Hugging Face directories: config.json, and one or several safetensors files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightFormat, WeightLoader
from hardpoint.plugins.parallel import Cut, needed_part
from hardpoint.plugins.quantization import QuantizedWeight

from .config_file import about_code, read_architecture, read_config, read_model_config
from .files import (
    file_inside,
    fingerprint,
    refuse_missing,
    refusing_damage,
    regular_file,
)
from .index_file import INDEX, former_names, last_of, module_of, read_index, scheme_of
from .stacked_experts import ARCHITECTURES, StackedExperts

_SINGLE = "model.safetensors"
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of safetensors that torch has had for long."""
_NUMBERS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights that need no scales."""


class SafetensorsLoader(WeightLoader):
    """Reads tensors lazily, one at a time, from memory-mapped files."""

    contract = 1

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the path is a directory with safetensors files or their index."""
        path = files.path
        return path.is_dir() and ((path / INDEX).exists() or any(path.glob("*.safetensors")))

    def architecture(self) -> str:
        """Return the architecture in config.json."""
        return read_architecture(self.context.files.path / "config.json")

    def remark(self) -> str:
        """Return whether config.json names code for the architecture."""
        return about_code(self.context.files.path / "config.json")

    def config(self) -> ModelConfig:
        """Return the configuration in config.json and generation_config.json.

        Raises:
            ModelError: config.json is missing or invalid, does not state how the checkpoint is
                quantized, or a shard is missing or truncated.
        """
        path = self.context.files.path
        config = read_model_config(path / "config.json")
        scheme = scheme_of(config.hf, path.name)
        for shard in self._shards():
            with self._open(shard) as file:
                _check_vocabulary(file, config, path.name)
        return replace(config, quantization=scheme)

    def weights(
        self, shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the weights in `shapes` as they are on disk, shard by shard.

        Raises:
            ModelError: a shard is missing or truncated.
        """
        return self.cut_weights(shapes, {})

    def cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield the same weights, of cut weights only the needed part; read no more of them.

        Matrices that are quantized are yielded whole, once all of their tensors are there.

        Raises:
            ModelError: a shard is missing or truncated, or a weight to be cut has another shape.
        """
        places = self._experts.places(shapes) if self._experts is not None else {}
        former = self._former_names(shapes)
        names = {former.get(name, name): name for name in shapes if name not in places}
        for stored, weight in self._cut_weights(
            {stored: shapes[name] for stored, name in names.items()},
            {former.get(name, name): cut for name, cut in cuts.items()},
        ):
            yield names[stored], weight
        if self._experts is not None:
            yield from self._experts.read(places, shapes, cuts)

    def _cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        quantized = self._quantized(shapes)
        owners = {name: owner for owner, names in quantized.items() for name in names}
        parts: dict[str, dict[str, torch.Tensor]] = {owner: {} for owner in quantized}
        missing = dict.fromkeys([*(name for name in shapes if name not in quantized), *owners])
        for shard in self._shards():
            with self._open(shard) as file:
                present = set(file.keys())
                for name in [name for name in missing if name in present]:
                    del missing[name]
                    owner = owners.get(name)
                    with refusing_damage(f"{shard.parent.name}/{shard.name}: {name}"):
                        if owner is None:
                            tensor = _read(file, name, shapes, cuts)
                        else:
                            parts[owner][last_of(name)] = file.get_tensor(name)
                    if owner is None:
                        yield name, tensor
                    elif len(parts[owner]) == len(quantized[owner]):
                        yield owner, self._stored(owner, shapes[owner], parts.pop(owner))

    def formats(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, WeightFormat]:
        """Return how the shards store the weights in `shapes`, by their headers.

        Raises:
            ModelError: a shard is missing or truncated, a weight is missing, or has a dtype that
                torch has not.
        """
        formats: dict[str, WeightFormat] = {}
        if self._experts is not None:
            places = self._experts.places(shapes)
            formats = self._experts.formats(places, shapes, _outline)
            shapes = {name: shape for name, shape in shapes.items() if name not in places}
        former = self._former_names(shapes)
        others = self._formats({former.get(name, name): shape for name, shape in shapes.items()})
        return formats | {name: others[former.get(name, name)] for name in shapes}

    def _formats(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, WeightFormat]:
        quantized = self._quantized(shapes)
        needed = {*shapes, *(name for names in quantized.values() for name in names)}
        outlines: dict[str, torch.Tensor] = {}
        for shard in self._shards():
            with self._open(shard) as file:
                for name in needed & set(file.keys()):
                    outlines.setdefault(name, _outline(file, name, shard))
        formats: dict[str, WeightFormat] = {}
        for name in shapes:
            if name in quantized:
                parts = {last_of(part): outlines[part] for part in quantized[name]}
                stored = self._stored(name, shapes[name], parts)
                size = sum(part.nbytes for part in parts.values())
                formats[name] = WeightFormat(stored.scheme, size, True, stored)
            elif name in outlines:
                dtype = str(outlines[name].dtype).removeprefix("torch.")
                if self._quantization is None and dtype.startswith("float8"):
                    raise self._unstated(f"{name} is stored as {dtype}")
                formats[name] = WeightFormat(dtype, outlines[name].nbytes)
        missing = [name for name in shapes if name not in formats]
        if missing and self._quantization is None:
            self._refuse_codes(missing)
        refuse_missing(self.context.files, missing)
        return formats

    def _refuse_codes(self, missing: Sequence[str]) -> None:
        """Reject weights with codes in their place, as of quantized matrices."""
        modules = {module_of(name): name for name in missing if last_of(name) == "weight"}
        for stored in sorted(self._present):
            if (name := modules.get(module_of(stored))) and last_of(stored) != "bias":
                raise self._unstated(f"{name} is missing, and {stored} is there")

    def _unstated(self, problem: str) -> ModelError:
        return ModelError(
            f"{self.context.files.name}/config.json: {problem}: expected a quantization_config "
            f"with a quant_method for the quantized weights, got none"
        )

    def _former_names(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Return the earlier names of weights in the files."""
        return former_names(shapes, lambda: self._present)

    @functools.cached_property
    def _present(self) -> set[str]:
        present: set[str] = set()
        for shard in self._shards():
            with self._open(shard) as file:
                present.update(file.keys())
        return present

    def content_hash(self, hash_file: Callable[[Path], str]) -> str:
        """Return the hashes of the shards and their index, in the order of their names."""
        return " ".join(hash_file(path) for path in sorted(self._files(), key=lambda p: p.name))

    def fingerprint(self) -> str | None:
        """Return names, sizes and times of the shards and their index."""
        return fingerprint(self._files())

    def _files(self) -> list[Path]:
        index = [self.context.files.path / INDEX] if self._assigned else []
        return [*self._shards(), *index]

    def _quantized(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
        """Return the names of the tensors of each quantized matrix.

        It has others than a weight and a bias, `q_proj.qweight` and `q_proj.scales` for example,
        next to `q_proj.weight` or in its place, some of them below it
        (`q_proj.weight.absmax`); or a weight of whole numbers, with a scheme that states
        the missing part.
        """
        if self._quantization is None:
            return {}
        stored: dict[str, list[str]] = {}
        codes: set[str] = set()
        for shard in self._shards():
            with self._open(shard) as file:
                for name in file.keys():  # noqa: SIM118 - it has no other way
                    stored.setdefault(module_of(name), []).append(name)
                    if name in shapes and file.get_slice(name).get_dtype() not in _NUMBERS:
                        codes.add(name)
        quantized: dict[str, list[str]] = {}
        for name, shape in shapes.items():
            module, _, last = name.rpartition(".")
            parts = [part for part in stored.get(module, ()) if last_of(part) != "bias"]
            if (
                last == "weight"
                and len(shape) == 2
                and (parts not in ([], [name]) or name in codes)
            ):
                quantized[name] = list(dict.fromkeys(parts))
        return quantized

    @functools.cached_property
    def _experts(self) -> StackedExperts | None:
        form = ARCHITECTURES.get(self.architecture())
        if form is None:
            return None
        return StackedExperts(self._shards(), self._open, self._quantization, form)

    @functools.cached_property
    def _quantization(self) -> str | None:
        path = self.context.files.path
        hf = read_config(path / "config.json")
        inner = hf.get("text_config")
        return scheme_of({**inner, **hf} if isinstance(inner, dict) else hf, path.name)

    def _stored(
        self, name: str, shape: Sequence[int], tensors: Mapping[str, torch.Tensor]
    ) -> QuantizedWeight:
        assert self._quantization is not None
        rows, columns = shape
        return QuantizedWeight(self._quantization, (rows, columns), tensors, name)

    @functools.cached_property
    def _assigned(self) -> Mapping[str, str]:
        folder = self.context.files.path
        return read_index(folder) if (folder / INDEX).exists() else {}

    def _open(self, path: Path) -> IndexedFile:
        """Open a shard, which has the tensors that the index assigns to it.

        Raises:
            ModelError: it is damaged.
        """
        return IndexedFile(_open(path), path.name, self._assigned)

    def _shards(self) -> list[Path]:
        folder = self.context.files.path
        if names := self._assigned.values():
            where = f"{folder.name}/{INDEX}: weight_map"
            return [file_inside(folder, name, where) for name in dict.fromkeys(names)]
        shards = sorted(folder.glob("*.safetensors"))
        if folder / _SINGLE in shards:
            shards = [folder / _SINGLE]
        if len(shards) != 1:
            raise ModelError(
                f"{folder.name}: expected {_SINGLE} or {INDEX}, found "
                f"{', '.join(shard.name for shard in shards[:8]) or 'no safetensors file'}"
            )
        return [regular_file(shards[0], f"{folder.name}/{shards[0].name}")]


class IndexedFile:
    """An open shard without the tensors that the index assigns to another shard."""

    def __init__(self, file: Any, name: str, assigned: Mapping[str, str]) -> None:
        """Filter the tensors of an open file.

        Args:
            file: as `safe_open` returns it.
            assigned: names of files by tensor.
        """
        self._file, self._name, self._assigned = file, name, assigned

    def __enter__(self) -> IndexedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        """Return the names of its tensors."""
        assigned, shard = self._assigned, self._name
        return [name for name in self._file.keys() if assigned.get(name, shard) == shard]  # noqa: SIM118

    def get_slice(self, name: str) -> Any:
        """Return a tensor that is read in parts."""
        return self._file.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


def _read(
    file: Any, name: str, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
) -> torch.Tensor:
    weight = file.get_slice(name)
    cut = needed_part(name, weight.get_shape(), shapes, cuts)
    part: torch.Tensor = file.get_tensor(name) if cut is None else cut.of(weight)
    return part


def _outline(file: Any, name: str, shard: Path) -> torch.Tensor:
    """Return a tensor without content, of the dtype and shape of one of an open shard.

    Raises:
        ModelError: torch has no such dtype.
    """
    tensor = file.get_slice(name)
    dtype = _DTYPES.get(tensor.get_dtype())
    if dtype is None:
        raise ModelError(
            f"{shard.parent.name}/{shard.name}: {name}: the dtype {tensor.get_dtype()} is not "
            f"supported, expected one of {', '.join(_DTYPES)}"
        )
    return torch.empty(tensor.get_shape(), dtype=dtype, device="meta")


def _check_vocabulary(file: Any, config: ModelConfig, where: str) -> None:
    """Compare `vocab_size`, by which much is allocated before weights are read, with the weights.

    Tables may have further rows, of tokens that are only read.
    """
    for name in (name for name in _EMBEDDINGS if name in file.keys()):  # noqa: SIM118 - no other way
        rows = file.get_slice(name).get_shape()[:1]
        if not rows or rows[0] < config.vocab_size:
            raise ModelError(
                f"{where}/config.json: vocab_size: expected {rows[0] if rows else 'a matrix'}, the "
                f"rows of {name}, got {config.vocab_size}"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as cause:
        raise ModelError(
            f"{path.parent.name}/{path.name} is damaged or truncated: {str(cause)[:400]}"
        ) from cause
