"""Settings of the image processor of a checkpoint, and the numbers that pixels become."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hardpoint.plugins import ModelError
from hardpoint.toolkit.hf_config import ConfigFields, short

_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them


class ProcessorSettings:
    """Rescaling and normalization of pixels.

    Attributes:
        factor: factor of pixels.
        mean, std: mean and standard deviation of each channel.
    """

    def __init__(
        self,
        processor: Mapping[str, Any],
        resample: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """Read the settings.

        Args:
            processor: fields of the image processor.
            resample: interpolation of the model, as Pillow numbers it.
            mean, std: values of a processor that has none.

        Raises:
            ModelError: one is not supported.
        """
        fields = ConfigFields(processor, "image processor")
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not fields.flag(name, True):
                raise fields.error(name, "expected true, got false")
        if (stated := processor.get("resample", resample)) != resample:
            name = _INTERPOLATIONS[resample]
            raise fields.error("resample", f"expected {resample} ({name}), got {short(stated)}")
        self.factor = fields.number("rescale_factor", 1 / 255)
        self.mean = _channels(fields, "image_mean", processor.get("image_mean") or list(mean))
        self.std = _channels(fields, "image_std", processor.get("image_std") or list(std))

    def normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return float32 [3, height, width] for uint8 pixels [height, width, 3]."""
        x = (pixels.double() * self.factor).float()
        x = (x - x.new_tensor(self.mean)) / x.new_tensor(self.std)
        return x.permute(2, 0, 1).contiguous()


def _channels(fields: ConfigFields, name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != 3 or not all(map(_is_positive, values)):
        raise fields.error(name, f"expected three numbers, got {short(values)}")
    return tuple(map(float, values))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def read_processor(folder: Path) -> dict[str, Any]:
    """Return the fields of the image processor of a model's folder; none if it has no file.

    Raises:
        ModelError: a file is no JSON.
    """
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = folder / name
        if path.is_file():
            try:
                fields = json.loads(path.read_text())
            except ValueError as cause:
                raise ModelError(f"{folder.name}/{name}: expected JSON: {cause}") from cause
            if isinstance(fields, dict) and name.startswith("processor"):
                fields = fields.get("image_processor")
            if isinstance(fields, dict):
                return fields
    return {}
