"""`/v1/batches`: requests of a file that are answered when there is room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request

from hardpoint.builtin_plugins.server.batches.lines import URLS
from hardpoint.plugins import RequestError
from hardpoint.plugins.server import Client, Route, ServerContext
from hardpoint.typed import Strict, shown

from .file_route import check_bytes, page_of, page_query
from .folder import BatchFolder, BatchPlace
from .options import BatchRoutesOptions
from .records import BatchObject, BatchRecord, Page, new_name, now

_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(Strict):
    """When the output of a batch is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=30 * 24 * 3600)]


class BatchRequest(Strict):
    """A batch to begin.

    Attributes:
        input_file_id: id of the file of its requests.
        endpoint: path that each of them is for.
        completion_window: "24h", which is the only one.
        metadata: up to 16 texts.
        output_expires_after: when its output and error files are deleted.
    """

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchRoute:
    """The routes of batches; each batch belongs to the key that created it."""

    def __init__(
        self,
        server: ServerContext,
        folder: BatchFolder,
        options: BatchRoutesOptions,
        wake: Callable[[], None],
    ) -> None:
        """Keep batches in a folder; `wake` is called when there is a new one."""
        self._server, self._folder, self._options = server, folder, options
        self._wake = wake

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = "/v1/batches"
        return [
            Route(
                path=path,
                endpoint=self.create,
                methods=("POST",),
                summary="Answer the requests of a file.",
                request_type=BatchRequest,
                response_type=BatchObject,
            ),
            Route(
                path=path, endpoint=self.list_batches, summary="List batches.", response_type=Page
            ),
            Route(
                path=f"{path}/{{batch_id}}",
                endpoint=self.get,
                summary="Return the state of a batch.",
                response_type=BatchObject,
            ),
            Route(
                path=f"{path}/{{batch_id}}/cancel",
                endpoint=self.cancel,
                methods=("POST",),
                summary="End a batch early.",
                response_type=BatchObject,
            ),
        ]

    async def create(self, request: Request) -> BatchObject:
        """Begin a batch.

        Raises:
            RequestError: the body is wrong, there is no such file, or there are too many batches.
        """
        body = await self._server.read(request, BatchRequest)
        if body.endpoint not in URLS:
            wanted = " or ".join(map(repr, URLS))
            raise RequestError(f"endpoint: expected {wanted}, got {shown(body.endpoint)}")
        record = self._record(body, request.state.client)
        await asyncio.to_thread(self._add, record)
        self._wake()
        return record.batch

    def _record(self, body: BatchRequest, client: Client) -> BatchRecord:
        created, expiry = now(), body.output_expires_after
        batch = BatchObject(
            id=new_name("batch_"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            status="validating",
            created_at=created,
            expires_at=created + int(self._options.window_seconds),
            metadata=body.metadata,
        )
        seconds = self._options.seconds
        return BatchRecord(
            batch=batch,
            order=time.time_ns(),
            client=client,
            output_seconds=seconds if expiry is None else min(seconds, expiry.seconds),
        )

    def _add(self, record: BatchRecord) -> None:
        owner, limit = self._folder.owner(record.client.name), self._options.open_batches
        name = record.batch.input_file_id
        file = owner.file(name)
        missing = RequestError(
            f"input_file_id: expected a file of this key with the purpose 'batch', got "
            f"{shown(name, 100)}"
        )
        if file is None or file.purpose != "batch":
            raise missing
        if len(owner.open_batches()) >= limit:
            raise RequestError(
                f"input_file_id: expected at most {limit} batches of a key that have not ended, "
                "got one more; wait, or cancel one"
            )
        with owner.reserving() as used:
            check_bytes(used, self._options, "input_file_id")
            owner.forget_ended(self._options.owner_batches)
            try:
                owner.add_batch(record)
            except FileNotFoundError:  # it was deleted in this moment
                raise missing from None

    async def list_batches(self, request: Request) -> Page:
        """List batches.

        Raises:
            RequestError: the query is wrong.
        """
        query = page_query(request)
        owner = self._folder.owner(request.state.client.name)
        records = await asyncio.to_thread(owner.batches)
        return page_of([record.batch for record in records], query, 20, 100)

    async def get(self, request: Request) -> BatchObject:
        """Return the state of a batch.

        Raises:
            HTTPException: there is none.
        """
        place = await self._found(request)
        return (await asyncio.to_thread(place.read)).batch

    async def cancel(self, request: Request) -> BatchObject:
        """End a batch early.

        Raises:
            HTTPException: there is none, or it has ended.
        """
        place = await self._found(request)
        batch = (await asyncio.to_thread(place.read)).batch
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise HTTPException(
                409, f"batch_id: expected a batch that goes on, got one that is {batch.status}"
            )
        await asyncio.to_thread(place.cancel)
        self._wake()
        return (await asyncio.to_thread(place.read)).batch

    async def _found(self, request: Request) -> BatchPlace:
        owner = self._folder.owner(request.state.client.name)
        batch_id = request.path_params["batch_id"]
        place = await asyncio.to_thread(owner.find_batch, batch_id)
        if place is None:
            raise HTTPException(404, f"batch_id: this key has no batch {shown(batch_id, 100)}")
        return place
