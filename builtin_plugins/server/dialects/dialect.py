"""The common steps of all routes that generate; a dialect defines the differences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import AnswerError, ErrorBody
from hardpoint.builtin_plugins.server.routes.answers import (
    DONE,
    answer_ids,
    load_token_bytes,
)
from hardpoint.builtin_plugins.server.routes.fields import GenerationFields
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.builtin_plugins.server.streaming import COMMENT
from hardpoint.plugins import LoRARequest, SamplingParams
from hardpoint.plugins.server import Call, Route

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
OutputT = TypeVar("OutputT")


@dataclass(frozen=True)
class ParsedRequest(Generic[BodyT]):
    """A request that was read.

    Attributes:
        call: who asks.
        body: body of the request.
        model: name of the model for the answer.
        answer_id: id that clients see.
        request_id: in the engine.
        adapter: adapter that the model's name is one of; None is the model itself.
    """

    call: Call
    body: BodyT
    model: str
    answer_id: str
    request_id: str
    adapter: LoRARequest | None = None


class AnswerWriter(ABC, Generic[OutputT]):
    """Writes the answer to a request, whole or as a stream."""

    heartbeat: ClassVar[bytes] = COMMENT
    """The sign that the stream lives."""

    @abstractmethod
    async def whole(self, outputs: AsyncGenerator[OutputT, None]) -> Any:
        """Return the body of the answer.

        Raises:
            AnswerError: the answer ended with an error.
        """

    @abstractmethod
    def events(self, outputs: AsyncGenerator[OutputT, None]) -> AsyncGenerator[bytes, None]:
        """Yield the events; the events of one output come together.

        Raises:
            AnswerError: the answer ended with an error.
        """

    def failed(self, error: AnswerError) -> bytes:
        """Return the last events of a stream that an error ends."""
        return b"data: " + msgspec.json.encode(ErrorBody(error.detail)) + b"\n\n" + DONE


def has_logprobs(body: Any) -> bool:
    """Return whether a body asks for log-probabilities of its answer."""
    params = getattr(body, "sampling_params", body)
    logprobs = getattr(body if callable(params) else params, "logprobs", None)
    return logprobs is not None and logprobs is not False


class Dialect(ABC, Generic[BodyT, OutputT]):
    """A route that generates: its body, its engine request and its answer.

    Attributes:
        takes_messages: whether a body has messages, whose answers have the rest of the context by
            default (`SamplingParams.for_chat`).
    """

    takes_messages: ClassVar[bool] = False
    path: ClassVar[str]
    summary: ClassVar[str]
    response_type: ClassVar[type]
    id_prefix: ClassVar[str]
    body_type: type[BodyT]

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                path=self.path,
                endpoint=self.respond,
                methods=("POST",),
                summary=self.summary,
                request_type=self.body_type,
                response_type=self.response_type,
            )
        ]

    async def respond(self, request: Request) -> Response:
        """Answer a request, whole or as the answer comes."""
        body: Any  # bodies have a model, a stream and a request_id
        call, body = await self._service.requests.read(request, self.body_type)
        if isinstance(body, GenerationFields):
            body = body.resolved()
        model, adapter = await self._service.model(body.model)
        answer_id, engine_id = answer_ids(self.id_prefix, call, body.request_id)
        parsed = ParsedRequest(call, body, model, answer_id, engine_id, adapter)
        outputs, answer = await self.begin(parsed)
        if has_logprobs(body):
            await load_token_bytes(self._service.engine.tokenizer)
        if not body.stream:
            return await self._service.answer(request, call, lambda: answer.whole(outputs))
        events = answer.events(outputs)
        return self._service.stream(call, events, answer.failed, answer.heartbeat)

    def _params(self, body: GenerationFields, **fields: Any) -> SamplingParams:
        """Return the parameters of a body, with fields that have other names there.

        Raises:
            RequestError: a field is wrong, or more than the server allows.
        """
        defaults = self._service.engine.model.default_sampling_params()
        if self.takes_messages:
            defaults = defaults.for_chat()
        return body.sampling_params(defaults, self._service.settings.limits, **fields)

    @abstractmethod
    async def begin(
        self, parsed: ParsedRequest[BodyT]
    ) -> tuple[AsyncGenerator[OutputT, None], AnswerWriter[OutputT]]:
        """Return the outputs of a request, which begin when they are asked for, and its answer.

        Raises:
            AnswerError, RequestError: the request is wrong.
        """
