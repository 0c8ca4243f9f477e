"""Hugging Face directories: config.json, and one or several safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.builtin_plugins.models.hf_config import default_sampling, model_config, token_ids
from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightLoader

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsLoader(WeightLoader):
    """Reads tensors lazily, one at a time, from memory-mapped files."""

    contract = 1

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the path is a directory with safetensors files or their index."""
        path = files.path
        return path.is_dir() and ((path / _INDEX).exists() or any(path.glob("*.safetensors")))

    def config(self) -> ModelConfig:
        """Return the configuration in config.json and generation_config.json.

        Raises:
            ModelError: config.json is missing, invalid or of a quantised checkpoint, or a shard is
                missing or truncated.
        """
        path = self.context.files.path
        config = read_model_config(path / "config.json")
        if config.hf.get("quantization_config") is not None:
            method = config.hf["quantization_config"]
            raise ModelError(
                f"{path.name}/config.json: quantization_config: expected none (quantised "
                f"safetensors are not supported), got {method!r}"
            )
        for shard in self._shards():
            with _open(shard):
                pass
        return config

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in `shapes` in the dtype on disk, shard by shard.

        Raises:
            ModelError: a shard is missing or truncated.
        """
        for shard in self._shards():
            with _open(shard) as file:
                present = set(file.keys())
                for name in shapes:
                    if name in present:
                        yield name, file.get_tensor(name)

    def _shards(self) -> list[Path]:
        folder = self.context.files.path
        if (folder / _INDEX).exists():
            index = read_json(folder / _INDEX)
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(
                    f"{folder.name}/{_INDEX}: weight_map: expected a table of tensor names to "
                    f"files, got {weight_map!r}"
                )
            shards = [folder / str(name) for name in dict.fromkeys(weight_map.values())]
        elif (folder / _SINGLE).exists():
            shards = [folder / _SINGLE]
        else:
            shards = sorted(folder.glob("*.safetensors"))
            if len(shards) != 1:
                raise ModelError(
                    f"{folder.name}: expected {_SINGLE} or {_INDEX}, found "
                    f"{', '.join(shard.name for shard in shards) or 'no safetensors file'}"
                )
        for shard in shards:
            if not shard.exists():
                raise ModelError(f"{folder.name}: {shard.name} is missing; {_INDEX} names it")
        return shards


def read_model_config(path: Path) -> ModelConfig:
    """Return the ModelConfig of a config.json and the generation_config.json next to it.

    Raises:
        ModelError: a file cannot be read, or a field is invalid.
    """
    hf, source = read_json(path), f"{path.parent.name}/{path.name}"
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


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelError: the file is missing, is no JSON or has no object.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ModelError(f"{where} cannot be read: {cause.strerror}") from cause
    except ValueError as cause:
        raise ModelError(f"{where} is not valid JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise ModelError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as cause:
        raise ModelError(
            f"{path.parent.name}/{path.name} is damaged or truncated: {cause}"
        ) from cause
