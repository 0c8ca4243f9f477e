"""How a model's prompts have media: the tokens in their places, and what its encoder gets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

__all__ = ["MediaFormat"]


class MediaFormat:
    """How images become tokens of a model's prompts, and what the model's encoder gets of them.

    Each placeholder of a prompt is replaced by the tokens of one image:
    `around`, `begin_ids`, `num_tokens` times `token_id`, `end_ids`, `around`.

    Images are processed by a program of the model, in a process of its own that also decodes them,
    with limits of time and memory. The program is a file with a function `start`, which gets
    `processor_settings` and returns a function from an RGB image of Pillow to the bytes of a uint8
    array of `item_shape`. It is run by its path, with little besides Pillow in memory.

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
        item_shape: shape of what the encoder gets of an image; its numbers are uint8.
        encode_bytes: memory that the encoder needs at once, for one image.
        processor: path of the program's file.
        processor_settings: plain data that `start` gets.
        settings: all that the encoder's input depends on besides the image; part of identifiers.
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
    processor: str
    processor_settings: Mapping[str, Any] = {}
    settings: str

    def identifier(self, content_hash: str) -> str:
        """Return a hash of an image's content and of the settings that it is processed with."""
        return hashlib.sha256(f"{content_hash} {self.settings}".encode()).hexdigest()
