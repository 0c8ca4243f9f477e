"""Media formats: placeholder tokens in prompts, and the inputs of the encoder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["MediaFormat"]


class MediaFormat:
    """The placeholder tokens of images in a model's prompts, and the inputs of its encoder.

    Each placeholder of a prompt is replaced by the tokens of one image:
    `around`, `begin_ids`, `token_ids`, `end_ids`, `around`.

    Images of a model with dynamic resolution differ in their shape and their number of tokens:
    `item_shape` has -1 for each size that differs, and `token_ids` depends on the item.

    Images are processed by a program of the model, in a process of its own that also decodes them,
    with limits of time and memory. The program is a file with a function `start`, which gets
    `processor_settings` and returns a function from an RGB image of Pillow to the bytes of a uint8
    array of `item_shape`, or to a tuple of its shape and its bytes. It is run by its path, with
    little besides Pillow in memory.

    Attributes:
        placeholder: the text that stands for an image.
        placeholder_id: its token.
        token_id: the token at the places of embeddings.
        begin_ids: tokens before these.
        end_ids: tokens after these.
        around: newlines before and after all of them, which become one token with newlines of
            the prompt next to them, where the tokenizer has one.
        num_tokens: tokens of an image, at most.
        sees_itself: see `MultiModalFeature.sees_itself`; the model has `sees_ahead` then.
        item_shape: shape of the encoder's input for an image, -1 for sizes that differ; its
            numbers are uint8.
        max_item_bytes: largest size of an item in bytes; needed with a -1 in `item_shape`.
        position_axes: axes of the positions of tokens. With more than one, `positions` returns the
            positions of an image, and `ForwardBatch.positions` is [axes, tokens] in steps with its
            tokens.
        extra_layers: decoder layers after which embeddings of an image are added to the hidden
            states, the first ones; `encode_media` returns [tokens, (1 + extra_layers) *
            hidden_size] then. The model calls `LayerHooks.added`.
        encode_bytes: memory that the encoder needs at once, for one image of `num_tokens`.
        processor: path of the program's file.
        processor_bytes: memory that the program needs besides images, such as for libraries.
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
    max_item_bytes: int = 0
    position_axes: int = 1
    extra_layers: int = 0
    encode_bytes: int = 0
    processor: str
    processor_bytes: int = 0
    processor_settings: Mapping[str, Any] = {}
    settings: str

    def identifier(self, content_hash: str) -> str:
        """Return a hash of an image's content and of the settings that it is processed with."""
        return hashlib.sha256(f"{content_hash} {self.settings}".encode()).hexdigest()

    def token_ids(self, item: np.ndarray[Any, np.dtype[np.uint8]]) -> Sequence[int]:  # noqa: ARG002
        """Return the tokens at the places of an item's embeddings; by default all `token_id`.

        Args:
            item: result of the processor, of `item_shape`.
        """
        return [self.token_id] * self.num_tokens

    def encoder_input(self, item: torch.Tensor) -> torch.Tensor:
        """Return the input of `Model.encode_media` for an item; by default the item, uint8.

        Args:
            item: result of the processor, on the device of the model.
        """
        return item

    def positions(
        self, item: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the positions of an item's tokens from its first one on, [axes, tokens].

        The position of the token after them is one above the largest. Called with several
        `position_axes` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no positions")

    def accepts(self, shape: Sequence[int], size: int) -> bool:
        """Return whether items may have a shape, and a size in bytes."""
        same_rank = len(shape) == len(self.item_shape)
        fits = same_rank and all(
            length > 0 if expected == -1 else length == expected
            for length, expected in zip(shape, self.item_shape, strict=True)
        )
        return fits and math.prod(shape) == size <= self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Largest size of an item in bytes."""
        return self.max_item_bytes if -1 in self.item_shape else math.prod(self.item_shape)
