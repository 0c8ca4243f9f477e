"""Conversion of encoded images to pixels and encoder inputs, in a process with limits."""

from __future__ import annotations

from hardpoint.errors import RequestError
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import Image, ProcessedImage
from hardpoint.plugins.requests.media_format import MediaFormat
from hardpoint.toolkit.limited import LimitedProcess

from . import decode_program
from .decode_program import (
    DAMAGED,
    FAULT,
    FRAMES,
    HASH_BYTES,
    IMAGE,
    MEMORY,
    NUMBERS,
    SIZE,
    read_shape,
)
from .header import FORMATS, read_header

__all__ = ["ImageDecoder", "check_size"]

_BYTES_PER_PIXEL = 32
_OTHER_BYTES = 256 << 20


def check_size(width: int, height: int, limits: ImagesConfig, place: str) -> None:
    """Check the size of an image.

    Args:
        place: names the image in messages.

    Raises:
        RequestError: it has too many pixels, or too long a shape.
    """
    if width * height > limits.max_pixels:
        raise RequestError(
            f"{place}: expected an image of at most {limits.max_pixels} pixels "
            f"(images.max_pixels), got {width} x {height}"
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise RequestError(
            f"{place}: expected an image with a longer side of at most "
            f"{limits.max_aspect_ratio:g} times the shorter one (images.max_aspect_ratio), got "
            f"{width} x {height}"
        )


class ImageDecoder:
    """Decodes images, and processes them, in a process of its own, which starts with the first one.

    Usable from several threads, which wait for each other.
    """

    def __init__(self, limits: ImagesConfig, media: MediaFormat | None = None) -> None:
        """`media`: has the processor of a model; None leaves the pixels as they are."""
        self._limits, self._media = limits, media
        size = 0 if media is None else media.item_bytes
        processor = None if media is None else (media.processor, dict(media.processor_settings))
        other_bytes = _OTHER_BYTES + (0 if media is None else media.processor_bytes)
        self._process = LimitedProcess(
            str(decode_program.__file__),
            "to decode images",
            seconds=limits.decode_seconds,
            max_bytes=other_bytes + _BYTES_PER_PIXEL * limits.max_pixels + 4 * limits.max_bytes,
            max_answer_bytes=max(3 * limits.max_pixels, 2 * size) + 10_000,
            needs="pillow",
            settings={"max_pixels": limits.max_pixels, "processor": processor},
        )

    @property
    def pid(self) -> int | None:
        """The id of the process that decodes; None if there is none."""
        return self._process.pid

    def decode(self, data: bytes, place: str, owner: str = "") -> Image | ProcessedImage:
        """Return an encoded image, processed if there is a processor.

        Args:
            place: names the image in messages.
            owner: whom the image is of; owners have turns.

        Raises:
            RequestError: it has no format that is decoded, is damaged, or is above a limit; or the
                processor failed.
            HardpointError: no process can be started.
        """
        limit = self._limits.max_bytes
        if len(data) > limit:
            raise RequestError(
                f"{place}: expected an image of at most {limit} bytes (images.max_bytes), got "
                f"{len(data)}"
            )
        try:
            header = read_header(data)
        except ValueError as wrong:
            raise RequestError(f"{place}: expected a whole image; {wrong}") from None
        if header is None:
            *names, last = FORMATS
            content = "nothing" if not data else "another format"
            raise RequestError(
                f"{place}: expected an image in the format {', '.join(names)} or {last}, by its "
                f"content; got {content}"
            )
        check_size(header.width, header.height, self._limits, place)
        answer = self._process.ask(header.format.encode() + b"\n", data, owner=owner)
        return self._read(answer, header.format, place)

    def process(self, image: Image, place: str, owner: str = "") -> Image | ProcessedImage:
        """Return a decoded image, within the limits, processed if there is a processor.

        Raises:
            RequestError: the processor failed, or takes too much time or memory.
            HardpointError: no process can be started.
        """
        if self._media is None:
            return image
        head = f"RGB {image.width} {image.height}\n".encode()
        answer = self._process.ask(head, image.pixels, owner=owner)
        return self._read(answer, None, place)

    def _read(
        self, answer: bytes | None, format_: str | None, place: str
    ) -> Image | ProcessedImage:
        """Return the image of an answer; `format_` is None if the image was decoded before."""
        kind = MEMORY if answer is None else answer[:1]
        if answer is not None and kind == IMAGE:
            width, height = NUMBERS.unpack_from(answer, 1)
            check_size(width, height, self._limits, place)
            return self._made(width, height, answer[1 + NUMBERS.size :], place)
        if answer is not None and kind == FAULT:
            raise RequestError(
                f"{place}: the model's image processor failed: {answer[1:].decode()}"
            )
        if answer is not None and kind == FRAMES:
            frames, _ = NUMBERS.unpack_from(answer, 1)
            raise RequestError(
                f"{place}: expected an image of one frame, got {frames} frames; of a GIF alone, "
                f"the first one is taken"
            )
        if kind == SIZE:
            raise RequestError(
                f"{place}: expected an image of at most {self._limits.max_pixels} pixels "
                f"(images.max_pixels), got a frame with more"
            )
        if kind == DAMAGED:
            raise RequestError(
                f"{place}: expected a whole image; this {format_} image is damaged or truncated"
            )
        steps = [] if format_ is None else ["decoding"]
        steps += [] if self._media is None else ["processing"]
        raise RequestError(
            f"{place}: {' and '.join(steps)} it takes more than {self._limits.decode_seconds:g} s "
            f"(images.decode_seconds) or too much memory"
        )

    def _made(self, width: int, height: int, made: bytes, place: str) -> Image | ProcessedImage:
        media = self._media
        if media is None:
            return Image(width, height, made)
        digest, (shape, data) = made[:HASH_BYTES].hex(), read_shape(made[HASH_BYTES:])
        if not media.accepts(shape or media.item_shape, len(data)):
            described = f" {list(shape)}" if shape else ""
            limit = f"at most {media.item_bytes}" if -1 in media.item_shape else media.item_bytes
            raise RequestError(
                f"{place}: the model's image processor made {len(data)} bytes{described} of it, "
                f"expected {limit}, uint8 {list(media.item_shape)}"
            )
        return ProcessedImage(width, height, digest, media.settings, data, shape)

    def close(self) -> None:
        """End the process."""
        self._process.close()
