"""The data of a plan for the encoders of workers, as msgpack."""

from __future__ import annotations

import msgspec


class EncoderItem(msgspec.Struct, array_like=True, frozen=True):
    """An image to encode.

    Attributes:
        identifier: where its embeddings are kept.
        shape: shape of the numbers, which are uint8.
        data: output of the model's processor.
    """

    identifier: str
    modality: str
    shape: tuple[int, ...]
    data: bytes


class Span(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of a request in the step that get embeddings.

    Attributes:
        identifier: identifier of the embeddings.
        first: the first of these tokens, within the request's tokens of the step.
        start: the first embedding.
        count: tokens, and embeddings.
    """

    identifier: str
    first: int
    start: int
    count: int


class PlacedItem(msgspec.Struct, array_like=True, frozen=True):
    """Positions of the tokens of an image in a request, of a model with several axes.

    Attributes:
        offset: prompt position of its first token.
        positions: position of each of its tokens from the first one on, by axis.
    """

    offset: int
    positions: list[list[int]]


class EncoderStep(msgspec.Struct, array_like=True, frozen=True):
    """Media of a step: items to encode, and tokens to embed.

    Attributes:
        freed: identifiers of embeddings that are dropped first.
        items: media to encode.
        spans: tokens that get embeddings, by request.
        placed: images of requests that workers do not have, if the model has several axes.
    """

    freed: list[str] = []
    items: list[EncoderItem] = []
    spans: dict[str, list[Span]] = {}
    placed: dict[str, list[PlacedItem]] = {}
