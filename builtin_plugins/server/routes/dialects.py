"""The walk that every route which generates has in common; what differs is its dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.builtin_plugins.server.streaming import COMMENT
from hardpoint.plugins.server import Call, Route

from .answers import engine_id, failed_events, new_id


class Body(Protocol):
    """The body of a request that generates."""

    @property
    def model(self) -> str | None:
        """Name of the model."""

    @property
    def stream(self) -> bool:
        """Whether the answer is sent as it comes."""

    @property
    def request_id(self) -> str | None:
        """Id of the answer, in place of a random one."""


BodyT = TypeVar("BodyT", bound=Body)
OutputT = TypeVar("OutputT")


@dataclass(frozen=True)
class Asked(Generic[BodyT]):
    """A request that was read.

    Attributes:
        call: who asks.
        body: of the request.
        model: name of the model for the answer.
        answer_id: that clients see.
        request_id: in the engine.
    """

    call: Call
    body: BodyT
    model: str
    answer_id: str
    request_id: str


class Answer(ABC, Generic[OutputT]):
    """Writes the answer to a request, whole or as a stream."""

    heartbeat: ClassVar[bytes] = COMMENT
    """What says that the stream lives."""

    @abstractmethod
    async def whole(self, outputs: AsyncGenerator[OutputT, None]) -> Any:
        """Return the body of the answer.

        Raises:
            AnswerError: the answer ended with an error.
        """

    @abstractmethod
    def events(self, outputs: AsyncGenerator[OutputT, None]) -> AsyncGenerator[bytes, None]:
        """Yield the events, those of one output together.

        Raises:
            AnswerError: the answer ended with an error.
        """

    def failed(self, error: AnswerError) -> bytes:
        """Return the last events of a stream that an error ends."""
        return failed_events(error)


class Dialect(ABC, Generic[BodyT, OutputT]):
    """A route that generates: its body, what it asks of the engine, and how it answers."""

    path: ClassVar[str]
    summary: ClassVar[str]
    response_type: ClassVar[type]
    id_prefix: ClassVar[str]
    body_type: type[BodyT]

    def __init__(self, service: Service) -> None:
        """Serve what the service does."""
        self._service = service

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                path=self.path,
                endpoint=self.respond,
                methods=("POST",),
                summary=self.summary,
                request_type=cast("type[msgspec.Struct]", self.body_type),
                response_type=self.response_type,
            )
        ]

    async def respond(self, request: Request) -> Response:
        """Answer a request, whole or as the answer comes."""
        call, body = await self._service.read(request, self.body_type)
        model = self._service.model(body.model)
        answer_id = new_id(self.id_prefix, body.request_id)
        asked = Asked(call, body, model, answer_id, engine_id(answer_id, body.request_id))
        outputs, answer = await self.begin(asked)
        if not body.stream:
            return await self._service.answer(request, call, lambda: answer.whole(outputs))
        events = answer.events(outputs)
        return self._service.stream(call, events, answer.failed, answer.heartbeat)

    @abstractmethod
    async def begin(
        self, asked: Asked[BodyT]
    ) -> tuple[AsyncGenerator[OutputT, None], Answer[OutputT]]:
        """Return the outputs of a request, which begin when they are asked for, and its answer.

        Raises:
            AnswerError, RequestError: the request is wrong.
        """
