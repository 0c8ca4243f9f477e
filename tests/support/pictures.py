"""Small encoded images for tests, made by Pillow."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def gradient(width: int = 6, height: int = 4) -> Image.Image:
    """Return an image with different pixels."""
    count = width * height
    values = np.arange(3 * count, dtype=np.uint32) * 255 // (3 * count)
    return Image.fromarray(values.astype(np.uint8).reshape(height, width, 3))


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return an image in a format."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes, type_: str = "image/png") -> str:
    """Return bytes as a data URL."""
    return f"data:{type_};base64,{base64.b64encode(data).decode()}"
