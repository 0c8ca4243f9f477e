"""Reading of requests: who calls, and the checked fields of a body or of a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import HTTPConnection, Request

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.extensions import Transforms
from hardpoint.builtin_plugins.server.operations.ignored_fields import IgnoredFields
from hardpoint.builtin_plugins.server.operations.traffic import TrafficRecorder, current_key
from hardpoint.builtin_plugins.server.receiving import SMALL_BYTES, BodyReceiver
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Call

from .bodies import check_lengths, convert_body, decode_object, without_ignored

T = TypeVar("T")
R = TypeVar("R")


def call_of(request: HTTPConnection) -> Call:
    """Return who makes a request."""
    headers = {
        name: value
        for name, value in request.headers.items()
        if name not in ("authorization", "x-api-key", "cookie")
    }
    return Call(
        request_id=request.state.request_id,
        path=request.scope.get("path", ""),
        client=request.state.client,
        headers=headers,
    )


class RequestReader:
    """Reads requests.

    Attributes:
        receiver: receiver of the users' bodies.
    """

    def __init__(
        self,
        settings: ServerConfig,
        receiver: BodyReceiver,
        traffic: TrafficRecorder,
        transforms: Callable[[], Transforms],
        chat_template: Callable[[], str | None],
    ) -> None:
        """Read the requests of a server.

        Args:
            traffic: records ignored fields.
            transforms: returns the transforms of plugins.
            chat_template: returns the chat template of the model.
        """
        self.receiver = receiver
        self._settings, self._traffic = settings, traffic
        self._transforms, self._chat_template = transforms, chat_template
        self._converting = asyncio.Lock()
        self._converting_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, request: Request, type_: type[T]) -> tuple[Call, T]:
        """Return who calls, and the checked body of a request that generates.

        Raises:
            AnswerError, RequestError: the request is wrong.
        """
        call = call_of(request)
        self._transforms().begin(request.scope, call)
        async with self.receiver.body(request) as body:
            if not self._transforms().changes_requests:
                return call, await self._large(body, self._plain, body, type_)
            fields = await self._large(body, self._decoded, body, type_)
            fields = await self._transforms().request(call, fields)
            try:
                return call, await self._large(body, self._converted, fields, type_)
            except RequestError as wrong:
                try:
                    await self._large(body, self._plain, body, type_)
                except RequestError:
                    raise wrong from None
                raise self._transforms().blame_request() from wrong

    async def read_message(self, call: Call, message: bytes) -> dict[str, Any]:
        """Return the fields of a message of a WebSocket, as transforms leave them.

        Raises:
            AnswerError, RequestError: it is no JSON object, or a transform refuses it.
        """
        fields = await self._large(message, self._decoded, message)
        if self._transforms().changes_requests:
            fields = await self._transforms().request(call, fields)
        return fields

    async def checked(self, message: bytes, fields: dict[str, Any], type_: type[T]) -> T:
        """Return the fields of a message of a WebSocket as its type.

        Unknown fields are errors even if requests may have some, because a message has no answer
        with headers that could list them.

        Raises:
            RequestError: one is wrong.
        """
        return await self._large(message, self._converted, fields, type_, is_message=True)

    async def read_plain(self, request: Request, type_: type[T]) -> T:
        """Return the checked body of a request to a route of a plugin.

        Raises:
            AnswerError, RequestError: the request is wrong.
        """
        async with self.receiver.body(request) as body:
            return await self._large(body, self._plain, body, type_, is_shaped=False)

    async def _large(self, body: bytes, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Return a function's result; for a large body, call it where others' streams go on.

        One at a time: several at once would take turns with the event loop. A body waits for at
        most one of each other key.
        """
        if len(body) <= SMALL_BYTES:
            return function(*args, **kwargs)
        key_lock = self._converting_of.setdefault(current_key(), asyncio.Lock())
        async with key_lock, self._converting:
            return await asyncio.to_thread(function, *args, **kwargs)

    def _decoded(self, body: bytes, type_: type | None = None) -> dict[str, Any]:
        return decode_object(body, self._settings.limits, type_)

    def _plain(self, body: bytes, type_: type[T], *, is_shaped: bool = True) -> T:
        return self._converted(self._decoded(body, type_), type_, is_shaped=is_shaped)

    def _converted(
        self,
        fields: dict[str, Any],
        type_: type[T],
        *,
        is_shaped: bool = True,
        is_message: bool = False,
    ) -> T:
        """Return a decoded body, checked.

        Args:
            is_shaped: whether its lists have the names and limits of the generating routes.
            is_message: whether it is a message of a WebSocket, whose unknown fields are errors.
        """
        lenient = self._settings.unknown_fields == "warn" and not is_message
        ignored = IgnoredFields()
        hosted = getattr(type_, "without_hosted_tools", None)
        if hosted is not None and self._settings.hosted_tools == "ignore":
            fields, paths = hosted(fields)
            for path in paths:
                ignored.add(path)
        unenforced = getattr(type_, "unenforced", None)
        for path in () if unenforced is None else unenforced(fields):
            ignored.add(path)
        fields = without_ignored(fields, type_)
        if is_shaped:
            check_lengths(fields, type_, self._settings.limits)
        if (prepared := getattr(type_, "prepared", None)) is not None:
            fields = prepared(fields)
        body = convert_body(fields, type_, lenient=lenient, ignored=ignored)
        if lenient and (without_thinking := getattr(body, "without_thinking", None)) is not None:
            body, names = without_thinking(self._chat_template)
            for name in names:
                ignored.add(name)
        if ignored.paths:
            self._traffic.ignored(ignored)
        return body
