"""`/inference/v1/sessions`: streaming input over a WebSocket; and the release of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from hardpoint.builtin_plugins.server.access.counts import held
from hardpoint.builtin_plugins.server.errors import AnswerError, ErrorDetail
from hardpoint.builtin_plugins.server.operations.traffic import count_tokens_of
from hardpoint.builtin_plugins.server.requests.reading import call_of
from hardpoint.builtin_plugins.server.routes.answers import (
    Usage,
    UsageCount,
    answer_ids,
    check_ended,
)
from hardpoint.builtin_plugins.server.routes.fields import (
    NO_TEMPLATE,
    TEXT_REFUSED,
    SamplingFields,
)
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.errors import ConversationEndedError, HardpointError
from hardpoint.plugins import RequestError, RequestOutputKind, SamplingParams
from hardpoint.plugins.requests import AdapterScale
from hardpoint.plugins.server import (
    Call,
    Client,
    Route,
)
from hardpoint.typed import Strict, convert, shown

if TYPE_CHECKING:
    from hardpoint.plugins.server.generator import OpenConversation


PATH = "/inference/v1/sessions"
_OLD_PATH = "/v1/conversations"
"""Earlier path of the WebSocket, now that of OpenAI's Conversations; accepted for one version."""

_log = logging.getLogger("hardpoint")

_AT_OPENING = "give it in the query of the handshake, for the whole conversation"
_TEXTS = ("model", "cache_salt", "session")
_POLICY, _ENDING = 1008, 1012
"""Codes that WebSockets are closed with: for what the client did, and as the server ends."""


class SessionQuery(Strict):
    """The query of a conversation.

    Attributes:
        model: name of the model, or of an adapter.
        keep_last: whether the last token of an answer is part of the conversation.
        priority, timeout: options of each turn.
        cache_salt: conversations with different salts share no cached prompts.
        session, retain_seconds: how long what a turn has computed is to be kept in the prefix
            cache, under which name.
        lora_scale: factor of what the adapter changes that `model` names.
    """

    model: str | None = None
    keep_last: bool = True
    priority: int | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    retain_seconds: Annotated[float, Meta(gt=0)] | None = None
    lora_scale: AdapterScale | None = None


class InputAppend(Strict):
    """A part of the prompt.

    Attributes:
        text: computed with the next turn.
    """

    text: str


_OF_OPENING = (*SessionQuery.__struct_fields__, "tags")


class InputCommit(SamplingFields):
    """The start of a turn; without fields, it has the parameters of the turn before."""

    refused: ClassVar[Mapping[str, str]] = {
        **TEXT_REFUSED,
        **NO_TEMPLATE,
        **dict.fromkeys(_OF_OPENING, _AT_OPENING),
        "include": "the route has the text and the usage alone",
        "kv_transfer_params": "turns are computed where the conversation is",
        "logprob_token_ids": "the route has the text and the usage alone",
        "prompt_logprobs": "the route has the text and the usage alone",
        "request_id": "the conversation has one",
        "return_progress": "the route has no progress",
        "return_token_ids": "the route has the text and the usage alone",
        "stream": "answers come as they are made",
        "stream_options": "each answer ends with its usage",
        "trace": "the route has the text and the usage alone",
    }


class ResponseCancel(Strict):
    """The end of the turn that runs."""


_MESSAGES: dict[str, type[Any]] = {
    "input.append": InputAppend,
    "input.commit": InputCommit,
    "response.cancel": ResponseCancel,
}


class ResponseDelta(msgspec.Struct):
    """A piece of an answer.

    Attributes:
        turn: number of the turn, from 0.
    """

    turn: int | None
    text: str
    type: Literal["response.delta"] = "response.delta"


class ResponseDone(msgspec.Struct):
    """The end of an answer.

    Attributes:
        turn: number of the turn; None if no part had come, so that there was none.
        finish_reason: why it ended; None without a turn.
    """

    turn: int | None
    finish_reason: str | None
    stop_reason: int | str | dict[str, Any] | None
    usage: Usage
    type: Literal["response.done"] = "response.done"


class ErrorEvent(msgspec.Struct):
    """The error of a message or a turn; the conversation goes on unless it is closed."""

    error: ErrorDetail
    type: Literal["error"] = "error"


