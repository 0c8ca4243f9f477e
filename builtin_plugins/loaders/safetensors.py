"""Hugging Face directories: config.json, and one or several safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightLoader
from hardpoint.plugins.hf_config import (
    architecture,
    default_sampling,
    model_config,
    short,
    token_ids,
)
from hardpoint.plugins.parallel import Cut, needed_part

from .files import (
    file_inside,
    fingerprint,
    read_json,
    refusing_damage,
    regular_file,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"


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
            ModelError: config.json is missing, invalid or of a quantised checkpoint, or a shard is
                missing or truncated.
        """
        path = self.context.files.path
        config = read_model_config(path / "config.json")
        _check_quantization(config.hf, path.name)
        for shard in self._shards():
            with _open(shard) as file:
                _check_vocabulary(file, config, path.name)
        return config

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in `shapes` in the dtype on disk, shard by shard.

        Raises:
            ModelError: a shard is missing or truncated.
        """
        return self.cut_weights(shapes, {})

    def cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same, of those in `cuts` the part that is needed; no more of them is read.

        Raises:
            ModelError: a shard is missing or truncated, or a weight to be cut has another shape.
        """
        missing = dict.fromkeys(shapes)
        for shard in self._shards():
            with _open(shard) as file:
                present = set(file.keys())
                for name in [name for name in missing if name in present]:
                    del missing[name]
                    with refusing_damage(f"{shard.parent.name}/{shard.name}: {name}"):
                        tensor = _read(file, name, shapes, cuts)
                    yield name, tensor

    def content_hash(self, hash_file: Callable[[Path], str]) -> str:
        """Return the hashes of the shards, in the order of their names."""
        return " ".join(hash_file(path) for path in sorted(self._shards(), key=lambda p: p.name))

    def fingerprint(self) -> str | None:
        """Return names, sizes and times of the shards."""
        return fingerprint(self._shards())

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


def read_architecture(path: Path) -> str:
    """Return the architecture that a config.json names.

    Raises:
        ModelError: the file cannot be read, or names none.
    """
    return architecture(_read_config(path), f"{path.parent.name}/{path.name}")


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        ModelError: it cannot be read; where it is missing, says what the directory is instead.
    """
    folder = path.parent
    if folder.is_dir() and not path.exists():
        names = sorted(found.name for found in folder.iterdir())
        what = f"a model's directory has one, found {', '.join(names[:8]) or 'no file'}"
        if "adapter_config.json" in names:
            what = "this is an adapter (LoRA), which is no model of its own"
        raise ModelError(
            f"{folder.name}/{path.name} cannot be read: No such file or directory; {what}"
        )
    return read_json(path)


def _check_quantization(hf: Mapping[str, Any], where: str) -> None:
    """Refuse weights that are quantised.

    Raises:
        ModelError: they are.
    """
    for name in ("quantization_config", "quantization"):  # of transformers, of MLX
        if (found := hf.get(name)) is not None:
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            of = f"by {method} " if isinstance(method, str) else ""
            raise ModelError(
                f"{where}/config.json: {name}: safetensors that are quantised {of}are not "
                f"supported, expected none (bfloat16, float16 or float32 weights) or a .gguf file, "
                f"whose quantisations are supported; got {short(found)}"
            )


def read_model_config(path: Path) -> ModelConfig:
    """Return the ModelConfig of a config.json and the generation_config.json next to it.

    Raises:
        ModelError: a file cannot be read, or a field is invalid.
    """
    hf, source = _read_config(path), f"{path.parent.name}/{path.name}"
    generation_path = path.parent / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    generation_source = f"{path.parent.name}/{generation_path.name}"
    eos = token_ids(generation.get("eos_token_id"), "eos_token_id", generation_source)
    dtype = hf.get("dtype") or hf.get("torch_dtype")
    return model_config(
        hf,
        source,
        eos_token_ids=eos or token_ids(hf.get("eos_token_id"), "eos_token_id", source),
        dtype=str(dtype) if dtype else None,
        sampling=default_sampling(generation, generation_source),
    )


def _check_vocabulary(file: Any, config: ModelConfig, where: str) -> None:
    """Compare `vocab_size`, by which much is allocated before weights are read, with the weights.

    Raises:
        ModelError: they differ.
    """
    if _EMBEDDING in file.keys():  # noqa: SIM118 - it has no other way
        rows = file.get_slice(_EMBEDDING).get_shape()[:1]
        if rows != [config.vocab_size]:
            raise ModelError(
                f"{where}/config.json: vocab_size: expected {rows[0] if rows else 'a matrix'}, the "
                f"rows of {_EMBEDDING}, got {config.vocab_size}"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as cause:
        raise ModelError(
            f"{path.parent.name}/{path.name} is damaged or truncated: {str(cause)[:400]}"
        ) from cause
