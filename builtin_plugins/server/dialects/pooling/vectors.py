"""Vectors and scores: `/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/v1/classify`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.routes.answers import answer_ids
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Route

from .cohere import CohereEmbeddings, CohereEmbedRequest, cohere_embeddings
from .request import (
    Classes,
    ClassifyRequest,
    EmbeddingItem,
    Embeddings,
    EmbeddingsRequest,
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
    Scores,
    TextClass,
)
from .texts import (
    TextPooler,
    answer_id,
    cosines,
    document_text,
    encoded,
    now,
    places_of,
    pooling_params,
    refuse_activation,
    usage_of,
)


class VectorRoutes:
    """The routes that pool."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pooler = TextPooler(service)

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
            Route(
                path="/v2/embed",
                endpoint=self.embed,
                methods=("POST",),
                summary="Return a vector for each text, in the shape of Cohere's API.",
                request_type=CohereEmbedRequest,
                response_type=CohereEmbeddings,
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
        """Return a vector for each text, or for a conversation."""
        call, body = await self._service.requests.read(request, EmbeddingsRequest)
        model = self._service.base_model(body.model)
        if (body.input is msgspec.UNSET) == (body.messages is None):
            raise RequestError("input and messages: expected one of them")
        texts = {} if body.input is msgspec.UNSET else places_of(body.input, "input")
        params = pooling_params(body, "embed", dimensions=body.dimensions, normalize=body.normalize)

        async def work() -> Embeddings:
            inputs = texts or {"messages": await self._pooler.conversation(body)}
            await self._pooler.add_prefix(inputs, "prompt_name", body.prompt_name)
            outputs = await self._pooler.pool(call, body, inputs, params)
            data = [
                EmbeddingItem("embedding", index, vector)
                for index, vector in enumerate(encoded(outputs, body.encoding_format))
            ]
            return Embeddings(
                answer_id(call, body, "embd"), "list", now(), model, data, usage_of(outputs)
            )

        return await self._service.answer(request, call, work)

    async def embed(self, request: Request) -> Response:
        """Return a vector for each text, in the shape of Cohere's API."""
        call, body = await self._service.requests.read(request, CohereEmbedRequest)
        self._service.base_model(body.model)
        texts = body.places()
        fields = body.pooled_fields()
        params = pooling_params(fields, "embed", dimensions=body.output_dimension)

        async def work() -> CohereEmbeddings:
            inputs: dict[str, Any] = dict(texts)
            if (purpose := body.purpose) is not None:
                await self._pooler.add_prefix(inputs, "purpose", purpose)
            if body.truncate == "END":
                inputs = await self._pooler.without_ends(inputs)
            try:
                outputs = await self._pooler.pool(call, fields, inputs, params)
            except RequestError as error:
                message = str(error)
                if not message.startswith("dimensions:"):
                    raise
                message = message.replace("dimensions", "output_dimension", 1)
                raise RequestError(message) from None
            usage = usage_of(outputs)
            name, _ = answer_ids("embd-", call, None)
            texts_in_order = list(texts.values())
            return cohere_embeddings(name, body, texts_in_order, outputs, usage.prompt_tokens)

        return await self._service.answer(request, call, work)

    async def rerank(self, request: Request) -> Response:
        """Sort documents by how well they match a query."""
        call, body = await self._service.requests.read(request, RerankRequest)
        model = self._service.base_model(body.model)
        documents = [
            document_text(document, place) for place, document in enumerate(body.documents)
        ]
        if not body.query:
            raise RequestError("query: expected a text that is not empty")
        query = {"query": body.query}
        texts: dict[str, Any] = {f"documents[{at}]": text for at, text in enumerate(documents)}

        async def work() -> Ranking:
            if self._pooler.reads_pairs:
                scores, outputs = await self._pooler.pair_scores(call, body, query, texts)
            else:
                await self._pooler.add_prefix(query, "purpose", "query")
                await self._pooler.add_prefix(texts, "purpose", "document")
                outputs = await self._pooler.pool(
                    call, body, query | texts, pooling_params(body, "embed")
                )
                scores = cosines(outputs[:1], outputs[1:])
            best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
            results = [
                RankedDocument(
                    place,
                    scores[place],
                    {"text": documents[place]} if body.return_documents else None,
                )
                for place in best[: body.top_n]
            ]
            return Ranking(answer_id(call, body, "rerank"), model, results, usage_of(outputs))

        return await self._service.answer(request, call, work)

    async def score(self, request: Request) -> Response:
        """Return how well texts match."""
        call, body = await self._service.requests.read(request, ScoreRequest)
        model = self._service.base_model(body.model)
        first, second = places_of(body.text_1, "text_1"), places_of(body.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1: expected one text or {len(second)}, as text_2 has, got {len(first)}"
            )

        async def work() -> Scores:
            if self._pooler.reads_pairs:
                scores, outputs = await self._pooler.pair_scores(
                    call, body, first, second, use_activation=body.use_activation
                )
            else:
                refuse_activation(body.use_activation)
                await self._pooler.add_prefix(first, "name", None)
                await self._pooler.add_prefix(second, "name", None)
                outputs = await self._pooler.pool(
                    call, body, first | second, pooling_params(body, "embed")
                )
                scores = cosines(outputs[: len(first)], outputs[len(first) :])
            data = [Score("score", index, score) for index, score in enumerate(scores)]
            return Scores(
                answer_id(call, body, "score"), "list", now(), model, data, usage_of(outputs)
            )

        return await self._service.answer(request, call, work)

    async def classify(self, request: Request) -> Response:
        """Return the probability of each class for each text."""
        call, body = await self._service.requests.read(request, ClassifyRequest)
        model = self._service.base_model(body.model)
        texts = places_of(body.input, "input", takes_pairs=True)

        async def work() -> Classes:
            params = pooling_params(body, "classify", use_activation=body.use_activation)
            outputs = await self._pooler.pool(call, body, texts, params)
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
            return Classes(
                answer_id(call, body, "classify"), "list", now(), model, data, usage_of(outputs)
            )

        return await self._service.answer(request, call, work)
