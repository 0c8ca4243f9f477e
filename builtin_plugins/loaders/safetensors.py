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
from hardpoint.toolkit.hf_config import (
    short,
)

from .config_file import read_architecture, read_config, read_model_config
from .files import (
    file_inside,
    fingerprint,
    read_json,
    refuse_missing,
    refusing_damage,
    regular_file,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EMBEDDINGS = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
_VISION, _FORMER_VISION = "vision_tower.", "vision_tower.vision_model."
"""Beginnings of names, as transformers 5 writes them, and as earlier ones did."""
_BODIES = ("transformer.",)
"""Beginnings of names that early checkpoints leave out, GPT-2's for one."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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
        return path.is_dir() and ((path / _INDEX).exists() or any(path.glob("*.safetensors")))

    def architecture(self) -> str:
        """Return the architecture in config.json."""
        return read_architecture(self.context.files.path / "config.json")

    def config(self) -> ModelConfig:
        """Return the configuration in config.json and generation_config.json.

        Raises:
            ModelError: config.json is missing or invalid, does not state how the checkpoint is
                quantised, or a shard is missing or truncated.
        """
        path = self.context.files.path
        config = read_model_config(path / "config.json")
        scheme = _scheme(config.hf, path.name)
        for shard in self._shards():
            with _open(shard) as file:
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
        """Yield the same, of those in `cuts` the part that is needed; no more of them is read.

        Matrices that are quantised are yielded whole, once all of their tensors are there.

        Raises:
            ModelError: a shard is missing or truncated, or a weight to be cut has another shape.
        """
        former = self._former_names(shapes)
        names = {former.get(name, name): name for name in shapes}
        for stored, weight in self._cut_weights(
            {stored: shapes[name] for stored, name in names.items()},
            {former.get(name, name): cut for name, cut in cuts.items()},
        ):
            yield names[stored], weight

    def _cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield weights by the names that they have in the files."""
        quantized = self._quantized(shapes)
        owners = {name: owner for owner, names in quantized.items() for name in names}
        found: dict[str, dict[str, torch.Tensor]] = {owner: {} for owner in quantized}
        missing = dict.fromkeys([*(name for name in shapes if name not in quantized), *owners])
        for shard in self._shards():
            with _open(shard) as file:
                present = set(file.keys())
                for name in [name for name in missing if name in present]:
                    del missing[name]
                    owner = owners.get(name)
                    with refusing_damage(f"{shard.parent.name}/{shard.name}: {name}"):
                        if owner is None:
                            tensor = _read(file, name, shapes, cuts)
                        else:
                            found[owner][_last(name)] = file.get_tensor(name)
                    if owner is None:
                        yield name, tensor
                    elif len(found[owner]) == len(quantized[owner]):
                        yield owner, self._stored(owner, shapes[owner], found.pop(owner))

    def formats(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, WeightFormat]:
        """Return how the shards store the weights in `shapes`, by their headers.

        Raises:
            ModelError: a shard is missing or truncated, a weight is missing, or has a dtype that
                torch has not.
        """
        former = self._former_names(shapes)
        found = self._formats({former.get(name, name): shape for name, shape in shapes.items()})
        return {name: found[former.get(name, name)] for name in shapes}

    def _formats(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, WeightFormat]:
        """Return formats by the names that weights have in the files."""
        quantized = self._quantized(shapes)
        needed = {*shapes, *(name for names in quantized.values() for name in names)}
        outlines: dict[str, torch.Tensor] = {}
        for shard in self._shards():
            with _open(shard) as file:
                for name in needed & set(file.keys()):
                    outlines.setdefault(name, _outline(file, name, shard))
        formats: dict[str, WeightFormat] = {}
        for name in shapes:
            if name in quantized:
                parts = {_last(part): outlines[part] for part in quantized[name]}
                stored = self._stored(name, shapes[name], parts)
                size = sum(part.nbytes for part in parts.values())
                formats[name] = WeightFormat(stored.scheme, size, True, stored)
            elif name in outlines:
                dtype = str(outlines[name].dtype).removeprefix("torch.")
                formats[name] = WeightFormat(dtype, outlines[name].nbytes)
        refuse_missing(self.context.files, (name for name in shapes if name not in formats))
        return formats

    def _former_names(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Return the names of weights in the files, of those that had other names before."""
        wanted = [name for name in shapes if name.startswith(_VISION)]
        bodies = [name for name in shapes if name.startswith(_BODIES)]
        if not wanted and not bodies:
            return {}
        present: set[str] = set()
        for shard in self._shards():
            with _open(shard) as file:
                present.update(file.keys())
        former = {name: _FORMER_VISION + name.removeprefix(_VISION) for name in wanted}
        former |= {name: name.partition(".")[2] for name in bodies}
        return {n: old for n, old in former.items() if n not in present and old in present}

    def content_hash(self, hash_file: Callable[[Path], str]) -> str:
        """Return the hashes of the shards, in the order of their names."""
        return " ".join(hash_file(path) for path in sorted(self._shards(), key=lambda p: p.name))

    def fingerprint(self) -> str | None:
        """Return names, sizes and times of the shards."""
        return fingerprint(self._shards())

    def _quantized(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
        """Return the names of the tensors of each quantised matrix.

        It has others than a weight and a bias, `q_proj.qweight` and `q_proj.scales` for example,
        next to `q_proj.weight` or in its place; or a weight of whole numbers, whose scheme states
        what it lacks.
        """
        if self._quantization is None:
            return {}
        stored: dict[str, list[str]] = {}
        codes: set[str] = set()
        for shard in self._shards():
            with _open(shard) as file:
                for name in file.keys():  # noqa: SIM118 - it has no other way
                    stored.setdefault(name.rpartition(".")[0], []).append(name)
                    if name in shapes and file.get_slice(name).get_dtype() not in _NUMBERS:
                        codes.add(name)
        quantized: dict[str, list[str]] = {}
        for name, shape in shapes.items():
            module, _, last = name.rpartition(".")
            parts = [part for part in stored.get(module, ()) if _last(part) != "bias"]
            if (
                last == "weight"
                and len(shape) == 2
                and (parts not in ([], [name]) or name in codes)
            ):
                quantized[name] = list(dict.fromkeys(parts))
        return quantized

    @functools.cached_property
    def _quantization(self) -> str | None:
        """The scheme of the checkpoint's matrices; None if they are not quantised."""
        path = self.context.files.path
        return _scheme(read_config(path / "config.json"), path.name)

    def _stored(
        self, name: str, shape: Sequence[int], tensors: Mapping[str, torch.Tensor]
    ) -> QuantizedWeight:
        assert self._quantization is not None
        rows, columns = shape
        return QuantizedWeight(self._quantization, (rows, columns), tensors, name)

    def _shards(self) -> list[Path]:
        folder = self.context.files.path
        if (folder / _INDEX).exists():
            index = read_json(folder / _INDEX)
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(
                    f"{folder.name}/{_INDEX}: weight_map: expected a table of tensor names to "
                    f"files, got {short(weight_map)}"
                )
            where = f"{folder.name}/{_INDEX}: weight_map"
            names = weight_map.values()
            if wrong := [name for name in names if not isinstance(name, str)]:
                raise ModelError(f"{where}: expected names of files, got {short(wrong[0])}")
            return [file_inside(folder, name, where) for name in dict.fromkeys(names)]
        shards = sorted(folder.glob("*.safetensors"))
        if folder / _SINGLE in shards:
            shards = [folder / _SINGLE]
        if len(shards) != 1:
            raise ModelError(
                f"{folder.name}: expected {_SINGLE} or {_INDEX}, found "
                f"{', '.join(shard.name for shard in shards[:8]) or 'no safetensors file'}"
            )
        return [regular_file(shards[0], f"{folder.name}/{shards[0].name}")]


def _read(
    file: Any, name: str, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
) -> torch.Tensor:
    """Return a tensor of an open shard, or the part of it that is needed."""
    weight = file.get_slice(name)
    cut = needed_part(name, weight.get_shape(), shapes, cuts)
    part: torch.Tensor = file.get_tensor(name) if cut is None else cut.of(weight)
    return part


def _scheme(hf: Mapping[str, Any], where: str) -> str | None:
    """Return the scheme of quantised weights, a component's name; None if they are not quantised.

    Raises:
        ModelError: config.json does not name it.
    """
    described = hf.get("quantization_config")
    method = described.get("quant_method") if isinstance(described, Mapping) else None
    if isinstance(method, str) and method:
        return method.lower().replace("-", "_")
    for name in ("quantization_config", "quantization"):  # of transformers, of MLX
        if (found := hf.get(name)) is not None:
            raise ModelError(
                f"{where}/config.json: {name}: safetensors that are quantised without a "
                f"quant_method are not supported, expected none (bfloat16, float16 or float32 "
                f"weights), a quant_method such as awq, or a .gguf file; got {short(found)}"
            )
    return None


def _last(name: str) -> str:
    """Return the last part of a tensor's name."""
    return name.rpartition(".")[2]


def _outline(file: Any, name: str, shard: Path) -> torch.Tensor:
    """Return a tensor without content, of the dtype and shape of one of an open shard.

    Raises:
        ModelError: torch has no such dtype.
    """
    found = file.get_slice(name)
    dtype = _DTYPES.get(found.get_dtype())
    if dtype is None:
        raise ModelError(
            f"{shard.parent.name}/{shard.name}: {name}: the dtype {found.get_dtype()} is not "
            f"supported, expected one of {', '.join(_DTYPES)}"
        )
    return torch.empty(found.get_shape(), dtype=dtype, device="meta")


def _check_vocabulary(file: Any, config: ModelConfig, where: str) -> None:
    """Compare `vocab_size`, by which much is allocated before weights are read, with the weights.

    Raises:
        ModelError: they differ.
    """
    for name in (name for name in _EMBEDDINGS if name in file.keys()):  # noqa: SIM118 - no other way
        rows = file.get_slice(name).get_shape()[:1]
        if rows != [config.vocab_size]:
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
