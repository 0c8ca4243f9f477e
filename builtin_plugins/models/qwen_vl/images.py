"""Images of Qwen2.5-VL and Qwen3-VL: dynamic resolution, positions of rows and columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hardpoint.builtin_plugins.models.vision.settings import ProcessorSettings
from hardpoint.plugins import ModelConfig
from hardpoint.plugins.requests import MediaFormat
from hardpoint.toolkit.hf_config import ConfigFields

from . import processor as image_processor

_BICUBIC = 3  # as Pillow numbers it
_VERSION = 1  # of the resizing and of the numbers of pixels
_MAX_RATIO = 200
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_AXES = 3  # time, row and column

Item = np.ndarray[Any, np.dtype[np.uint8]]


class QwenImages(MediaFormat):
    """Images as Qwen2-VL (Wang et al., 2024) has them: one token for each square of patches."""

    placeholder = "<|image_pad|>"
    begin_ids = ()
    end_ids = ()
    item_shape = (-1, -1, 3)
    position_axes = _AXES

    def __init__(
        self, config: ModelConfig, processor: Mapping[str, Any], *, patch_size: int = 14
    ) -> None:
        """Read the settings.

        Args:
            config: config of the model.
            processor: fields of the image processor.
            patch_size: default of the config.

        Raises:
            ModelError: one is not supported.
        """
        source = f"{config.architecture} config"
        self.token_id = self.placeholder_id = ConfigFields(config.hf, source).whole(
            "image_token_id", 151_655
        )
        tower = ConfigFields(config.hf, source).table("vision_config")
        vision = ConfigFields(tower, f"{source}: vision_config")
        patch, merge = vision.whole("patch_size", patch_size), vision.whole("spatial_merge_size", 2)
        self._factor = patch * merge
        self.extra_layers = len(tower.get("deepstack_visual_indexes") or ())
        fields = ConfigFields(processor, "image processor")
        for name, value in (("patch_size", patch), ("merge_size", merge)):
            if processor and fields.whole(name, value) != value:
                raise fields.error(name, f"expected {value} as in the config")
        min_pixels, max_pixels = self._limits(fields)
        self._pixels = ProcessorSettings(processor, _BICUBIC, _MEAN, _STD)
        self.num_tokens = self._longest(min_pixels, max_pixels)
        self.max_item_bytes = 3 * self.num_tokens * self._factor**2
        hidden, inner = vision.whole("hidden_size", 1280), vision.whole("intermediate_size", 3420)
        widest = max(12 * hidden, 4 * hidden + 3 * inner)  # in attention, or in the MLP
        self.encode_bytes = 4 * self.num_tokens * merge**2 * widest
        self.processor = image_processor.__file__
        self.processor_settings = {
            "factor": self._factor,
            "min_pixels": min_pixels,
            "max_pixels": max_pixels,
            "max_ratio": _MAX_RATIO,
        }
        numbers = self._pixels.factor, self._pixels.mean, self._pixels.std
        self.settings = json.dumps(["qwen_vl", _VERSION, self.processor_settings, *numbers])

    def _limits(self, fields: ConfigFields) -> tuple[int, int]:
        """Return the least and the largest number of pixels of a resized image."""
        size = ConfigFields(fields.table("size"), "image processor: size")
        unit = self._factor**2
        smallest = fields.optional_whole("min_pixels") or size.whole("shortest_edge", 4 * unit)
        largest = fields.optional_whole("max_pixels") or size.whole("longest_edge", 1280 * unit)
        if not unit <= largest or smallest > largest:
            raise fields.error(
                "size.longest_edge",
                f"expected at least {max(unit, smallest)} pixels, got {largest}",
            )
        return smallest, largest

    def _longest(self, min_pixels: int, max_pixels: int) -> int:
        """Return the tokens of an image, at most; the sides of long ones are rounded up."""
        factor, ratio = self._factor, math.sqrt(_MAX_RATIO)
        narrow = math.sqrt(max_pixels) * ratio / factor
        small = math.sqrt(min_pixels) / factor
        raised = (small * ratio + 1) * (small / ratio + 1)
        return max(max_pixels // factor**2, math.ceil(narrow), math.ceil(raised))

    def accepts(self, shape: Sequence[int], size: int) -> bool:
        """Return whether items may have a shape: both sides are multiples of a merged patch."""
        return super().accepts(shape, size) and not any(
            length % self._factor for length in shape[:2]
        )

    def token_ids(self, item: Item) -> Sequence[int]:
        """Return a token for each merged patch."""
        rows, columns = self._grid(item)
        return [self.token_id] * (rows * columns)

    def positions(self, item: Item) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return time, row and column of each merged patch."""
        rows, columns = np.indices(self._grid(item)).reshape(2, -1)
        return np.stack([np.zeros_like(rows), rows, columns]).astype(np.int64)

    def _grid(self, item: Item) -> tuple[int, int]:
        return item.shape[0] // self._factor, item.shape[1] // self._factor

    def encoder_input(self, item: torch.Tensor) -> torch.Tensor:
        """Return float32 [3, height, width] for a resized image."""
        return self._pixels.normalized(item)
