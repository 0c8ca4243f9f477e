"""The program that resizes images for Qwen2.5-VL and Qwen3-VL, in a limited process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_BICUBIC = 3  # as Pillow numbers it


def start(settings: dict[str, Any]) -> Callable[[Any], tuple[tuple[int, ...], bytes]]:
    """Return the function that resizes images, to uint8 [height, width, 3].

    Args:
        settings: `factor` of both sides, `min_pixels`, `max_pixels` and `max_ratio` of the sides.
    """
    limits = {name: settings[name] for name in ("factor", "min_pixels", "max_pixels")}

    def process(image: Any) -> tuple[tuple[int, ...], bytes]:
        width, height = image.size
        ratio = max(width, height) / min(width, height)
        if ratio > settings["max_ratio"]:
            raise ValueError(
                f"expected an image with a longer side of at most {settings['max_ratio']} times "
                f"the shorter one, got {width} x {height}"
            )
        height, width = resized(height, width, **limits)
        return (height, width, 3), image.resize((width, height), _BICUBIC).tobytes()

    return process


def resized(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return height and width as multiples of a factor, within limits of their product."""
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    return rows, columns
