"""Images of prompts and messages in LLM and AsyncLLM: read by the part that places them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.errors import RequestError, shown
from hardpoint.plugins.image_input import ImageSource
from hardpoint.plugins.media import ProcessedImage
from hardpoint.typed import copied, is_list

__all__ = ["IMAGE_PARTS", "PromptImages", "has_unread_images", "image_of"]

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts of messages that have an image."""

_MEDIA, _IMAGE = "multi_modal_data", "image"

_DETAILS = (None, "auto")
"""Values of `detail` that are taken: how large an image is read, the model's processor decides."""


def has_unread_images(prompt: Any) -> bool:
    """Return whether a prompt has images that are not yet read."""
    media = prompt.get(_MEDIA) if isinstance(prompt, Mapping) else None
    images = media.get(_IMAGE) if isinstance(media, Mapping) else None
    listed = images if isinstance(images, list | tuple) else [images]
    return any(not isinstance(image, ProcessedImage | None) for image in listed)


class PromptImages:
    """Reads the images of an open model's prompts.

    Attributes:
        tokens: ids of tokens that stand for an image or for parts of one, the placeholder first;
            none if the model takes no images.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Read by the part that places images."""
        self._parts = parts.step_parts
        self.tokens: Sequence[int] = self._parts.media_tokens.get(_IMAGE, ())

    def read(self, images: Sequence[tuple[str, Any]]) -> Sequence[Any]:
        """Return images as prompts have them, in any thread.

        Args:
            images: each with its place, which names it in messages.

        Raises:
            RequestError: one is wrong, or above a limit; the message names it.
        """
        return self._parts.read_media(_IMAGE, images) if images else []

    def prompt(self, prompt: Any, place: str = "") -> Any:
        """Return a prompt whose images are read; any other prompt as it is.

        The engine refuses images for a model that takes none.

        Args:
            place: begins messages, if the prompt is one of several.

        Raises:
            RequestError: an image is wrong, or above a limit; the message names it.
        """
        if not self.tokens or not has_unread_images(prompt):
            return prompt
        media = prompt[_MEDIA]
        given = media[_IMAGE]
        listed = copied(given, f"{_MEDIA}.{_IMAGE}") if is_list(given) else [given]
        read = self.read(
            [(f"{place}{_MEDIA}.{_IMAGE}[{index}]", image) for index, image in enumerate(listed)]
        )
        return {**prompt, _MEDIA: {**media, _IMAGE: read}}


def image_of(part: dict[Any, Any], type_: str, path: str) -> tuple[str, Any]:
    """Return the image of a part of a message, and its place.

    Raises:
        RequestError: it has none, or something else besides.
    """
    names = ("image", "url", "path") if type_ == "image" else ("image_url",)
    given = [name for name in names if part.get(name) is not None]
    for name in part:
        if name not in ("type", "detail", *names) and part[name] is not None:
            raise RequestError(
                f"{path}.{shown(name)[1:-1]}: not supported; a part of the type {type_!r} has "
                f"{' or '.join(names)}"
            )
    if len(given) != 1:
        raise RequestError(f"{path}: expected {' or '.join(names)}, got {len(given)} of them")
    (name,) = given
    value, place, details = part[name], f"{path}.{name}", [part.get("detail")]
    if name == "image_url" and isinstance(value, Mapping):
        fields, place = dict(copied(value, place)), f"{place}.url"
        value = fields.pop("url", None)
        details.append(fields.pop("detail", None))
        if fields:
            raise RequestError(
                f"{path}.{name}: expected url and detail alone, got {shown(next(iter(fields)))}"
            )
    if name != "image" and not isinstance(value, str | ImageSource):
        raise RequestError(f"{place}: expected a string, got {type(value).__name__}")
    place = value.place if isinstance(value, ImageSource) else place
    for detail in details:
        if detail not in _DETAILS:
            raise RequestError(
                f'{place.rpartition(".")[0]}.detail: expected "auto", got {shown(detail)}; the '
                f"model reads every image in its own size"
            )
    return place, value
