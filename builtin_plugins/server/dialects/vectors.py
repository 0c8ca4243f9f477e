"""Vectors and scores: `/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/v1/classify`."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.routes.answers import new_id
from hardpoint.builtin_plugins.server.routes.compatibility_fields import check_truncation_side
from hardpoint.builtin_plugins.server.routes.fields import IGNORED
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import RequestError
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.server import Call, Route
from hardpoint.typed import Strict

if TYPE_CHECKING:
    from hardpoint.plugins.requests.outputs import PoolingRequestOutput

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

_MOST = 2048
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
    """Texts to embed.

    Attributes:
        input: a text, token ids, or a list of these.
        encoding_format: "base64" gives float32 numbers, little-endian.
        dimensions: size of the vectors, of a model that was trained for vectors that are cut.
        normalize: whether vectors are scaled to length 1; by default as the model has it.
        prompt_name: name of the model's text that is put before texts, such as "query".
    """

    input: Texts
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
    documents: Annotated[list[Document], Meta(min_length=1, max_length=_MOST)]
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


class VectorRoutes:
    """The routes that pool."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._prompts: dict[tuple[str, str | None], str] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                path="/v1/embeddings",
                endpoint=self.embeddings,
                methods=("POST",),
                summary="Return a vector for each text.",
                request_type=EmbeddingsRequest,
                response_type=Embeddings,
            ),
            *(
                Route(
                    path=path,
                    endpoint=self.rerank,
                    methods=("POST",),
                    summary="Sort documents by how well they match a query.",
                    request_type=RerankRequest,
                    response_type=Ranking,
                )
                for path in ("/v1/rerank", "/v2/rerank", "/rerank")
            ),
            *(
                Route(
                    path=path,
                    endpoint=self.score,
                    methods=("POST",),
                    summary="Return how well texts match.",
                    request_type=ScoreRequest,
                    response_type=Scores,
                )
                for path in ("/v1/score", "/score")
            ),
            Route(
                path="/v1/classify",
                endpoint=self.classify,
                methods=("POST",),
                summary="Return the probability of each class for each text.",
                request_type=ClassifyRequest,
                response_type=Classes,
            ),
        ]

    async def embeddings(self, request: Request) -> Response:
        """Return a vector for each text."""
        call, asked = await self._service.read(request, EmbeddingsRequest)
        model = self._service.base_model(asked.model)
        texts = _texts(asked.input, "input")
        params = _params(asked, "embed", dimensions=asked.dimensions, normalize=asked.normalize)

        async def work() -> Embeddings:
            await self._prefix(texts, "prompt_name", asked.prompt_name)
            outputs = await self._pooled(call, asked, texts, params)
            data = [
                EmbeddingItem("embedding", index, vector)
                for index, vector in enumerate(encoded(outputs, asked.encoding_format))
            ]
            return Embeddings(_id(asked, "embd"), "list", _now(), model, data, usage_of(outputs))

        return await self._service.answer(request, call, work)

    async def rerank(self, request: Request) -> Response:
        """Sort documents by how well they match a query."""
        call, asked = await self._service.read(request, RerankRequest)
        model = self._service.base_model(asked.model)
        documents = [_document(given, place) for place, given in enumerate(asked.documents)]
        if not asked.query:
            raise RequestError("query: expected a text that is not empty")
        query = {"query": asked.query}
        found: dict[str, Any] = {f"documents[{at}]": text for at, text in enumerate(documents)}

        async def work() -> Ranking:
            if self._reads_pairs:
                scores, outputs = await self._pair_scores(call, asked, query, found)
            else:
                await self._prefix(query, "purpose", "query")
                await self._prefix(found, "purpose", "document")
                outputs = await self._pooled(call, asked, query | found, _params(asked, "embed"))
                scores = _cosines(outputs[:1], outputs[1:])
            best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
            results = [
                RankedDocument(
                    place,
                    scores[place],
                    {"text": documents[place]} if asked.return_documents else None,
                )
                for place in best[: asked.top_n]
            ]
            return Ranking(_id(asked, "rerank"), model, results, usage_of(outputs))

        return await self._service.answer(request, call, work)

    async def score(self, request: Request) -> Response:
        """Return how well texts match."""
        call, asked = await self._service.read(request, ScoreRequest)
        model = self._service.base_model(asked.model)
        first, second = _texts(asked.text_1, "text_1"), _texts(asked.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1: expected one text or {len(second)}, as text_2 has, got {len(first)}"
            )

        async def work() -> Scores:
            if self._reads_pairs:
                scores, outputs = await self._pair_scores(
                    call, asked, first, second, use_activation=asked.use_activation
                )
            else:
                _refuse_activation(asked.use_activation)
                await self._prefix(first, "name", None)
                await self._prefix(second, "name", None)
                outputs = await self._pooled(call, asked, first | second, _params(asked, "embed"))
                scores = _cosines(outputs[: len(first)], outputs[len(first) :])
            data = [Score("score", index, score) for index, score in enumerate(scores)]
            return Scores(_id(asked, "score"), "list", _now(), model, data, usage_of(outputs))

        return await self._service.answer(request, call, work)

    async def classify(self, request: Request) -> Response:
        """Return the probability of each class for each text."""
        call, asked = await self._service.read(request, ClassifyRequest)
        model = self._service.base_model(asked.model)
        texts = _texts(asked.input, "input", takes_pairs=True)

        async def work() -> Classes:
            params = _params(asked, "classify", use_activation=asked.use_activation)
            outputs = await self._pooled(call, asked, texts, params)
            described = await self._service.engine.plugins.call_part("pooling", "describe")
            labels = described["labels"]
            data = [
                TextClass(
                    index,
                    labels[int(output.outputs.argmax())],
                    output.outputs.tolist(),
                    len(output.outputs),
                )
                for index, output in enumerate(outputs)
            ]
            return Classes(_id(asked, "classify"), "list", _now(), model, data, usage_of(outputs))

        return await self._service.answer(request, call, work)

    async def results(
        self, call: Call, asked: PooledFields, given: Any, params: PoolingParams
    ) -> list[PoolingRequestOutput]:
        """Return the results of a request's `input`, in its order, for a route of another file.

        Raises:
            RequestError: a text is wrong or refused; the message has its place.
            AnswerError: one ended without a result.
        """
        return await self._pooled(call, asked, _texts(given, "input"), params)

    @property
    def _reads_pairs(self) -> bool:
        return "embed" not in self._service.engine.model.supported_tasks

    async def _pair_scores(
        self,
        call: Call,
        asked: PooledFields,
        first: dict[str, Any],
        second: dict[str, Any],
        **fields: Any,
    ) -> tuple[list[float], list[PoolingRequestOutput]]:
        """Return how well texts match that are read in pairs; one with all others, if it is one.

        Raises:
            RequestError: one is no text; or as `_pooled`.
        """
        for place, text in (first | second).items():
            if not isinstance(text, str):
                raise RequestError(
                    f"{place}: expected a text, for the model reads texts in pairs, got token ids"
                )
        await self._prefix(first, "name", None)
        before = list(first.values())
        pairs = {
            place: {"text": before[index % len(before)], "text_pair": text}
            for index, (place, text) in enumerate(second.items())
        }
        params = _params(asked, "score", **fields)
        outputs = await self._pooled(call, asked, pairs, params, given=first | second)
        return [float(output.outputs) for output in outputs], outputs

    async def _prefix(self, texts: dict[str, Any], kind: str, name: str | None) -> None:
        """Put the model's prompt before texts; token ids are left as they are.

        Raises:
            RequestError: the model has no prompt of that name.
        """
        if not {"embed", "score"}.intersection(self._service.engine.model.supported_tasks):
            return  # which is the error of the request itself
        key = "purpose" if kind == "purpose" else "name"
        if (key, name) not in self._prompts:
            found = await self._service.engine.plugins.call_part("pooling", "prompt", {key: name})
            self._prompts[key, name] = found
        if prefix := self._prompts[key, name]:
            for place, text in texts.items():
                if isinstance(text, str):
                    texts[place] = prefix + text

    async def _pooled(
        self,
        call: Call,
        asked: PooledFields,
        texts: Mapping[str, Any],
        params: PoolingParams,
        given: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the results of texts, by the name of their place in the request, in their order.

        Args:
            given: texts of the request, where those have some of them several times.

        Raises:
            RequestError: one is refused; the message has its place. None runs.
            AnswerError: one ended without a result.
        """
        has_pairs = any(isinstance(text, Mapping) for text in texts.values())
        kept = asked.truncate_prompt_tokens
        check_truncation_side(asked.truncation_side, kept, of_pairs=has_pairs)
        parts = list((given or texts).values())
        self._service.check_prompt(parts, name=next(iter(texts)).partition("[")[0])
        extras = self._service.extras(call, asked)
        outputs = await self._service.engine.encode_batch(
            list(texts.values()), params, names=list(texts), **extras
        )
        for place, output in zip(texts, outputs, strict=True):
            if output.finish_reason == "error":
                raise PluginFaultError(f"{place}: {output.error}")
            if output.finish_reason != "stop":
                raise AnswerError(
                    408 if output.finish_reason == "timeout" else 503,
                    f'{place}: it ended by "{output.finish_reason}", without a result',
                    code=output.finish_reason,
                )
        return outputs


def _refuse_activation(given: bool | None) -> None:
    if given is not None:
        raise RequestError(
            f"use_activation: expected none, for the score is the cosine of two vectors, "
            f"got {str(given).lower()}"
        )


def _texts(given: Any, name: str, *, takes_pairs: bool = False) -> dict[str, Any]:
    """Return texts or lists of token ids, and perhaps pairs, by the name of their place.

    Raises:
        RequestError: there are none or too many, or one is neither.
    """
    if given == "":
        raise RequestError(f"{name}: expected a text or token ids, not empty")
    if isinstance(given, str) or (takes_pairs and _is_pair(given, name)):
        return {name: given}
    if not isinstance(given, list):
        raise RequestError(f"{name}: expected a text, token ids, or a list of these")
    if given and all(type(item) is int for item in given):
        return {name: given}
    if not 1 <= len(given) <= _MOST:
        raise RequestError(f"{name}: expected 1 to {_MOST} texts, got {len(given)}")
    for index, item in enumerate(given):
        is_ids = isinstance(item, list) and all(type(token) is int for token in item)
        is_pair = takes_pairs and _is_pair(item, f"{name}[{index}]")
        if not item or not (isinstance(item, str) or is_ids or is_pair):
            pair = ", or a pair of texts" if takes_pairs else ""
            raise RequestError(
                f"{name}[{index}]: expected a text or a list of token ids, not empty{pair}"
            )
    return {f"{name}[{index}]": item for index, item in enumerate(given)}


def _is_pair(given: Any, place: str) -> bool:
    """Return whether an input is an object, which has to be a pair of texts.

    Raises:
        RequestError: it has other fields.
    """
    if isinstance(given, dict) and given.keys() != {"text", "text_pair"}:
        raise RequestError(
            f"{place}: expected a pair of texts with `text` and `text_pair`, got {shown(given)}"
        )
    return isinstance(given, dict)


def _document(given: Any, place: int) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str) or not text:
        raise RequestError(
            f"documents[{place}]: expected a text that is not empty, or an object with `text`"
        )
    return text


def _params(asked: PooledFields, task: Any, **fields: Any) -> PoolingParams:
    return PoolingParams(task=task, pooler=asked.pooler, plugin_args=asked.plugin_args, **fields)


def _cosines(
    first: Sequence[PoolingRequestOutput], second: Sequence[PoolingRequestOutput]
) -> list[float]:
    a = np.stack([output.outputs for output in first]).astype(np.float64)
    b = np.stack([output.outputs for output in second]).astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found: list[float] = ((a * b).sum(1) / np.maximum(lengths, 1e-24)).tolist()
    return found


def encoded(outputs: Sequence[PoolingRequestOutput], encoding: str) -> list[Any]:
    """Return results as numbers, or as "base64" of float32 numbers, little-endian."""
    if encoding == "base64":
        data = (output.outputs.astype("<f4").tobytes() for output in outputs)
        return [base64.b64encode(one).decode() for one in data]
    return [output.outputs.tolist() for output in outputs]


def usage_of(outputs: Sequence[PoolingRequestOutput]) -> PooledUsage:
    """Return the tokens of the prompts."""
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return PooledUsage(count, count)


def _id(asked: PooledFields, prefix: str) -> str:
    return new_id(f"{prefix}-", asked.request_id)


def _now() -> int:
    return int(time.time())
