"""Images of prompts: decoded images and encoder inputs."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

__all__ = ["ImageSource", "MultiModalFeature"]


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A decoded image.

    Attributes:
        width: pixels of a row, 1 or more.
        height: rows, 1 or more.
        pixels: RGB of 8 bits each, row by row: 3 * width * height bytes.
    """

    width: int
    height: int
    pixels: bytes

    @property
    def content_hash(self) -> str:
        """SHA-256 of size and pixels, in hexadecimal."""
        digest = hashlib.sha256(f"RGB {self.width} {self.height}\n".encode())
        digest.update(self.pixels)
        return digest.hexdigest()


class ProcessedImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An image as the encoder of a model gets it.

    Attributes:
        width, height: size of the image itself.
        content_hash: `Image.content_hash` of the image itself.
        settings: `MediaFormat.settings` that it was processed with.
        data: result of the model's processor.
        shape: shape of data, if it differs between images.
    """

    width: int
    height: int
    content_hash: str
    settings: str
    data: bytes
    shape: tuple[int, ...] = ()


class MultiModalFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One image, sound or video of a prompt, which an encoder turns into embeddings.

    Attributes:
        identifier: a hash of the content; equal content is encoded once.
        offset: prompt position of its first placeholder token.
        length: placeholder tokens that it covers; also its cost in the encoder budget.
        modality: "image".
        sees_itself: whether its tokens see later tokens, up to its last one. They are computed
            in one step then, and no cached prefix ends between them.
        data: array for the encoder; there for `RequestFilter.check` of the encoding part.
            The engine takes it off then: schedulers and workers get None, and the part sends it
            with the plan of the step that encodes it.
    """

    identifier: str
    offset: int
    length: int
    modality: str = "image"
    sees_itself: bool = False
    data: Any = None

    @property
    def end(self) -> int:
        """Prompt position after its last placeholder token."""
        return self.offset + self.length


class ImageSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An image of a request, not yet decoded.

    Attributes:
        url: a `data:` URL; or, where the operator allows it, an http, https or `file:` URL.
        place: its path in errors: "messages[0].content[1].image_url.url".
        owner: whom it is of: the name of a server's key; owners have turns, and at most
            `images.max_queued` images at once. Empty where there are no keys.
    """

    url: str
    place: str
    owner: str = ""