class ReleaseRequest(Strict):
    """A session to release.

    Attributes:
        cache_salt: salt of the requests of the session.
    """

    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


class ReleasedSession(msgspec.Struct):
    """The outcome of a release.

    Attributes:
        outcome: "missing" if no session of that name, by requests with the same key and salt,
            retains anything.
    """

    session: str
    outcome: Literal["accepted", "missing"]


class SessionRoutes:
    """The routes of sessions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._has_warned = False

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                path=PATH,
                endpoint=self.open,
                websocket=True,
                summary="Converse on a WebSocket: a prompt that goes on after each answer.",
            ),
            Route(
                path=_OLD_PATH,
                endpoint=self.open_at_old_path,
                websocket=True,
                summary=f"Deprecated: open the WebSocket at {PATH}.",
            ),
            Route(
                path="/v1/sessions/{session}/release",
                endpoint=self.release,
                methods=("POST",),
                summary="Let what a conversation retains in the prefix cache be evicted as others.",
                request_type=ReleaseRequest,
                response_type=ReleasedSession,
            ),
        ]

    async def release(self, request: Request) -> Response:
        """Release a session of the client that calls."""
        call, body = await self._service.requests.read(request, ReleaseRequest)
        session = request.path_params["session"]
        salt = self._service.extras(call, body)["cache_salt"]

        async def work() -> ReleasedSession:
            arguments = {"session": session, "cache_salt": salt}
            outcome = await self._service.engine.plugins.call_part(
                "retention", "release", arguments
            )
            return ReleasedSession(session, outcome)

        return await self._service.answer(request, call, work)

    async def open_at_old_path(self, websocket: WebSocket) -> None:
        """Open a conversation at the deprecated path; the first handshake logs a warning."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("WebSocket %s is deprecated; open it at %s", _OLD_PATH, PATH)
        await self.open(websocket)

    async def open(self, websocket: WebSocket) -> None:
        """Open a conversation, and answer its messages until an end."""
        service, call = self._service, call_of(websocket)
        service.transforms.begin(websocket.scope, call)
        opening = _opening(websocket)
        _, adapter = await service.model(opening.model)
        service.check_admission()
        with self._one_more(call.client):
            conversation = service.engine.open_conversation(
                request_id=answer_ids("conv-", call, None)[1],
                keep_last=opening.keep_last,
                **service.extras(call, opening, adapter),
            )
            talk = _Talk(service, websocket, call, conversation)
            try:
                await websocket.accept()
                await talk.run()
            finally:
                await conversation.aclose()

    @contextlib.contextmanager
    def _one_more(self, client: Client) -> Iterator[None]:
        """Count a conversation of a client until it has ended.

        Raises:
            AnswerError: the client has as many as it may.
        """
        limit, counts = self._service.settings.limits.conversations, self._service.counts
        name = held(f"conversations of {client.name}")
        if not counts.add_below(name, limit):
            owner = "this key" if self._service.has_keys else "all clients together"
            raise AnswerError(
                429,
                f"server.limits.conversations: expected at most {limit} open conversations of "
                f"{owner}, and {counts.total(name)} are open; close one first",
                kind="rate_limit_error",
                code="too_many_conversations",
            )
        try:
            yield
        finally:
            counts.add(name, -1)


def _opening(connection: HTTPConnection) -> SessionQuery:
    query: dict[str, Any] = {}
    for name, value in connection.query_params.multi_items():
        if name in query:
            raise RequestError(f"{name}: expected it once in the query, got it several times")
        query[name] = value if name in _TEXTS else _decoded(value)
    return convert(query, SessionQuery, path="", error=RequestError)


