"""Where images come from: data URLs, bytes, files of permitted folders, arrays, Pillow's images."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import Image, ImageSource, ProcessedImage
from hardpoint.plugins.requests.media_format import MediaFormat
from hardpoint.toolkit.folders import permitted_path

from .decoder import ImageDecoder, check_size
from .fetch import Fetcher

__all__ = ["ImageReader"]

_FORMS = (
    "a data: URL, bytes of an encoded image, a path in one of images.folders, a PIL image or a "
    "uint8 array [height, width, 3]"
)


class ImageReader:
    """Converts images of any supported form to pixels or encoder inputs.

    Usable from several threads; closing it ends the process that decodes and processes.
    """

    def __init__(
        self,
        limits: ImagesConfig,
        fetcher: Fetcher | None = None,
        *,
        media: MediaFormat | None = None,
    ) -> None:
        """Open nothing.

        Args:
            fetcher: fetches remote images; None is one for public addresses, if they are enabled.
            media: has the processor of a model; None leaves the pixels as they are.
        """
        self._limits, self._media = limits, media
        self._decoder = ImageDecoder(limits, media)
        self._fetcher = Fetcher(limits.remote, limits.max_bytes) if fetcher is None else fetcher

    def read(self, images: Sequence[tuple[str, Any]]) -> list[Image | ProcessedImage]:
        """Return the images of a prompt, processed if there is a processor.

        Args:
            images: each with its place, which names it in messages. An `ImageSource` has its own.
                Processed images stay as they are.

        Raises:
            RequestError: there are too many, or one is wrong; the message names its place.
            HardpointError: no process that decodes can be started.
        """
        limit = self._limits.max_items
        if len(images) > limit:
            place = _place(*images[limit])
            raise RequestError(
                f"{place}: expected at most {limit} images in a prompt (images.max_items), got "
                f"{len(images)}"
            )
        read: list[Image | ProcessedImage] = []
        size = pixels = 0
        for own_place, source in images:
            place, owner = _place(own_place, source), _owner(source)
            image = self._one(source, place)
            if isinstance(image, bytes):
                size += len(image)
                self._check_total("bytes", size, self._limits.max_total_bytes, place)
                image = self._decoder.decode(image, place, owner)
            pixels += image.width * image.height
            self._check_total("pixels", pixels, self._limits.max_total_pixels, place)
            if isinstance(image, Image):
                image = self._decoder.process(image, place, owner)
            read.append(image)
        return read

    def _check_total(self, unit: str, total: int, limit: int, place: str) -> None:
        if total > limit:
            raise RequestError(
                f"{place}: expected images of at most {limit} {unit} together in a prompt "
                f"(images.max_total_{unit}), got more"
            )

    def close(self) -> None:
        """End the process that decodes."""
        self._decoder.close()

    def _one(self, source: Any, place: str) -> bytes | Image | ProcessedImage:
        """Return an image that is decoded, or the bytes of an encoded one."""
        if isinstance(source, ImageSource):
            return self._of_url(source.url, place)
        if isinstance(source, Image):
            return self._checked(source, place)
        if isinstance(source, ProcessedImage):
            return self._processed(source, place)
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if isinstance(source, os.PathLike):
            return self._of_path(os.fsdecode(source), place)
        if isinstance(source, str):
            is_url = source[:5].lower() in ("data:", "file:") or "://" in source[:16]
            return self._of_url(source, place) if is_url else self._of_path(source, place)
        if isinstance(source, np.ndarray):
            return self._of_array(source, place)
        if (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(
            source, pillow.Image
        ):
            return self._of_pillow(source, place)
        raise RequestError(f"{place}: expected {_FORMS}, got {type(source).__name__}")

    def _processed(self, image: ProcessedImage, place: str) -> ProcessedImage:
        media = self._media
        if (
            media is None
            or image.settings != media.settings
            or not media.accepts(image.shape or media.item_shape, len(image.data))
        ):
            raise RequestError(f"{place}: expected an image that this model's processor has made")
        return image

    def _of_url(self, url: str, place: str) -> bytes:
        scheme = url[:5].lower()
        if scheme == "data:":
            return self._data(url, place)
        if scheme == "file:":
            return self._of_file(_file_path(url, place), place)
        return self._fetcher.fetch(url, place)

    def _data(self, url: str, place: str) -> bytes:
        """Return the bytes of a data URL; its media type is not asked, the content has the format.

        Raises:
            RequestError: it is not base64, or too long.
        """
        head, comma, text = url[5:].partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RequestError(
                f"{place}: expected a data: URL with base64, data:image/png;base64,..., got "
                f"{shown(url[:40])}"
            )
        limit = self._limits.max_bytes
        if len(text) > 4 * (limit // 3 + 1):
            raise RequestError(
                f"{place}: expected an image of at most {limit} bytes (images.max_bytes), got "
                f"about {len(text) // 4 * 3}"
            )
        try:
            return base64.b64decode(text.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise RequestError(
                f"{place}: expected base64 after the comma of a data: URL, with A-Z, a-z, 0-9, +, "
                f"/ and as many = as it needs, got something else"
            ) from None

    def _of_path(self, name: str, place: str) -> bytes:
        with contextlib.suppress(ValueError):  # a name of a user that no path can have
            name = os.path.expanduser(name)
        return self._of_file(str(Path.cwd() / name), place)

    def _of_file(self, name: str, place: str) -> bytes:
        """Return a file of a permitted folder; links are followed before that is checked."""
        path = permitted_path(name, self._limits.folders)
        if path is None:
            raise RequestError(
                f"{place}: expected a path in one of images.folders"
                f"{'' if self._limits.folders else ', which is empty'}"
            )
        return self._content(path, place)

    def _content(self, path: Path, place: str) -> bytes:
        limit = self._limits.max_bytes
        # Without waiting for a writer of a pipe, and without a link that has come since.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
        try:
            with open(os.open(path, flags), "rb") as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return file.read(limit + 1)
        except OSError:
            pass
        raise RequestError(f"{place}: expected the path of a file that can be read")

    def _of_array(self, array: np.ndarray[Any, Any], place: str) -> Image:
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            raise RequestError(
                f"{place}: expected a uint8 array [height, width, 3], got {array.dtype} "
                f"{list(array.shape)}"
            )
        height, width = array.shape[:2]
        check_size(width, height, self._limits, place)
        return Image(width, height, array.tobytes())

    def _of_pillow(self, pillow_image: Any, place: str) -> Image:
        """Return the pixels of an opened PIL image; decode it here if necessary."""
        if pillow_image.width < 1 or pillow_image.height < 1:
            raise RequestError(f"{place}: expected an image with pixels, got {pillow_image.size}")
        check_size(pillow_image.width, pillow_image.height, self._limits, place)
        try:
            image = pillow_image if pillow_image.mode == "RGB" else pillow_image.convert("RGB")
            pixels = image.tobytes()
        except Exception as cause:  # of the caller's own object: the caller gets its error
            raise RequestError(f"{place}: reading the PIL image failed") from cause
        return Image(image.width, image.height, pixels)

    def _checked(self, image: Image, place: str) -> Image:
        if (
            image.width < 1
            or image.height < 1
            or len(image.pixels) != (3 * image.width * image.height)
        ):
            raise RequestError(
                f"{place}: expected 3 * width * height bytes of pixels, got {len(image.pixels)} "
                f"for {image.width} x {image.height}"
            )
        check_size(image.width, image.height, self._limits, place)
        return image


def _file_path(url: str, place: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise RequestError(
            f"{place}: expected a file: URL such as file:///folder/image.png, got {shown(url[:40])}"
        ) from None
    if parts.netloc not in ("", "localhost"):
        raise RequestError(f"{place}: expected a file: URL without a host")
    return unquote(parts.path)


def _owner(source: Any) -> str:
    return source.owner if isinstance(source, ImageSource) else ""


def _place(place: str, source: Any) -> str:
    return source.place if isinstance(source, ImageSource) else place
