"""Stored responses: `previous_response_id`, and the routes that show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.requests.reading import call_of
from hardpoint.builtin_plugins.server.routes.answers import page_after
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Client, Route
from hardpoint.typed import convert, shown

from .input import InputItem, ItemReference
from .objects import RESPONSE_PREFIX, ResponseObject
from .store import StoreClient, complete_record

_ID = re.compile(RESPONSE_PREFIX + r"[\x21-\x7e]{1,128}")
_ITEM_ID = re.compile(r"[a-z]+_(.+)_\d+")
_MOST_ITEMS = 100


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
        return [*msgspec.convert(self.input, list[InputItem]), *self.output().values()]

    def output(self) -> dict[str, InputItem]:
        """Return the items of the answer by their ids."""
        records: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        items = msgspec.convert(records, list[InputItem])
        return {record["id"]: item for record, item in zip(records, items, strict=True)}


class DeletedResponse(msgspec.Struct):
    """The answer to the deletion of a response."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct):
    """A page of the items before a response, including the items of previous responses.

    Attributes:
        first_id, last_id: ids of the first and the last item of the page; None if it is empty.
    """

    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class ItemsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of a list of items.

    Attributes:
        include: ignored: items are complete.
    """

    after: str | None = None
    limit: str = "20"
    order: Literal["asc", "desc"] = "desc"
    include: Any = None

    def page(
        self, items: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], bool, str | None, str | None]:
        """Return a page of items, see `page_after`.

        Raises:
            RequestError: the limit is wrong, or no item has the id `after`.
        """
        ids = [item["id"] for item in items]
        return page_after(self.after, items, ids, self.order, self.limit, _MOST_ITEMS, "an item")


def items_query(request: Request) -> ItemsQuery:
    """Return the query of a request for a list of items.

    Raises:
        RequestError: a parameter is wrong.
    """
    query = {name.removesuffix("[]"): value for name, value in request.query_params.items()}
    return convert(query, ItemsQuery, path="", error=RequestError)


class StoredResponses:
    """The responses of a server with a response store."""

    def __init__(self, service: Service, store: StoreClient) -> None:
        self._service, self._store = service, store

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
        was_there = _ID.fullmatch(name) and await self._store.delete(request.state.client, name)
        if not was_there:
            raise _not_found(name, "response_id")
        return _json(DeletedResponse(name))

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that a response answers.

        Raises:
            AnswerError: there is no such response.
            RequestError: a parameter of the query is wrong.
        """
        query = items_query(request)
        return _json(InputItemList(*query.page((await self._of(request)).input)))

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

    async def resolved(self, client: Client, items: Sequence[InputItem]) -> list[InputItem]:
        """Return items with items of stored answers instead of references.

        References to unknown items remain.

        Raises:
            BlamedError: the store failed.
        """
        answers: dict[str, dict[str, InputItem]] = {}
        found: list[InputItem] = []
        for item in items:
            if isinstance(item, ItemReference) and (match := _ITEM_ID.fullmatch(item.id)):
                name = RESPONSE_PREFIX + match[1]
                if name not in answers:
                    stored = None
                    if _ID.fullmatch(name):
                        stored = await self._store.get(client, name, Stored)
                    answers[name] = {} if stored is None else stored.output()
                found.append(answers[name].get(item.id, item))
            else:
                found.append(item)
        return found

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
            input=[complete_record(item) for item in items],
            session=session,
            retain_seconds=retain_seconds,
        )
        await self._store.put(client, response.id, stored)

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
            stored = await self._store.get(client, name, Stored)
        if stored is None:
            raise _not_found(name, param)
        return stored


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
