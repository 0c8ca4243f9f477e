"""OpenAI's Conversations, `/v1/conversations`: items and metadata in the response store."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.access.counts import held
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.requests.limit_errors import too_many_items
from hardpoint.builtin_plugins.server.requests.reading import call_of
from hardpoint.builtin_plugins.server.routes.answers import new_id
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Client, Route
from hardpoint.typed import Strict, shown

from .input import REFUSED_ITEMS, InputItem, prepared_items
from .request import Metadata
from .store import StoreClient, complete_record
from .stored import InputItemList, items_query

PATH = "/v1/conversations"
_ID = re.compile(r"conv_[\x21-\x7e]{1,128}")
_REFUSED_ITEMS = {**REFUSED_ITEMS, "item_reference": "send the item itself"}
_LOCK_SECONDS = 10.0
_LOCK_INTERVAL = 0.02


class ConversationResource(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str] = {}


class DeletedConversation(msgspec.Struct):
    """The answer to the deletion of a conversation and its items."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class ConversationRecord(msgspec.Struct, kw_only=True):
    """A conversation in the store.

    Attributes:
        created_at: seconds since the epoch.
        items: items, each with an id, the oldest first.
    """

    created_at: int
    metadata: dict[str, str] = {}
    items: list[dict[str, Any]] = []

    def input_items(self) -> list[InputItem]:
        """Return the items in the types of a request."""
        return msgspec.convert(self.items, list[InputItem])

    def add(self, items: Sequence[InputItem]) -> list[dict[str, Any]]:
        """Add items; return them as they are stored."""
        added = [complete_record(item) for item in items]
        self.items.extend(added)
        return added

    def check_ids(self, items: Sequence[InputItem], field: str) -> None:
        """Check that items have new ids.

        Args:
            field: name of the field that has the items, for messages.

        Raises:
            RequestError: the conversation has an item of the same id.
        """
        ids = {item["id"] for item in self.items}
        for index, item in enumerate(items):
            if item.id is None:
                continue
            if item.id in ids:
                raise RequestError(
                    f"{field}[{index}].id: expected an id that the conversation does not have, "
                    f"got {shown(item.id, 150)}"
                )
            ids.add(item.id)

    def shown(self, name: str) -> ConversationResource:
        """Return the conversation as clients see it."""
        return ConversationResource(id=name, created_at=self.created_at, metadata=self.metadata)


