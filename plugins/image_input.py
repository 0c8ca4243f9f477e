"""Images that requests bring: the table `[images]` of the configuration, and their sources."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from hardpoint.typed import Strict

from .config_tables import Count, PositiveSeconds

__all__ = ["ImageSource"]

Host = Annotated[str, Meta(pattern=r"^(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*$", max_length=253)]


class RemoteImagesConfig(Strict):
    """Images that requests name by an http or https URL, which this program then fetches.

    Attributes:
        enabled: whether they are fetched at all. Requests then make this host open connections to
            public addresses.
        hosts: hosts that images may come from, in lower case; "*.example.com" stands for all hosts
            below example.com. It holds for each redirect, too. None is any.
        ports: ports that URLs may have.
        seconds: maximum time to fetch an image, redirects included.
    """

    enabled: bool = False
    hosts: list[Host] | None = None
    ports: list[Annotated[int, Meta(ge=1, le=65535)]] = field(default_factory=lambda: [80, 443])
    seconds: PositiveSeconds = 10.0


class ImagesConfig(Strict):
    """Images in prompts: where they may come from, and their limits, checked before decoding.

    Attributes:
        max_items: images of a prompt.
        max_bytes: size of an encoded image.
        max_total_bytes: size of all encoded images of a prompt.
        max_pixels: width times height of an image. A process that decodes one may use 32 bytes for
            each, and 256 MiB.
        max_total_pixels: pixels of all images of a prompt.
        max_aspect_ratio: the longer side divided by the shorter one.
        max_queued: images of one key of a server that are being read or wait for it; a request
            above it is answered with 429. One request alone may have `max_items` in any case.
        decode_seconds: maximum time to decode an image, and to process it for the model.
        folders: folders whose image files prompts may name by a path or a `file:` URL; those that
            are relative or begin with "~" are the program's. None by default.
        remote: images by http and https URLs.
    """

    max_items: Count = 16
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 16 << 20
    max_total_bytes: Annotated[int, Meta(ge=1, le=1 << 32)] = 32 << 20
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 28)] = 1 << 25
    max_total_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] = 1 << 26
    max_aspect_ratio: Annotated[float, Meta(ge=1, le=65536)] = 200.0
    max_queued: Count = 128
    decode_seconds: PositiveSeconds = 10.0
    folders: list[Annotated[str, Meta(min_length=1)]] = []
    remote: RemoteImagesConfig = RemoteImagesConfig()


class ImageSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An image of a request, not yet decoded.

    Attributes:
        url: a `data:` URL; or, where the operator allows it, an http, https or `file:` URL.
        place: what errors call it: "messages[0].content[1].image_url.url".
        owner: whom it is of: the name of a server's key; owners have turns, and at most
            `images.max_queued` images at once. Empty where there are no keys.
    """

    url: str
    place: str
    owner: str = ""
