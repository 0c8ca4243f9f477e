"""The image processor of Gemma 3, in a process with limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BILINEAR = 2  # as Pillow numbers it


def start(settings: dict[str, Any]) -> Callable[[Any], bytes]:
    """Return the function that resizes images to `size`, to uint8 [size, size, 3]."""
    size: int = settings["size"]

    def process(image: Any) -> bytes:
        resized: bytes = image.resize((size, size), _BILINEAR).tobytes()
        return resized

    return process
