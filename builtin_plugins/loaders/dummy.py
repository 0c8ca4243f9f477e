"""Random weights for a config, to try shapes, memory and speed without a checkpoint."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from hardpoint import plugins
from hardpoint.plugins import ModelConfig, ModelFiles, WeightLoader
from hardpoint.toolkit.hf_config import ConfigFields

from .config_file import about_code, read_architecture, read_model_config


class DummyLoader(WeightLoader):
    """Generates each weight at random, from the seed and its name.

    The path is a config.json or a directory with one. It is selected by `load.use = "dummy"` only.
    """

    contract = 1

    class Options(plugins.Options):
        """The seed.

        Attributes:
            seed: seed of all weights.
        """

        seed: int = 0

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:  # noqa: ARG003 - part of the contract
        """Return False: random weights are never selected automatically."""
        return False

    def architecture(self) -> str:
        """Return the architecture in config.json."""
        return read_architecture(self._path)

    def remark(self) -> str:
        """Return whether config.json names code for the architecture."""
        return about_code(self._path)

    def config(self) -> ModelConfig:
        """Return the configuration in config.json.

        Raises:
            ModelError: config.json is missing or invalid.
        """
        return read_model_config(self._path)

    def content_hash(self, hash_file: Callable[[Path], str]) -> str:  # noqa: ARG002 - it has none
        """Return the seed; the config determines the names and shapes of the weights."""
        return f"random numbers of seed {self.options.seed}, generator of torch {torch.__version__}"

    @property
    def _path(self) -> Path:
        path = self.context.files.path
        return path / "config.json" if path.is_dir() else path

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield float32 weights: norms 1, biases 0, matrices normal with `initializer_range`."""
        fields = ConfigFields(self.config().hf, "config.json")
        std = fields.number("initializer_range", 0.02)
        # A generator fills a tensor in one thread.
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads) as pool:
            ahead: deque[tuple[str, Future[torch.Tensor]]] = deque()
            for name, shape in shapes.items():
                # The C library keeps the memory that other threads allocate and free.
                with torch.inference_mode(mode=False):  # as in the other threads
                    empty = torch.empty(*shape)
                ahead.append((name, pool.submit(self._fill, name, empty, std)))
                if len(ahead) > threads:
                    name, weight = ahead.popleft()
                    yield name, weight.result()
            for name, weight in ahead:
                yield name, weight.result()

    def _fill(self, name: str, weight: torch.Tensor, std: float) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return weight.fill_(1.0)
        if name.endswith(".bias"):
            return weight.zero_()
        generator = torch.Generator().manual_seed(self._seed(name))
        return weight.normal_(0.0, std, generator=generator)

    def _seed(self, name: str) -> int:
        return zlib.crc32(f"{self.options.seed}:{name}".encode())
