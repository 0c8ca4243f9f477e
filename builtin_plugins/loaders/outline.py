"""A model with a config.json and the index of its weights, but without weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightFormat, WeightLoader
from hardpoint.toolkit.hf_config import short

from .config_file import about_code, read_architecture, read_model_config
from .files import read_json, refuse_missing
from .index_file import INDEX, former_names, last_of, module_of, read_index, scheme_of
from .stacked_experts import ARCHITECTURES, stacked_places


class OutlineLoader(WeightLoader):
    """Describes a model by its config.json and the index of its weights, if there is one.

    The path is a directory. `hardpoint models` uses it if the weights are missing; access to
    weights raises an error.
    """

    contract = 1

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:  # noqa: ARG003 - part of the contract
        """Return False: it is selected by `load.use = "outline"` only."""
        return False

    def architecture(self) -> str:
        """Return the architecture in config.json."""
        return read_architecture(self._folder / "config.json")

    def remark(self) -> str:
        """Return whether config.json names code for the architecture."""
        return about_code(self._folder / "config.json")

    def config(self) -> ModelConfig:
        """Return the configuration in config.json.

        Raises:
            ModelError: config.json is missing or invalid, or states that matrices are quantized
                where no index names them.
        """
        config = read_model_config(self._folder / "config.json")
        scheme = scheme_of(config.hf, self._folder.name)
        if scheme is not None and not (self._folder / INDEX).exists():
            raise ModelError(
                f"{self._folder.name}/config.json: quantization_config: {scheme!r}, but only "
                f"weights or {INDEX} show which matrices it has, and there are neither"
            )
        return replace(config, quantization=scheme)

    def formats(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, WeightFormat]:
        """Return how the files would store the weights in `shapes`.

        Weights that are not quantized have the dtype of config.json; the quantized ones share
        the rest of the index's `total_size`. Empty if config.json states no dtype.

        Raises:
            ModelError: the index lacks weights, or its `total_size` is no number that fits.
        """
        config = self.config()
        dtype = getattr(torch, config.dtype or "", None)
        if not isinstance(dtype, torch.dtype):
            return {}
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        quantized = self._quantized(shapes) if (self._folder / INDEX).exists() else set[str]()
        formats = {
            name: WeightFormat(str(config.dtype), size)
            for name, size in sizes.items()
            if name not in quantized
        }
        if quantized and config.quantization is not None:
            rest = self._total_size() - sum(
                stored_format.num_bytes for stored_format in formats.values()
            )
            share = rest / sum(sizes[name] for name in quantized)
            if not 0 < share <= 1:
                raise ModelError(
                    f"{self._folder.name}/{INDEX}: metadata.total_size: {rest} bytes would be left "
                    f"for {len(quantized)} quantized matrices, expected some, and fewer than in "
                    f"{config.dtype}"
                )
            formats |= {
                name: WeightFormat(config.quantization, int(sizes[name] * share), True)
                for name in quantized
            }
        return formats

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Refuse to yield any.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"model: {self.context.files.name!r}: load.use = 'outline' describes a model by its "
            f"config.json and index, and has none of its {len(shapes)} weights"
        )

    @property
    def _folder(self) -> Path:
        return self.context.files.path

    def _quantized(self, shapes: Mapping[str, Sequence[int]]) -> set[str]:
        """Return the matrices that have other tensors in the index than a weight and a bias.

        Experts may be in tensors of all experts of a layer, as in the safetensors loader.

        Raises:
            ModelError: the index lacks weights.
        """
        index = read_index(self._folder)
        former = former_names(shapes, lambda: index)
        form = ARCHITECTURES.get(self.architecture())
        stacked = {}
        if form is not None:
            stacked = stacked_places(shapes, index, form)
        parts: dict[str, set[str]] = {}
        for name in index:
            parts.setdefault(module_of(name), set()).add(last_of(name))
        quantized = {name for name, place in stacked.items() if place.has_codes}
        for name, shape in shapes.items():
            module, _, last = former.get(name, name).rpartition(".")
            suffixes = parts.get(module, set()) - {"bias"}
            if last == "weight" and len(shape) == 2 and suffixes not in (set(), {"weight"}):
                quantized.add(name)
        stored = (name for name in shapes if name not in quantized and name not in stacked)
        refuse_missing(
            self.context.files, (name for name in stored if former.get(name, name) not in index)
        )
        return quantized

    def _total_size(self) -> int:
        """Return the bytes of all tensors, as the index states them."""
        metadata = read_json(self._folder / INDEX).get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        if not isinstance(size, int) or size < 1:
            raise ModelError(
                f"{self._folder.name}/{INDEX}: metadata.total_size: expected the bytes of all "
                f"tensors, including the quantized ones, got {short(size)}"
            )
        return size
