"""The program that decodes images, in a limited process: libraries in C read what strangers send.

A request is the name of a format, a line end, and the encoded image. An answer is the size and the
pixels, or a letter for what is wrong. It imports Pillow alone, and of that the readers of
four formats.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any

IMAGE, DAMAGED, FRAMES, SIZE, MEMORY = b"I", b"D", b"F", b"S", b"M"
"""First byte of an answer; an image's size follows it, or a number of frames."""

NUMBERS = struct.Struct("<II")

_ORIENTATION = 0x0112


def start(settings: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Return the function that answers requests.

    Args:
        settings: `max_pixels` of an image.
    """
    from PIL import (  # noqa: PLC0415
        GifImagePlugin,
        Image,
        ImageFile,
        JpegImagePlugin,
        PngImagePlugin,
        WebPImagePlugin,
    )

    max_pixels: int = settings["max_pixels"]
    Image.MAX_IMAGE_PIXELS = max_pixels
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    readers: dict[bytes, Callable[[BytesIO], Any]] = {
        b"PNG": PngImagePlugin.PngImageFile,
        b"JPEG": JpegImagePlugin.JpegImageFile,
        b"WEBP": WebPImagePlugin.WebPImageFile,
        b"GIF": GifImagePlugin.GifImageFile,
    }

    def answer(request: bytes) -> bytes:
        name, _, data = request.partition(b"\n")
        try:
            return decode(readers[name](BytesIO(data)), max_pixels)
        except MemoryError:
            return MEMORY
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            return SIZE
        except Exception:  # of what is damaged, readers raise anything
            return DAMAGED

    return answer


def decode(image: Any, max_pixels: int) -> bytes:
    """Return the answer to an image that was opened, and is not yet decoded."""
    if image.width * image.height > max_pixels:
        return SIZE
    # Of a GIF, the frames would have to be decoded to be counted; the first one is what is asked.
    frames = 1 if image.format == "GIF" else getattr(image, "n_frames", 1)
    if frames > 1:
        return FRAMES + NUMBERS.pack(min(frames, (1 << 32) - 1), 0)
    image.load()
    if image.width * image.height > max_pixels:  # a frame of a GIF may be larger than the image
        return SIZE
    turned = _turned(_rgb(image), image.getexif().get(_ORIENTATION, 1))
    return b"".join((IMAGE, NUMBERS.pack(*turned.size), turned.tobytes()))


def _rgb(image: Any) -> Any:
    """Return an image as RGB of 8 bits, without its alpha channel."""
    if image.mode.startswith("I"):  # grey of 16 bits: its high bytes, as those of colours
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def _turned(image: Any, orientation: Any) -> Any:
    """Return an image as its EXIF orientation shows it."""
    from PIL.Image import Transpose  # noqa: PLC0415

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image
