"""Images in conversations, as the dialects have them, and as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.plugins import RequestError
from hardpoint.plugins.requests import ImageSource
from hardpoint.plugins.server import AsyncGenerator

Part = dict[str, Any]

Content = str | list[str | Part]
"""A text, or texts and images in any order."""


def image_part(url: str, place: str, detail: Any = None) -> Part:
    """Return an image as a part of a message.

    Args:
        place: names it in messages; the conversation that the engine gets may have other indices.
        detail: how large it is to be read, unchecked; None leaves it open.
    """
    part = {"type": "image_url", "image_url": ImageSource(url, place)}
    return part if detail is None else {**part, "detail": detail}


def placed_images(content: Any, path: str) -> Any:
    """Return content with the places of its images; anything else as it is."""
    if not isinstance(content, list):
        return content
    placed = []
    for index, part in enumerate(content):
        image = part.get("image_url") if isinstance(part, dict) else None
        place = f"{path}[{index}].image_url"
        if isinstance(image, dict) and isinstance(image.get("url"), str):
            source = ImageSource(image["url"], f"{place}.url")
            part = {**part, "image_url": {**image, "url": source}}
        elif isinstance(image, str):
            part = {**part, "image_url": ImageSource(image, place)}
        placed.append(part)
    return placed


def with_owner(messages: Sequence[Part], owner: str) -> list[Part]:
    """Return messages with the owner of their images, for the order of decoding.

    Args:
        owner: empty leaves them without one.
    """
    owned = list(messages)
    if not owner:
        return owned
    for index, message in enumerate(owned):
        content = message.get("content")
        if isinstance(content, list) and any(_source_of(part) for part in content):
            owned[index] = {**message, "content": [_owned(p, owner) for p in content]}
    return owned


def _source_of(part: Any) -> ImageSource | None:
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    return url if isinstance(url, ImageSource) else None


def _owned(part: Any, owner: str) -> Any:
    if (source := _source_of(part)) is None:
        return part
    source, image = msgspec.structs.replace(source, owner=owner), part["image_url"]
    url = {**image, "url": source} if isinstance(image, Mapping) else source
    return {**part, "image_url": url}


def joined(parts: Sequence[str | Part]) -> Content:
    """Return the content of a message: a text, unless it has images."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]


def added(content: Content, more: Content) -> Content:
    """Return the content of a message that goes on."""
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}\n{more}"
    return joined([part for content_part in (content, more) for part in _listed(content_part)])


def _listed(content: Content) -> list[str | Part]:
    return [content] if isinstance(content, str) else content


def check_images(engine: AsyncGenerator, messages: Sequence[Mapping[str, Any]], type_: str) -> None:
    """Check that the model takes images, if there are some.

    Args:
        type_: what the dialect calls the part of an image.

    Raises:
        RequestError: it takes none; the message names the first one.
    """
    if engine.model.takes_images:
        return
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            source = part.get("image_url") if isinstance(part, Mapping) else None
            if isinstance(source, ImageSource):
                place = source.place.rpartition(".source" if type_ == "image" else ".")[0]
                raise RequestError(
                    f"{place}.type: {type_!r} is not supported: the model reads text alone"
                )
