"""The bodies and the answers of the routes that pool texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.dialects.chat.request import Message
from hardpoint.builtin_plugins.server.routes.fields import IGNORED
from hardpoint.typed import Strict

pass


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


_TEXTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1},
    ]
}
"""A schema that msgspec cannot derive: a union of lists."""


_PAIR = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "text_pair": {"type": "string"}},
    "required": ["text", "text_pair"],
    "additionalProperties": False,
}


_PAIRS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        _PAIR,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS, _PAIR]}, "minItems": 1},
    ]
}


Texts = Annotated[Any, Meta(extra_json_schema=_TEXTS_SCHEMA)]


TextsOrPairs = Annotated[Any, Meta(extra_json_schema=_PAIRS_SCHEMA)]


Document = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {"text": {"type": "string"}},
                    "required": ["text"],
                },
            ]
        }
    ),
]


MAX_INPUTS = 2048
"""Inputs of a request, as OpenAI has it."""


class PooledFields(Strict):
    """Fields of every route that pools.

    Attributes:
        model: name of the model.
        truncate_prompt_tokens: last tokens of a text that are kept, or tokens of a pair of texts,
            of which the longer one loses its end first; -1 keeps those that the model reads.
            Without it, a text that is too long is refused.
        truncation_side: "left" of texts, "right" of pairs, with `truncate_prompt_tokens`.
        pooler: name of an enabled pooler; by default the model's.
        plugin_args: arguments of poolers by name.
        timeout: seconds after which the request ends.
        priority: smaller is more important; within the bounds of the key.
        tags: labels for policies and sinks; those of the key win.
        cache_salt: requests with different salts share no cached prompts.
        request_id: id of the answer, in place of a random one.
    """

    ignored: ClassVar[Mapping[str, str]] = {
        name: IGNORED[name] for name in ("metadata", "safety_identifier", "user")
    }

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    pooler: Annotated[str, Meta(min_length=1)] | None = None
    plugin_args: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0)] | None = None
    priority: int | None = None
    tags: dict[str, str] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    request_id: Annotated[str, Meta(pattern=r"\A[\x21-\x7e]{1,128}\Z")] | None = None


class EmbeddingsRequest(PooledFields, kw_only=True):
    """Texts or a conversation to embed.

    Attributes:
        input: a text, token ids, or a list of these.
        messages: a conversation, in place of `input`; the chat template makes one text of it.
        add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs: for the
            template, as in `/v1/chat/completions`.
        encoding_format: "base64" gives float32 numbers, little-endian.
        dimensions: size of the vectors, of a model that was trained for vectors that are cut.
        normalize: whether vectors are scaled to length 1; by default as the model has it.
        prompt_name: name of the model's text that is put before texts, such as "query".
    """

    input: Texts = msgspec.UNSET
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Meta(min_length=1)] | None = None


class RerankRequest(PooledFields, kw_only=True):
    """Documents to sort by how well they match a query.

    Attributes:
        documents: texts, or objects with `text`.
        top_n: best documents that are returned; by default all.
        return_documents: whether the answer has the documents.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "max_chunks_per_doc": "documents are read whole, or cut by truncate_prompt_tokens",
        "max_tokens_per_doc": "documents are read whole, or cut by truncate_prompt_tokens",
        "rank_fields": "documents are texts",
    }

    query: str
    documents: Annotated[list[Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool = True


class ScoreRequest(PooledFields, kw_only=True):
    """Texts to compare: one with each of several, or in pairs.

    Attributes:
        use_activation: whether scores are probabilities, and not logits; for models that read
            texts in pairs.
    """

    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None


class ClassifyRequest(PooledFields, kw_only=True):
    """Texts to classify.

    Attributes:
        input: a text, token ids, a pair of texts, or a list of these.
        use_activation: whether the answer has probabilities, and not logits.
    """

    input: TextsOrPairs
    use_activation: bool | None = None


class PooledUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct):
    """The vector of a text: numbers, or base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    """The vectors of texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PooledUsage


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """A document, and how well it matches.

    Attributes:
        index: place in the request.
    """

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(msgspec.Struct):
    """Documents, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PooledUsage


class Score(msgspec.Struct):
    """How well two texts match."""

    object: Literal["score"]
    index: int
    score: float


class Scores(msgspec.Struct):
    """How well texts match."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class TextClass(msgspec.Struct):
    """The class of a text: the likeliest, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(msgspec.Struct):
    """The classes of texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TextClass]
    usage: PooledUsage
