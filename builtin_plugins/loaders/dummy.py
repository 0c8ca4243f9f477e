"""Random weights for a config alone: to try shapes, memory and speed without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from hardpoint import plugins
from hardpoint.builtin_plugins.models.hf_config import ConfigFields
from hardpoint.plugins import ModelConfig, ModelFiles, WeightLoader

from .safetensors import read_model_config


class DummyLoader(WeightLoader):
    """Draws each weight from a generator that its name and the seed determine.

    The path is a config.json or a directory with one. Only `load.use = "dummy"` selects it.
    """

    contract = 1

    class Options(plugins.Options):
        """`seed` changes every weight."""

        seed: int = 0

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:  # noqa: ARG003 - part of the contract
        """Return False: random weights come only to those who ask for them by name."""
        return False

    def config(self) -> ModelConfig:
        """Return what config.json says.

        Raises:
            ModelError: if it is missing or invalid.
        """
        path = self.context.files.path
        return read_model_config(path / "config.json" if path.is_dir() else path)

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield float32 weights: norms 1, biases 0, matrices normal with `initializer_range`."""
        fields = ConfigFields(self.config().hf, "config.json")
        std = fields.number("initializer_range", 0.02)
        for name, shape in shapes.items():
            if name.endswith("norm.weight"):
                yield name, torch.ones(*shape)
            elif name.endswith(".bias"):
                yield name, torch.zeros(*shape)
            else:
                generator = torch.Generator().manual_seed(self._seed(name))
                yield name, torch.empty(*shape).normal_(0.0, std, generator=generator)

    def _seed(self, name: str) -> int:
        return zlib.crc32(f"{self.options.seed}:{name}".encode())
