"""Stored responses: what `previous_response_id` goes on from, and the routes that show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.faults import BrokenContractError, Owned
from hardpoint.builtin_plugins.server.routes.answers import new_id, page_after
from hardpoint.builtin_plugins.server.service import Service, call_of
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Client, ResponseStore, Route
from hardpoint.typed import convert, shown

from .events import ResponseObject
from .input import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)

_ID = re.compile(r"resp_[\x21-\x7e]{1,128}")
_MOST_ITEMS = 100
_PREFIXES: dict[type, str] = {
    MessageItem: "msg_",
    ReasoningItem: "rs_",
    FunctionCallItem: "fc_",
    FunctionOutputItem: "fco_",
    CustomCallItem: "ctc_",
    CustomOutputItem: "ctco_",
}


class Stored(msgspec.Struct, kw_only=True):
    """A response as a store keeps it.

    Attributes:
        response: the answer of the route.
        input: the items that it answers, those of the responses before it included.
        session: session of the conversation, for the prefix cache; None without one.
        retain_seconds: for the session.
    """

    response: msgspec.Raw
    input: list[dict[str, Any]]
    session: str | None = None
    retain_seconds: float | None = None

    def items(self) -> list[InputItem]:
        """Return the conversation: the input, and the items of the answer."""
        output: Sequence[Any] = msgspec.json.decode(self.response)["output"]
        return msgspec.convert([*self.input, *output], list[InputItem])


class DeletedResponse(msgspec.Struct):
    """The answer to the deletion of a response."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct):
    """A page of the items that a response answers, those of the responses before it included.

    Attributes:
        first_id, last_id: ids of the first and the last item of the page; None if it is empty.
    """

    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class _ItemsQuery(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None
    limit: str = "20"
    order: Literal["asc", "desc"] = "desc"
    include: Any = None


class StoredResponses:
    """The responses of a server whose plugins bring a store."""

    def __init__(self, service: Service, owned: Owned) -> None:
        self._service, self._owned = service, owned
        self._store: ResponseStore = owned.part

    def routes(self) -> list[Route]:
        """Return the routes of stored responses."""
        path = "/v1/responses/{response_id}"
        return [
            Route(
                path=path,
                endpoint=self.retrieve,
                summary="Return a stored response.",
                response_type=ResponseObject,
            ),
            Route(
                path=path,
                endpoint=self.delete,
                methods=("DELETE",),
                summary="Delete a stored response.",
                response_type=DeletedResponse,
            ),
            Route(
                path=f"{path}/input_items",
                endpoint=self.input_items,
                summary="Return the items that a stored response answers.",
                response_type=InputItemList,
            ),
            Route(
                path=f"{path}/cancel",
                endpoint=self.cancel,
                methods=("POST",),
                summary="Answer that no response runs in the background.",
            ),
        ]

    async def retrieve(self, request: Request) -> Response:
        """Answer with a response.

        Raises:
            AnswerError: there is none of that id.
            RequestError: a stream is asked for.
        """
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("stream: expected false, for a stored response is sent as a whole")
        stored = await self._of(request)
        body = bytes(stored.response)
        if self._service.transforms.changes_responses:
            decoded = msgspec.json.decode(body)
            body = await self._service.transforms.response(call_of(request), decoded)
        return Response(body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Delete a response.

        Raises:
            AnswerError: there is none of that id.
        """
        name = request.path_params["response_id"]
        was_there = _ID.fullmatch(name) and await self._run(
            self._deleted, request.state.client.name, name
        )
        if not was_there:
            raise _not_found(name, "response_id")
        return _json(DeletedResponse(name))

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that a response answers.

        Raises:
            AnswerError: there is no such response.
            RequestError: a parameter of the query is wrong.
        """
        given = {name.removesuffix("[]"): value for name, value in request.query_params.items()}
        query = convert(given, _ItemsQuery, path="", error=RequestError)
        items = (await self._of(request)).input
        ids = [item["id"] for item in items]
        page = page_after(query.after, items, ids, query.order, query.limit, _MOST_ITEMS, "an item")
        return _json(InputItemList(*page))

    async def cancel(self, request: Request) -> Response:
        """Answer that no response runs in the background.

        Raises:
            AnswerError: always.
        """
        await self._of(request)
        raise AnswerError(
            400, "response_id: expected one that runs in the background, which none does here"
        )

    async def previous(self, client: Client, response_id: str) -> Stored:
        """Return the response that a request goes on from.

        Raises:
            AnswerError: the client has none of that id.
        """
        return await self._found(client, response_id, "previous_response_id")

    async def keep(
        self,
        client: Client,
        response: ResponseObject,
        items: Sequence[InputItem],
        session: str | None,
        retain_seconds: float | None,
    ) -> None:
        """Keep a response that has ended.

        Args:
            items: those that it answers, in order.
            session, retain_seconds: for the requests that go on from it.

        Raises:
            RequestError: the store refuses it.
            BlamedError: the store failed.
        """
        stored = Stored(
            response=msgspec.Raw(msgspec.json.encode(response)),
            input=[_with_id(item) for item in items],
            session=session,
            retain_seconds=retain_seconds,
        )
        content = msgspec.json.encode(stored)
        await self._run(self._store.put, client.name, response.id, content)

    @property
    def retain_seconds(self) -> float | None:
        """See `ResponseStore`."""
        return self._store.retain_seconds

    async def _of(self, request: Request) -> Stored:
        return await self._found(
            request.state.client, request.path_params["response_id"], "response_id"
        )

    async def _found(self, client: Client, name: str, param: str) -> Stored:
        stored: Stored | None = None
        if _ID.fullmatch(name):
            stored = await self._run(self._gotten, client.name, name)
        if stored is None:
            raise _not_found(name, param)
        return stored

    async def _gotten(self, owner: str, name: str) -> Stored | None:
        content: object = await self._store.get(owner, name)
        if content is None:
            return None
        if not isinstance(content, bytes):
            kind = type(content).__name__
            raise BrokenContractError(f"get returned a {kind}, expected bytes or None")
        try:
            return msgspec.json.decode(content, type=Stored)
        except msgspec.MsgspecError:
            raise BrokenContractError("get returned what was never put") from None

    async def _deleted(self, owner: str, name: str) -> bool:
        deleted: object = await self._store.delete(owner, name)
        if not isinstance(deleted, bool):
            kind = type(deleted).__name__
            raise BrokenContractError(f"delete returned a {kind}, expected a bool")
        return deleted

    async def _run(self, function: Any, *arguments: Any) -> Any:
        run = self._service.faults.run
        return await run(self._owned, "response store", function, *arguments, may_refuse=True)


def _with_id(item: InputItem) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(item)
    kept = {name: value for name, value in plain.items() if value is not None}
    if "id" not in kept:
        kept["id"] = new_id(_PREFIXES[type(item)])
    return kept


def _not_found(name: str, param: str) -> AnswerError:
    code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
    return AnswerError(
        404,
        f"{param}: no response {shown(name, 150)} is stored for this key",
        param=param,
        code=code,
    )


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