class _ItemsBody(Strict):
    list_limits: ClassVar[Mapping[str, str]] = {"items": "messages"}

    @staticmethod
    def prepared(fields: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the types of all items; see `RequestReader.read`.

        Raises:
            RequestError: an item is known and not supported.
        """
        if "items" not in fields:
            return fields
        return {**fields, "items": prepared_items(fields["items"], "items", _REFUSED_ITEMS)}


class ConversationCreateRequest(_ItemsBody):
    """A conversation to create.

    Attributes:
        items: its first items.
        metadata: up to 16 texts.
    """

    items: list[InputItem] | None = None
    metadata: Metadata | None = None


class ConversationUpdateRequest(Strict):
    """The new metadata of a conversation.

    Attributes:
        metadata: up to 16 texts; null removes all.
    """

    metadata: Metadata | None


class ItemsCreateRequest(_ItemsBody):
    """Items to add to a conversation."""

    items: Annotated[list[InputItem], Meta(min_length=1)]


class StoredConversations:
    """The conversations of a server with a response store."""

    def __init__(self, service: Service, store: StoreClient) -> None:
        self._service, self._store = service, store

    async def find(
        self, client: Client, name: str, param: str = "conversation"
    ) -> ConversationRecord:
        """Return a conversation of a client.

        Args:
            param: name of the field or parameter that has the id.

        Raises:
            AnswerError: the client has none of that id.
        """
        record = None
        if _ID.fullmatch(name):
            record = await self._store.get(client, name, ConversationRecord)
        if record is None:
            raise AnswerError(
                404,
                f"{param}: no conversation {shown(name, 150)} is stored for this key",
                param=param,
                code="not_found",
            )
        return record

    async def create(
        self, client: Client, items: Sequence[InputItem], metadata: dict[str, str]
    ) -> ConversationResource:
        """Store a new conversation.

        Raises:
            RequestError: it has too many items, or the store refuses it.
        """
        name = new_id("conv_")
        record = ConversationRecord(created_at=int(time.time()), metadata=metadata)
        self.check_new(record, items, "items")
        record.add(items)
        await self._store.put(client, name, record)
        return record.shown(name)

    async def delete(self, client: Client, name: str) -> DeletedConversation:
        """Delete a conversation with its items.

        Raises:
            AnswerError: the client has none of that id.
        """
        async with self._locked(client, name):
            await self.find(client, name, "conversation_id")
            await self._store.delete(client, name)
        return DeletedConversation(name)

    async def append(
        self, client: Client, name: str, items: Sequence[InputItem]
    ) -> list[dict[str, Any]]:
        """Add items to a conversation; return them as they are stored.

        Raises:
            AnswerError: the client has no such conversation, or others change it for too long.
            RequestError: the conversation becomes too long.
        """
        async with self._changed(client, name) as record:
            self.check_new(record, items, "items")
            return record.add(items)

    async def append_answer(
        self, client: Client, name: str, items: Sequence[InputItem], output: Sequence[InputItem]
    ) -> None:
        """Add the input and the output of a response to a conversation.

        The response has been generated, so the conversation may become too long.

        Raises:
            AnswerError: the client has no such conversation, or others change it for too long.
            RequestError: the conversation has an item of the same id by now.
        """
        async with self._changed(client, name) as record:
            record.check_ids(items, "input")
            record.add([*items, *output])

    @contextlib.asynccontextmanager
    async def _changed(self, client: Client, name: str) -> AsyncGenerator[ConversationRecord, None]:
        """Provide a conversation to change; it is stored when the block succeeds.

        Raises:
            AnswerError: the client has no such conversation, or others change it for too long.
            RequestError: the store refuses it.
        """
        async with self._locked(client, name):
            record = await self.find(client, name, "conversation_id")
            yield record
            await self._store.put(client, name, record)

    @contextlib.asynccontextmanager
    async def _locked(self, client: Client, name: str) -> AsyncGenerator[None, None]:
        """Exclude other changes of a conversation, by all workers of the server.

        Raises:
            AnswerError: others change it for too long.
        """
        counts, clock = self._service.counts, asyncio.get_running_loop().time
        lock, deadline = held(f"conversation {name} of {client.name}"), clock() + _LOCK_SECONDS
        while not counts.add_below(lock, 1):
            if clock() > deadline:
                raise AnswerError(
                    409,
                    "conversation: other requests change it; send the request again",
                    param="conversation",
                    code="conversation_locked",
                )
            await asyncio.sleep(_LOCK_INTERVAL)
        try:
            yield
        finally:
            counts.add(lock, -1)

    def check_new(self, record: ConversationRecord, items: Sequence[InputItem], field: str) -> None:
        """Check that items can be added to a conversation.

        Args:
            field: name of the field that has the items, for messages.

        Raises:
            RequestError: the conversation becomes too long, or has an item of the same id.
        """
        limit, number = self._service.settings.limits.messages, len(record.items) + len(items)
        if number > limit:
            raise too_many_items(field, limit, number)
        record.check_ids(items, field)

    async def update(
        self, client: Client, name: str, metadata: dict[str, str]
    ) -> ConversationResource:
        """Replace the metadata of a conversation.

        Raises:
            AnswerError: the client has no such conversation, or others change it for too long.
        """
        async with self._changed(client, name) as record:
            record.metadata = metadata
        return record.shown(name)

    async def delete_item(self, client: Client, name: str, item_id: str) -> ConversationResource:
        """Delete an item of a conversation.

        Raises:
            AnswerError: the client has no such conversation, or it has no such item.
        """
        async with self._changed(client, name) as record:
            record.items.remove(_item(record, item_id))
        return record.shown(name)


class ConversationRoutes:
    """The routes of conversations; without a response store, each answers with 404."""

    def __init__(self, service: Service, conversations: StoredConversations | None) -> None:
        self._service, self._stored = service, conversations

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = f"{PATH}/{{conversation_id}}"
        return [
            Route(
                path=PATH,
                endpoint=self.create,
                methods=("POST",),
                summary="Create a conversation.",
                request_type=ConversationCreateRequest,
                response_type=ConversationResource,
            ),
            Route(
                path=path,
                endpoint=self.retrieve,
                summary="Return a conversation.",
                response_type=ConversationResource,
            ),
            Route(
                path=path,
                endpoint=self.update,
                methods=("POST",),
                summary="Replace the metadata of a conversation.",
                request_type=ConversationUpdateRequest,
                response_type=ConversationResource,
            ),
            Route(
                path=path,
                endpoint=self.delete,
                methods=("DELETE",),
                summary="Delete a conversation and its items.",
                response_type=DeletedConversation,
            ),
            *self._item_routes(f"{path}/items"),
        ]

    def _item_routes(self, path: str) -> list[Route]:
        return [
            Route(
                path=path,
                endpoint=self.create_items,
                methods=("POST",),
                summary="Add items to a conversation.",
                request_type=ItemsCreateRequest,
                response_type=InputItemList,
            ),
            Route(
                path=path,
                endpoint=self.list_items,
                summary="List the items of a conversation.",
                response_type=InputItemList,
            ),
            Route(
                path=f"{path}/{{item_id}}",
                endpoint=self.retrieve_item,
                summary="Return an item of a conversation.",
            ),
            Route(
                path=f"{path}/{{item_id}}",
                endpoint=self.delete_item,
                methods=("DELETE",),
                summary="Delete an item of a conversation.",
                response_type=ConversationResource,
            ),
        ]

    async def create(self, request: Request) -> Response:
        """Create a conversation."""
        call, body = await self._service.requests.read(request, ConversationCreateRequest)
        items, metadata = body.items or (), body.metadata or {}
        return await self._answer(
            request, lambda stored: stored.create(call.client, items, metadata)
        )

    async def retrieve(self, request: Request) -> Response:
        """Answer with a conversation."""
        name = _name(request)

        async def work(stored: StoredConversations) -> ConversationResource:
            return (await stored.find(request.state.client, name, "conversation_id")).shown(name)

        return await self._answer(request, work)

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        call, body = await self._service.requests.read(request, ConversationUpdateRequest)
        name = _name(request)
        return await self._answer(
            request, lambda stored: stored.update(call.client, name, body.metadata or {})
        )

    async def delete(self, request: Request) -> Response:
        """Delete a conversation and its items."""
        client, name = request.state.client, _name(request)
        return await self._answer(request, lambda stored: stored.delete(client, name))

    async def create_items(self, request: Request) -> Response:
        """Add items to a conversation; answer with them."""
        call, body = await self._service.requests.read(request, ItemsCreateRequest)
        name = _name(request)

        async def work(stored: StoredConversations) -> InputItemList:
            items = await stored.append(call.client, name, body.items)
            return InputItemList(items, False, items[0]["id"], items[-1]["id"])

        return await self._answer(request, work)

    async def list_items(self, request: Request) -> Response:
        """Answer with a page of the items of a conversation."""
        query, name = items_query(request), _name(request)

        async def work(stored: StoredConversations) -> InputItemList:
            record = await stored.find(request.state.client, name, "conversation_id")
            return InputItemList(*query.page(record.items))

        return await self._answer(request, work)

    async def retrieve_item(self, request: Request) -> Response:
        """Answer with an item of a conversation."""
        name, item_id = _name(request), request.path_params["item_id"]

        async def work(stored: StoredConversations) -> dict[str, Any]:
            record = await stored.find(request.state.client, name, "conversation_id")
            return _item(record, item_id)

        return await self._answer(request, work)

    async def delete_item(self, request: Request) -> Response:
        """Delete an item of a conversation; answer with the conversation."""
        client, name = request.state.client, _name(request)
        item_id = request.path_params["item_id"]
        return await self._answer(request, lambda stored: stored.delete_item(client, name, item_id))

    async def _answer(
        self, request: Request, work: Callable[[StoredConversations], Awaitable[Any]]
    ) -> Response:
        """Return the result of work on the store as JSON.

        Raises:
            AnswerError: the server has no response store.
            Exception: raised by the work.
        """
        stored = self._stored
        if stored is None:
            raise AnswerError(
                404,
                "conversations: nothing is stored on this server; plugin.response_stores.use = "
                '"memory" or "sqlite" stores conversations',
                code="not_found",
            )
        body = msgspec.json.encode(await self._service.run(request, lambda: work(stored)))
        transforms = self._service.transforms
        if transforms.changes_responses:
            body = await transforms.response(call_of(request), msgspec.json.decode(body))
        return Response(body, media_type="application/json")


def _name(request: Request) -> str:
    name: str = request.path_params["conversation_id"]
    return name


def _item(record: ConversationRecord, item_id: str) -> dict[str, Any]:
    for item in record.items:
        if item["id"] == item_id:
            return item
    raise AnswerError(
        404,
        f"item_id: the conversation has no item {shown(item_id, 150)}",
        param="item_id",
        code="not_found",
    )
