"""Checks of models with images in their prompts: formats and embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint.plugins import Model, ModelConfig, ModelFiles
from hardpoint.plugins.config.engine import ImagesConfig
from hardpoint.plugins.requests.media import Image, ProcessedImage
from hardpoint.plugins.requests.media_format import MediaFormat
from hardpoint.testing.model.model_sequences import relative_difference, summary
from hardpoint.testing.reporting.calls import call
from hardpoint.testing.suite import short_repr
from hardpoint.toolkit.images import ImageReader

from .rules import EMBEDDED, ENCODE, FORMAT, IDENTIFIERS, PROCESS

__all__ = ["MediaChecks", "encoded"]

_SIZES = ((1, 1), (40, 3), (9, 64), (64, 9))
"""Widths and heights of images."""


def _examples_of(media: MediaFormat) -> list[Image]:
    drawn = np.random.default_rng(len(media.modalities))
    return [
        Image(width, height, drawn.integers(0, 256, 3 * width * height, np.uint8).tobytes())
        for width, height in _SIZES
    ]


def encoded(model: Model, media: MediaFormat) -> list[torch.Tensor]:
    """Return the embeddings of one image, encoded by a loaded model."""
    (processed,) = _processed(media, _examples_of(media)[1:2])
    return list(model.encode_media(media.modalities[0], [_item(model, media, processed)]))


def _processed(media: MediaFormat, images: Sequence[Image]) -> list[ProcessedImage]:
    with contextlib.closing(ImageReader(ImagesConfig(), media=media)) as reader:
        named = [(f"an image of {image.width} x {image.height}", image) for image in images]
        processed: list[ProcessedImage] = [call(PROCESS, reader.read, [item])[0] for item in named]
    return processed


def _array(media: MediaFormat, image: ProcessedImage) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(image.data, np.uint8).reshape(image.shape or media.item_shape)


def _item(model: Model, media: MediaFormat, image: ProcessedImage) -> torch.Tensor:
    numbers = torch.from_numpy(_array(media, image).copy()).to(model.context.device)
    return media.encoder_input(numbers)


@dataclass(frozen=True)
class MediaChecks:
    """The checks of one model.

    Attributes:
        model: its class.
        config: its configuration.
        files: its files, if its format is read from some.
        tolerance: maximum relative difference of embeddings.
    """

    model: type[Model]
    config: ModelConfig
    files: ModelFiles | None
    tolerance: float

    def format(self) -> MediaFormat | None:
        """Return the model's format, which is as it should be; None for a model of text alone.

        Raises:
            Violation: it is not.
        """
        first, second = (
            call(FORMAT, self.model.media_format, self.config, self.files) for _ in range(2)
        )
        if first is None and second is None:
            return None
        for media in (first, second):
            if not isinstance(media, MediaFormat):
                raise FORMAT.violation(
                    f"media_format() returned {short_repr(media)}, expected a MediaFormat or None"
                )
            self._check_format(media)
        for name in _ATTRIBUTES:
            value, other = getattr(first, name), getattr(second, name)
            if value != other:
                raise FORMAT.violation(
                    f"{name} is {short_repr(value)}, and of a second format {short_repr(other)}"
                )
        if first.sees_itself and not self.model.sees_ahead:
            raise FORMAT.violation(
                "sees_itself is True, and the model's sees_ahead is False",
                "set `sees_ahead = True` in the model's class body",
            )
        checked: MediaFormat = first
        return checked

    def _check_format(self, media: MediaFormat) -> None:
        for name, (is_right, expected) in _ATTRIBUTES.items():
            value = getattr(media, name, None)
            if not is_right(value):
                raise FORMAT.violation(f"{name} is {short_repr(value)}, expected {expected}")
        tokens = (media.placeholder_id, media.token_id, *media.begin_ids, *media.end_ids)
        if wrong := [token for token in tokens if not 0 <= token < self.config.vocab_size]:
            last = self.config.vocab_size - 1
            raise FORMAT.violation(f"it has the token {wrong[0]}, expected token ids in 0..{last}")
        around = (*media.begin_ids, *media.end_ids)
        if media.token_id in around or (around and media.token_id == media.placeholder_id):
            raise FORMAT.violation(
                f"token_id is {media.token_id}, which is also the placeholder's or is around images"
            )

    def check_process(self, media: MediaFormat) -> None:
        """Check the encoder inputs of images, and their identifiers.

        Raises:
            Violation: it is wrong.
        """
        images = _examples_of(media)
        seen: dict[str, ProcessedImage] = {}
        again = _processed(media, images)  # by another process
        for item, other in zip(_processed(media, images), again, strict=True):
            if item.data != other.data:
                raise PROCESS.violation(
                    f"an image of {item.width} x {item.height}: the program made other numbers of "
                    f"it when it was asked again"
                )
            self._check_tokens(media, item)
            names = [call(IDENTIFIERS, media.identifier, x.content_hash) for x in (item, other)]
            if names[0] != names[1] or not (isinstance(names[0], str) and names[0]):
                raise IDENTIFIERS.violation(
                    f"identifier() returned {short_repr(names[0])}, and of an equal image "
                    f"{short_repr(names[1])}"
                )
            if (known := seen.setdefault(names[0], item)) is not item:
                raise IDENTIFIERS.violation(
                    f"images of {known.width} x {known.height} and {item.width} x {item.height} "
                    f"have the identifier {short_repr(names[0])}"
                )

    def _check_tokens(self, media: MediaFormat, image: ProcessedImage) -> None:
        """Check the tokens of an image, and their positions if they have several axes."""
        size = f"an image of {image.width} x {image.height}"
        item = _array(media, image)
        tokens = list(call(PROCESS, media.token_ids, item))
        known = all(type(token) is int and 0 <= token < self.config.vocab_size for token in tokens)
        if not known or not 1 <= len(tokens) <= media.num_tokens:
            raise PROCESS.violation(
                f"token_ids() of {size} returned {short_repr(tokens)}, expected 1 to "
                f"{media.num_tokens} tokens of the vocabulary"
            )
        if media.position_axes == 1:
            return
        positions = np.asarray(call(PROCESS, media.positions, item))
        if positions.shape != (media.position_axes, len(tokens)) or positions.min() < 0:
            raise PROCESS.violation(
                f"positions() of {size} returned {list(positions.shape)}, expected "
                f"{[media.position_axes, len(tokens)]} numbers of at least 0"
            )

    def check_encode(self, model: Model, media: MediaFormat) -> None:
        """Check the embeddings of a loaded model.

        Raises:
            Violation: they are wrong.
        """
        modality = media.modalities[0]
        images = _processed(media, _examples_of(media))
        items = [_item(model, media, image) for image in images]
        counts = [len(media.token_ids(_array(media, image))) for image in images]
        copies = [item.clone() for item in items]
        together = self._embeddings(model, media, modality, items, counts)
        for index, (item, before, batched) in enumerate(zip(items, copies, together, strict=True)):
            if not torch.equal(item, before):
                raise ENCODE.violation("encode_media() changed the numbers that it was given")
            (alone,) = self._embeddings(model, media, modality, [item], counts[index:])
            if (difference := relative_difference(alone, batched)) > self.tolerance:
                raise ENCODE.violation(
                    f"the embeddings of item {index} alone differ from its embeddings among others "
                    f"by {difference:.3g} of the largest one"
                )
        if torch.equal(together[-1], together[-2]):
            raise ENCODE.violation("the embeddings of two different images are equal")

    def _embeddings(
        self,
        model: Model,
        media: MediaFormat,
        modality: str,
        items: Sequence[torch.Tensor],
        counts: Sequence[int],
    ) -> list[torch.Tensor]:
        embeddings = call(ENCODE, model.encode_media, modality, items)
        width = model.hidden_size * (1 + media.extra_layers)
        if not isinstance(embeddings, Sequence) or len(embeddings) != len(items):
            raise ENCODE.violation(
                f"encode_media() of {len(items)} items returned {summary(embeddings)}, expected "
                f"{len(items)} tensors"
            )
        for embedding, count in zip(embeddings, counts, strict=False):
            shape = (count, width)
            if not isinstance(embedding, torch.Tensor) or tuple(embedding.shape) != shape:
                raise ENCODE.violation(
                    f"encode_media() returned {summary(embedding)} for an item, "
                    f"expected {list(shape)}"
                )
            if not embedding.is_floating_point() or not embedding.isfinite().all():
                raise ENCODE.violation("encode_media() returned numbers that are not finite")
        return [embedding.clone() for embedding in embeddings]

    def check_embedded(
        self,
        model: Model,
        tokens: Sequence[Sequence[int]],
        hidden: Callable[[Sequence[int]], torch.Tensor],
    ) -> None:
        """Check that embeddings may take the place of embedded tokens.

        Args:
            model: loaded.
            tokens: two sequences of the same length.
            hidden: returns the hidden states of a sequence.

        Raises:
            Violation: they may not.
        """
        hooks, taken = model.context.hooks, list[torch.Tensor]()
        first, other = tokens

        def note(x: torch.Tensor) -> torch.Tensor:
            taken.append(x.clone())
            return x

        def replace(x: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
            return taken[0]

        try:
            hooks.embedded = note
            expected = hidden(first)
            hooks.embedded = replace
            actual = hidden(other) if taken else None
        finally:
            hooks.embedded = None
        if actual is None or len(taken) != 1:
            raise EMBEDDED.violation(f"forward called hooks.embedded {len(taken)} times in a step")
        shape = (len(first), model.hidden_size)
        if tuple(taken[0].shape) != shape:
            raise EMBEDDED.violation(
                f"forward called hooks.embedded with {summary(taken[0])}, expected {list(shape)}"
            )
        if (difference := relative_difference(actual, expected)) > self.tolerance:
            raise EMBEDDED.violation(
                f"with the embeddings of other tokens, hidden states differ from the hidden "
                f"states of these tokens by {difference:.3g} of the largest one"
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_id(value: Any) -> bool:
    return type(value) is int


def _are_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(_is_id, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(_is_count(n) or n == -1 for n in value)


_ATTRIBUTES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "placeholder": (_is_text, "the text that stands for an image"),
    "placeholder_id": (_is_id, "its token"),
    "token_id": (_is_id, "a token"),
    "begin_ids": (_are_ids, "a sequence of tokens"),
    "end_ids": (_are_ids, "a sequence of tokens"),
    "around": (lambda value: isinstance(value, str) and not value.strip("\n"), "newlines or ''"),
    "num_tokens": (_is_count, "a number of tokens"),
    "sees_itself": (lambda value: type(value) is bool, "a bool"),
    "item_shape": (_is_shape, "a tuple of sizes, -1 for variable ones"),
    "item_bytes": (_is_count, "a number of bytes"),
    "position_axes": (_is_count, "a number of axes"),
    "extra_layers": (lambda value: type(value) is int and value >= 0, "a number of layers"),
    "encode_bytes": (lambda value: type(value) is int and value >= 0, "a number of bytes"),
    "processor": (_is_text, "the path of the program that processes images"),
    "processor_settings": (lambda value: isinstance(value, Mapping), "a mapping for it"),
    "settings": (_is_text, "a text of all that the encoder's input depends on"),
}
"""Attributes of a format, with what they are."""
