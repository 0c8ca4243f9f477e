"""The image decoder program, in a limited process because C libraries read untrusted input.

A request is the name of a format, a line end, and the encoded image; or RGB, width and height, a
line end, and pixels. An answer is the size and the pixels, or a letter for the error. With the
processor of a model, it is the size, a hash of the pixels, the number of dimensions and the
dimensions of the result of the processor, none if it gave bytes alone, and that result. It imports
Pillow alone, and of that the readers of four formats.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any

IMAGE, DAMAGED, FRAMES, SIZE, MEMORY, FAULT = b"I", b"D", b"F", b"S", b"M", b"P"
"""First byte of an answer; an image's size follows it, a number of frames, or a text."""

NUMBERS = struct.Struct("<II")
SHAPE = struct.Struct("<I")
HASH_BYTES = 32

_MOST_OF_A_FAULT = 300  # characters

Processor = Callable[[Any], "bytes | tuple[tuple[int, ...], bytes]"]

_ORIENTATION = 0x0112


def start(settings: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Return the function that answers requests.

    Args:
        settings: `max_pixels` of an image; `processor`, None or the path of a model's program and
            its settings.
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

    processor = None if settings["processor"] is None else _loaded(*settings["processor"])

    def answer(request: bytes) -> bytes:
        head, _, data = request.partition(b"\n")
        name, *size = head.split()
        try:
            if size:
                width, height = map(int, size)
                image = Image.frombytes("RGB", (width, height), data)
            else:
                image = decode(readers[name](BytesIO(data)), max_pixels)
            return image if isinstance(image, bytes) else answer_of(image, processor)
        except MemoryError:
            return MEMORY
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            return SIZE
        except Exception:  # readers raise anything for damaged files
            return DAMAGED

    return answer


def _loaded(path: str, settings: dict[str, Any]) -> Processor:
    specification = importlib.util.spec_from_file_location("image_processor", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    started: Processor = module.start(settings)
    return started


def answer_of(image: Any, processor: Processor | None) -> bytes:
    """Return the answer to an RGB image.

    Raises:
        MemoryError: there is too little.
    """
    size, pixels = NUMBERS.pack(*image.size), image.tobytes()
    if processor is None:
        return b"".join((IMAGE, size, pixels))
    digest = hashlib.sha256(f"RGB {image.width} {image.height}\n".encode())  # `Image.content_hash`
    digest.update(pixels)
    try:
        made = processor(image)
        shape, data = made if isinstance(made, tuple) and len(made) == 2 else ((), made)
        if not isinstance(data, bytes):
            raise TypeError(f"expected bytes, got {type(data).__name__}")
        dimensions = SHAPE.pack(len(shape)) + b"".join(map(SHAPE.pack, shape))
    except MemoryError:
        raise
    except Exception as cause:
        text = f"{type(cause).__name__}: {cause}"
        return FAULT + text[:_MOST_OF_A_FAULT].encode(errors="replace")
    return b"".join((IMAGE, size, digest.digest(), dimensions, data))


def read_shape(made: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the data that follow the hash of an answer."""
    (count,) = SHAPE.unpack_from(made)
    end = SHAPE.size * (1 + count)
    return tuple(number for (number,) in SHAPE.iter_unpack(made[SHAPE.size : end])), made[end:]


def decode(image: Any, max_pixels: int) -> Any:
    """Return an image that was opened, and is not yet decoded, as RGB; or the answer to it."""
    if image.width * image.height > max_pixels:
        return SIZE
    # The frames of a GIF would have to be decoded to be counted; only the first one is requested.
    frames = 1 if image.format == "GIF" else getattr(image, "n_frames", 1)
    if frames > 1:
        return FRAMES + NUMBERS.pack(min(frames, (1 << 32) - 1), 0)
    image.load()
    if image.width * image.height > max_pixels:  # a frame of a GIF may be larger than the image
        return SIZE
    return _turned(_rgb(image), image.getexif().get(_ORIENTATION, 1))


def _rgb(image: Any) -> Any:
    """Return an image as RGB of 8 bits, without its alpha channel."""
    if image.mode.startswith("I"):  # gray of 16 bits: its high bytes, like color channels
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def _turned(image: Any, orientation: Any) -> Any:
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
