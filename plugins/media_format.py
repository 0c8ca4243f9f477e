"""How a model's prompts have media: the tokens in their places, and what its encoder gets."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .media import Image

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MediaFormat"]


class MediaFormat(ABC):
    """How images become tokens of a model's prompts, and what the model's encoder gets of them.

    Each placeholder of a prompt is replaced by the tokens of one image:
    `around`, `begin_ids`, `num_tokens` times `token_id`, `end_ids`, `around`.

    Attributes:
        placeholder: the text that stands for an image.
        placeholder_id: its token.
        token_id: the token at the places of embeddings.
        begin_ids: tokens before these.
        end_ids: tokens after these.
        around: newlines before and after all of them, which become one token with newlines of
            the prompt next to them, where the tokenizer has one.
        num_tokens: tokens of an image.
        sees_itself: see `MultiModalFeature.sees_itself`; the model has `sees_ahead` then.
        item_shape: shape of what `process` returns; its numbers are uint8.
        encode_bytes: memory that the encoder needs at once, for one image.
        settings: all that `process` depends on besides the image; part of identifiers.
    """

    modalities: ClassVar[Sequence[str]] = ("image",)
    placeholder: str
    placeholder_id: int
    token_id: int
    begin_ids: Sequence[int]
    end_ids: Sequence[int]
    around: str = ""
    num_tokens: int
    sees_itself: bool = False
    item_shape: tuple[int, ...]
    encode_bytes: int = 0
    settings: str

    @abstractmethod
    def process(self, image: Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the numbers of an image for the encoder; in the frontend, in any thread."""

    def identifier(self, image: Image) -> str:
        """Return a hash of the image's content and of the settings that it is processed with."""
        content = f"{image.content_hash} {self.settings}"
        return hashlib.sha256(content.encode()).hexdigest()
