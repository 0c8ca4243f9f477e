"""One file per model: a line of JSON, then the weights as float32, one after the other."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.plugins import ModelConfig, ModelError, ModelFiles, WeightLoader
from hardpoint.toolkit.hf_config import model_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MAGIC = b"tiny-gpt 1\n"
LONGEST_HEADER = 1 << 20


class TinyGPTFile(WeightLoader):
    """Reads files that begin with `tiny-gpt 1`."""

    contract = 1

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the file begins as one of this format does."""
        if not files.path.is_file():
            return False
        with files.path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def config(self) -> ModelConfig:
        """Return the configuration in the header."""
        header, _ = self._header()
        return model_config(
            header["config"], self.context.files.name, eos_token_ids=[256], dtype="float32"
        )

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in the order of the file, whatever `shapes` asks for."""
        del shapes
        header, start = self._header()
        path = self.context.files.path
        left = path.stat().st_size - start
        with path.open("rb") as file:
            file.seek(start)
            for name, shape in header["weights"]:
                size = 4 * math.prod(shape)
                if not 0 < size <= left:
                    raise ModelError(f"{path}: {name}: {size} bytes are wanted, {left} are left")
                left -= size
                values = torch.frombuffer(bytearray(file.read(size)), dtype=torch.float32)
                yield name, values.view(shape)

    def _header(self) -> tuple[dict[str, Any], int]:
        """Return the JSON of the header, and where the weights begin."""
        path = self.context.files.path
        with path.open("rb") as file:
            if (begin := file.read(len(MAGIC))) != MAGIC:
                raise ModelError(
                    f"{path}: expected a file that begins with {MAGIC!r}, got {begin!r}"
                )
            line = file.readline(LONGEST_HEADER)
        try:
            header = json.loads(line)
            weights = [(str(name), [int(n) for n in shape]) for name, shape in header["weights"]]
            return {"config": dict(header["config"]), "weights": weights}, len(MAGIC) + len(line)
        except (ValueError, TypeError, KeyError, RecursionError) as cause:
            raise ModelError(f"{path}: the header is damaged: {cause}") from cause


def write(path: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Write a file of this format."""
    shapes = [[name, list(tensor.shape)] for name, tensor in weights.items()]
    with path.open("wb") as file:
        file.write(MAGIC + json.dumps({"config": dict(config), "weights": shapes}).encode() + b"\n")
        for tensor in weights.values():
            file.write(tensor.detach().float().contiguous().numpy().tobytes())
