"""The processor: a document becomes spans, each with a vector, and one vector of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint import plugins
from hardpoint.plugins import (
    Annotated,
    ConfigError,
    IOProcessor,
    IOProcessorContext,
    Meta,
    RequestError,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.typed import Strict

from .windows import Frame, windows

if TYPE_CHECKING:
    from hardpoint.plugins.requests.outputs import PoolingRequestOutput


class Document(Strict):
    """A document.

    Attributes:
        text: its text, of any length.
        query: what spans are sorted by, the best first; without it they come in their order.
        top_n: spans that are returned; by default all.
        vectors: whether spans have their vectors.
    """

    text: Annotated[str, Meta(min_length=1)]
    query: Annotated[str, Meta(min_length=1)] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    vectors: bool = False


class Span(Strict):
    """A part of the document.

    Attributes:
        index: its place in the document.
        text: its text.
        num_tokens: its length.
        score: cosine with the query, if there is one.
        vector: its vector, of length 1, if asked for.
    """

    index: int
    text: str
    num_tokens: int
    score: float | None = None
    vector: list[float] | None = None


class Spread(Strict):
    """The answer.

    Attributes:
        vector: mean of the vectors of all spans by their numbers of tokens, of length 1.
        spans: all of them, or the best.
    """

    vector: list[float]
    spans: list[Span]


@dataclass(frozen=True)
class Split:
    """A document that was split.

    Attributes:
        pieces: token ids of each span, without special tokens.
        query: token ids of the query.
    """

    document: Document
    pieces: list[list[int]]
    query: list[int] | None


class Spans(IOProcessor):
    """Embeds a document of any length in overlapping spans, and finds spans that match a query.

    The vector of the whole is the mean of the spans' by length.
    """

    contract = 1
    Request = Document

    class Options(plugins.Options):
        """Options of the processor.

        Attributes:
            size: most tokens of a span; by default half of what the model reads, at most 256.
            overlap: tokens that a span has in common with the one before.
            spans: most spans of a document; a longer one is refused.
        """

        size: Annotated[int, Meta(ge=2)] | None = None
        overlap: Annotated[int, Meta(ge=0)] = 16
        spans: Annotated[int, Meta(ge=1)] = 1024

    options: Options

    def __init__(self, context: IOProcessorContext) -> None:
        """Load a tokenizer.

        Raises:
            ConfigError: a span would be longer than the model reads, or all overlap.
        """
        super().__init__(context)
        self._tokenizer = context.tokenizer()
        self._frame = Frame.of(self._tokenizer)
        room = context.max_model_len - len(self._frame)
        self._size = self.options.size or max(min(room // 2, 256), self.options.overlap + 1)
        if not self.options.overlap < self._size <= room:
            raise ConfigError(
                f"plugin.{self.name}.size: expected {self.options.overlap + 1} to {room} tokens, "
                f"more than the overlap, got {self._size}"
            )
        self._room = room

    def parse_request(self, data: Any) -> Split:
        """Check a document, and split it."""
        document: Document = super().parse_request(data)
        ids = self._tokenizer.encode(document.text, add_special_tokens=False)
        if not ids:
            raise RequestError("data.text: expected a text with tokens, got none")
        pieces = [
            ids[begin:end] for begin, end in windows(len(ids), self._size, self.options.overlap)
        ]
        if len(pieces) > self.options.spans:
            raise RequestError(
                f"data.text: expected at most {self.options.spans} spans, got {len(pieces)}"
            )
        query = None
        if document.query is not None:
            query = self._tokenizer.encode(document.query, add_special_tokens=False)
            if not 1 <= len(query) <= self._room:
                raise RequestError(
                    f"data.query: expected 1 to {self._room} tokens, got {len(query)}"
                )
        return Split(document, pieces, query)

    def pre_process(self, request: Split) -> list[tuple[list[int], PoolingParams]]:
        """Return a prompt for each span, and one for the query."""
        texts = [*request.pieces, *([] if request.query is None else [request.query])]
        params = PoolingParams(task="embed", normalize=True)
        return [(self._frame.around(ids), params) for ids in texts]

    def post_process(self, request: Split, outputs: Sequence[PoolingRequestOutput]) -> Spread:
        """Return the spans, the best first, and the vector of the whole."""
        count, document = len(request.pieces), request.document
        vectors = np.stack([output.outputs for output in outputs]).astype(np.float64)
        lengths = np.array([len(piece) for piece in request.pieces], np.float64)
        mean = lengths @ vectors[:count]
        mean /= max(float(np.linalg.norm(mean)), 1e-12)
        order, scores = np.arange(count), None
        if request.query is not None:
            scores = vectors[:count] @ vectors[count]
            order = np.argsort(-scores, kind="stable")
        spans = [
            Span(
                index=int(index),
                text=self._tokenizer.decode(request.pieces[index]),
                num_tokens=len(request.pieces[index]),
                score=None if scores is None else float(scores[index]),
                vector=vectors[index].tolist() if document.vectors else None,
            )
            for index in order[: document.top_n]
        ]
        return Spread(vector=mean.tolist(), spans=spans)
