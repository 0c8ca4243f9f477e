"""Images in prompts and conversations, which become pixels before the engine gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.core.frontend.requests.prompts import copied, is_list
from hardpoint.errors import RequestError, shown
from hardpoint.plugins.image_input import ImageSource
from hardpoint.plugins.media import Image
from hardpoint.toolkit.images import ImageReader

__all__ = ["PartReader", "PromptImages", "has_unread_images"]

IMAGE_PARTS = ("image_url", "input_image", "image")
_OTHER_PARTS = frozenset(
    {
        "audio",
        "audio_embeds",
        "audio_url",
        "document",
        "file",
        "image_embeds",
        "input_audio",
        "input_file",
        "prompt_embeds",
        "video",
        "video_embeds",
        "video_url",
    }
)
"""Types of parts that others read, and no model here does."""

_MEDIA, _IMAGE = "multi_modal_data", "image"

GivenImages = list[tuple[str, Any]]
"""Images as they were given, each with its place."""


def has_unread_images(prompt: Any) -> bool:
    """Return whether a prompt has images that are not yet decoded."""
    media = prompt.get(_MEDIA) if isinstance(prompt, Mapping) else None
    images = media.get(_IMAGE) if isinstance(media, Mapping) else None
    listed = images if isinstance(images, list | tuple) else [images]
    return any(not isinstance(image, Image | None) for image in listed)


class PromptImages:
    """Reads the images of an open model's prompts.

    Attributes:
        tokens: ids of tokens that stand for an image or for parts of one, the placeholder first;
            none if the model takes no images.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Start nothing; the first image starts a process that decodes."""
        self.tokens: Sequence[int] = parts.step_parts.media_tokens.get(_IMAGE, ())
        self.reader = ImageReader(parts.config.images)

    def prompt(self, prompt: Any, place: str = "") -> Any:
        """Return a prompt whose images are decoded; any other prompt as it is.

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
        read = self.reader.read(
            [(f"{place}{_MEDIA}.{_IMAGE}[{index}]", image) for index, image in enumerate(listed)]
        )
        return {**prompt, _MEDIA: {**media, _IMAGE: read}}

    def close(self) -> None:
        """End the process that decodes."""
        self.reader.close()


class PartReader:
    """Takes the parts of messages that are no texts.

    Attributes:
        found: images, in the order of the conversation.
    """

    def __init__(self, *, takes_images: bool) -> None:
        """Take images if the model does."""
        self.found: GivenImages = []
        self._takes_images = takes_images

    def without_images(self, messages: Any) -> Any:
        """Return messages whose image parts are `{"type": "image"}`.

        Raises:
            RequestError: a part is of a type that the model does not take, or has no image.
        """
        if not is_list(messages):
            return messages
        return [
            self._message(message, f"messages[{index}]")
            for index, message in enumerate(copied(messages, "messages"))
        ]

    def _message(self, message: Any, path: str) -> Any:
        if not isinstance(message, Mapping):
            return message
        plain = copied(message, path)
        content = plain.get("content")
        if not is_list(content):
            return message
        parts = copied(content, f"{path}.content")
        if not any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts):
            return message
        read = [self._part(part, f"{path}.content[{index}]") for index, part in enumerate(parts)]
        return {**plain, "content": read}

    def _part(self, part: Any, path: str) -> Any:
        type_ = part.get("type") if isinstance(part, Mapping) else None
        if type_ in IMAGE_PARTS and self._takes_images:
            self.found.append(_source(copied(part, path), type_, path))
            return {"type": "image"}
        if isinstance(type_, str) and type_ != "text":
            raise unreadable_part(type_, f"{path}.type", takes_images=self._takes_images)
        return part


def unreadable_part(type_: str, place: str, *, takes_images: bool) -> RequestError:
    """Return the error of a part of another type."""
    takes = "text and images alone" if takes_images else "text alone"
    expected = '"text" or "image_url"' if takes_images else '"text"'
    known = type_ in _OTHER_PARTS or type_ in IMAGE_PARTS
    reason = f"; the model reads {takes}" if known else ""
    return RequestError(f"{place}: expected {expected}, got {shown(type_)}{reason}")


def _source(part: dict[Any, Any], type_: str, path: str) -> tuple[str, Any]:
    """Return the image of a part, and its place.

    Raises:
        RequestError: it has none, or something else besides.
    """
    names = ("image", "url", "path") if type_ == "image" else ("image_url",)
    given = [name for name in names if part.get(name) is not None]
    for name in part:
        # What `detail` asks for, the model's own processor decides.
        if name not in ("type", "detail", *names) and part[name] is not None:
            raise RequestError(
                f"{path}.{shown(name)[1:-1]}: not supported; a part of the type {type_!r} has "
                f"{' or '.join(names)}"
            )
    if len(given) != 1:
        raise RequestError(f"{path}: expected {' or '.join(names)}, got {len(given)} of them")
    (name,) = given
    value, place = part[name], f"{path}.{name}"
    if name == "image_url" and isinstance(value, Mapping):
        value, place = copied(value, place).get("url"), f"{place}.url"
    if name != "image" and not isinstance(value, str | ImageSource):
        raise RequestError(f"{place}: expected a string, got {type(value).__name__}")
    return (value.place if isinstance(value, ImageSource) else place), value
