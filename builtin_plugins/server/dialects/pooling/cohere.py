"""The body and the answer of `/v2/embed`, in the shape of Cohere's API."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from hardpoint.plugins import RequestError
from hardpoint.typed import Strict

from .request import MAX_INPUTS, PooledFields

if TYPE_CHECKING:
    from hardpoint.plugins.requests.outputs import PoolingRequestOutput

_PURPOSES = {"search_query": "query", "search_document": "document"}

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereText(Strict, tag_field="type", tag="text"):
    """A text of an input."""

    text: Annotated[str, Meta(min_length=1)]


class CohereInput(Strict):
    """An input: texts that are embedded together."""

    content: Annotated[list[CohereText], Meta(min_length=1)]


class CohereEmbedRequest(Strict):
    """Texts to embed.

    Attributes:
        texts: texts; one of `texts` and `inputs`.
        inputs: lists of texts, each of which is embedded as one text.
        input_type: "search_query" and "search_document" put the model's prompts before texts.
        embedding_types: forms of the vectors; "int8" and "uint8" scale each vector so that its
            largest number is 127, and "uint8" adds 128; "binary" and "ubinary" have a bit for each
            number above 0, eight in an integer.
        output_dimension: size of the vectors, of a model that was trained for vectors that are cut.
        truncate: "START" and "END" drop the beginning or the end of a text that is too long;
            "NONE" rejects it.
        priority: smaller is more important.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "images": "the model reads text alone",
        "max_tokens": "texts are read whole, or cut by truncate",
    }

    model: str | None = None
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    inputs: Annotated[list[CohereInput], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    input_type: (
        Literal["search_query", "search_document", "classification", "clustering"] | None
    ) = None
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["float"]
    )
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    priority: int | None = None

    @property
    def purpose(self) -> str | None:
        """The purpose of the texts, for the prompts of the model; None without one."""
        return _PURPOSES.get(self.input_type or "")

    def places(self) -> dict[str, str]:
        """Return the texts by their places in the request.

        Raises:
            RequestError: there are none, or one is empty.
        """
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("texts and inputs: expected one of them")
        if self.inputs is not None:
            return {
                f"inputs[{index}]": "\n".join(part.text for part in item.content)
                for index, item in enumerate(self.inputs)
            }
        texts = self.texts or []
        for index, text in enumerate(texts):
            if not text:
                raise RequestError(f"texts[{index}]: expected a text that is not empty")
        return {f"texts[{index}]": text for index, text in enumerate(texts)}

    def pooled_fields(self) -> PooledFields:
        """Return the fields that all routes that pool have; the engine keeps the last tokens."""
        cut = -1 if self.truncate == "START" else None
        return PooledFields(truncate_prompt_tokens=cut, priority=self.priority)


class BilledUnits(msgspec.Struct):
    """Tokens of a request."""

    input_tokens: int


class ApiVersion(msgspec.Struct):
    """The version of Cohere's API."""

    version: str = "2"


class CohereMeta(msgspec.Struct):
    """The version of the API and the tokens of a request."""

    api_version: ApiVersion
    billed_units: BilledUnits


class CohereEmbeddings(msgspec.Struct):
    """The vectors of texts.

    Attributes:
        embeddings: vectors by the types of the request, in the order of the texts.
    """

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"


def _int8(vector: Any) -> Any:
    """Return whole numbers of the same direction, from -127 to 127."""
    largest = np.abs(vector).max()
    return np.rint(vector * (127 / largest if largest > 0 else 0)).astype(np.int16)


def _binary(vector: Any) -> list[int]:
    bits: list[int] = (np.packbits(vector > 0).astype(np.int16) - 128).astype(np.int8).tolist()
    return bits


def _ubinary(vector: Any) -> list[int]:
    bits: list[int] = np.packbits(vector > 0).tolist()
    return bits


_FORMS: dict[str, Callable[[Any], Any]] = {
    "float": lambda vector: vector.tolist(),
    "base64": lambda vector: base64.b64encode(vector.astype("<f4").tobytes()).decode(),
    "int8": lambda vector: _int8(vector).tolist(),
    "uint8": lambda vector: (_int8(vector) + 128).tolist(),
    "binary": _binary,
    "ubinary": _ubinary,
}


def cohere_embeddings(
    answer_id: str,
    body: CohereEmbedRequest,
    texts: list[str],
    outputs: Sequence[PoolingRequestOutput],
    num_tokens: int,
) -> CohereEmbeddings:
    """Return the answer to a request.

    Args:
        answer_id: id of the answer.
        outputs: results of the texts, in their order.
        num_tokens: tokens of all texts.
    """
    vectors = [output.outputs for output in outputs]
    return CohereEmbeddings(
        answer_id,
        {name: list(map(_FORMS[name], vectors)) for name in body.embedding_types},
        texts,
        CohereMeta(ApiVersion(), BilledUnits(num_tokens)),
    )