def _decoded(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value


class _Tokens:
    """The tokens of all turns, for the access log."""

    def __init__(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0
        self.finish_reasons: list[str] = []

    def add(self, turn: UsageCount) -> None:
        self.prompt_tokens += turn.prompt_tokens
        self.completion_tokens += turn.completion_tokens
        self.finish_reasons = sorted({*self.finish_reasons, *turn.finish_reasons})


class _Talk:
    """One conversation and its WebSocket."""

    def __init__(
        self, service: Service, websocket: WebSocket, call: Call, conversation: OpenConversation
    ) -> None:
        self._service, self._websocket, self._call = service, websocket, call
        self._conversation = conversation
        self._turn: asyncio.Task[None] | None = None
        self._tokens = _Tokens()
        self._code = 0  # what it is to be closed with

    async def run(self) -> None:
        receiving = asyncio.ensure_future(self._websocket.receive())
        try:
            while not self._code:
                waits = [receiving] if self._turn is None else [receiving, self._turn]
                limit = self._conversation.seconds_left
                await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if self._turn is not None and self._turn.done():
                    turn, self._turn = self._turn, None
                    turn.result()
                elif receiving.done():
                    message = receiving.result()
                    if message["type"] == "websocket.disconnect":
                        return
                    receiving = asyncio.ensure_future(self._websocket.receive())
                    await self._answering(self._process(message))
                else:
                    await self._answering(self._conversation.append(""))  # unless the lease is over
        finally:
            for task in (receiving, self._turn):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
        await self._websocket.close(self._code)

    async def _answering(self, work: Any) -> None:
        """Do work; send its error, if it has one."""
        try:
            await work
        except (HardpointError, AnswerError, HTTPException) as error:
            answer = self._service.failure(error)
            if isinstance(error, ConversationEndedError):
                answer.detail.code = "conversation_ended"
            if isinstance(error, ConversationEndedError) or answer.status in (401, 403):
                self._code = _POLICY
            elif answer.detail.code in ("draining", "engine_ended"):
                self._code = _ENDING
            await self._send(ErrorEvent(answer.detail))

    async def _process(self, message: Mapping[str, Any]) -> None:
        if (text := message.get("text")) is None:
            raise RequestError("message: expected a text, got bytes")
        content = text.encode()
        fields = await self._service.requests.read_message(self._call, content)
        kind = fields.pop("type", None)
        if not isinstance(kind, str) or kind not in _MESSAGES:
            known = ", ".join(map(repr, _MESSAGES))
            raise RequestError(f"type: expected one of {known}, got {shown(kind, 100)}")
        message_body = await self._service.requests.checked(content, fields, _MESSAGES[kind])
        match message_body:
            case InputAppend():
                self._service.check_prompt(message_body.text, name="text")
                await self._conversation.append(message_body.text)
            case InputCommit():
                await self._commit(message_body.resolved(), has_fields=bool(fields))
            case _:
                await self._conversation.cancel()

    async def _commit(self, body: InputCommit, *, has_fields: bool) -> None:
        if self._turn is not None:
            raise RequestError("input.commit: a turn runs; wait for its response.done")
        self._websocket.scope["state"]["client"] = await self._websocket.state.ask_again()
        params: SamplingParams | None = None
        if has_fields or not self._tokens.prompt_tokens:
            limits = self._service.settings.limits
            settings: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA}
            if body.max_tokens is not None:
                settings["max_tokens"] = body.max_tokens
            defaults = self._service.engine.model.default_sampling_params()
            params = body.sampling_params(defaults, limits, **settings)
        self._turn = asyncio.ensure_future(self._answering(self._run_turn(params, body)))

    async def _run_turn(self, params: SamplingParams | None, body: InputCommit) -> None:
        """Send a turn's answer as it comes.

        Raises:
            AnswerError, HardpointError: there is none, or it ended with an error.
        """
        turn: int | None = None
        reason, stop_reason = None, None
        with self._service.load.one_more():
            self._service.check_admission()
            count = UsageCount(self._service.engine.tokenizer)
            count_tokens_of(self._tokens)
            outputs = self._conversation.commit(params)
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        count.add(output)
                        (completion,) = output.outputs
                        check_ended(completion)
                        turn, stop_reason = output.turn, completion.stop_reason
                        reason = completion.finish_reason
                        if completion.text:
                            await self._send(ResponseDelta(turn, completion.text))
            except RequestError as error:
                raise type(error)(body.own_names(str(error))) from error
            finally:
                self._tokens.add(count)
            await count.measure(self._service.engine.model.tokenize)
            await self._send(ResponseDone(turn, reason, stop_reason, count.usage()))

    async def _send(self, event: msgspec.Struct) -> None:
        data: bytes | None = msgspec.json.encode(event)
        transforms = self._service.transforms
        if transforms.changes_events and data is not None:
            data = transforms.event_data(self._call, data)
        if data is not None:
            await self._websocket.send_text(data.decode())
