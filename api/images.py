"""Images of prompts in LLM and AsyncLLM: read before the engine gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.plugins.media import Image
from hardpoint.toolkit.images import ImageReader
from hardpoint.typed import copied, is_list

__all__ = ["PromptImages", "has_unread_images"]

_MEDIA, _IMAGE = "multi_modal_data", "image"


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
