"""`/v1/files`: the files of batches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse

from hardpoint.builtin_plugins.server.routes.answers import page_after, whole_number
from hardpoint.plugins import OverloadedError, RequestError
from hardpoint.plugins.server import Route, ServerContext
from hardpoint.typed import convert, shown

from .folder import BatchFolder, OwnerFolder
from .options import BatchRoutesOptions
from .records import Deleted, FileObject, Page, new_name, now
from .threads import in_thread

_PURPOSES = ("batch",)
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_FORM_BYTES = 1 << 16
"""Room for the fields of a form besides the content of the file."""
_OWNER_UPLOADS, _UPLOADS = 4, 32
_NAME_LENGTH = 255
_EXPIRY = (3600, 30 * 24 * 3600)


class PageQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of a list."""

    after: str | None = None
    limit: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class FileRoute:
    """The routes of files; each file belongs to the key that uploaded it."""

    def __init__(
        self, server: ServerContext, folder: BatchFolder, options: BatchRoutesOptions
    ) -> None:
        self._server, self._folder, self._options = server, folder, options
        self._uploads: Counter[str] = Counter()

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = "/v1/files/{file_id}"
        return [
            Route(
                path="/v1/files",
                endpoint=self.upload,
                methods=("POST",),
                summary="Keep a file of requests.",
                response_type=FileObject,
                body_types=("multipart/form-data",),
            ),
            Route(
                path="/v1/files",
                endpoint=self.list_files,
                summary="List files.",
                response_type=Page,
            ),
            Route(
                path=path, endpoint=self.get, summary="Describe a file.", response_type=FileObject
            ),
            Route(
                path=path,
                endpoint=self.delete,
                methods=("DELETE",),
                summary="Delete a file.",
                response_type=Deleted,
            ),
            Route(
                path=f"{path}/content", endpoint=self.content, summary="Return a file's content."
            ),
        ]

    async def upload(self, request: Request) -> FileObject:
        """Keep a file.

        Raises:
            RequestError: the form is wrong, or the client has too many files.
            OverloadedError: too many files come in.
            Exception: the body is too long, or stops.
        """
        name = request.state.client.name
        owner = self._folder.owner(name)
        with self._slot(name):
            await asyncio.to_thread(lambda: self._check_room(owner, owner.used_bytes()))
            parts = self._server.body_parts(request, self._options.file_bytes + _FORM_BYTES)
            try:
                parser = MultiPartParser(request.headers, parts, max_files=1, max_fields=4)
                form = await parser.parse()
            except (MultiPartException, KeyError):
                raise RequestError(
                    "body: expected a multipart/form-data with one file and the field purpose"
                ) from None
            try:
                return await self._kept(request, owner, form)
            finally:
                await form.close()

    @contextlib.contextmanager
    def _slot(self, name: str) -> Iterator[None]:
        """Count the file of a client during its upload; slow uploads block only their own client.

        Raises:
            OverloadedError: there are too many.
        """
        if self._uploads[name] >= _OWNER_UPLOADS:
            raise OverloadedError(
                f"file: expected at most {_OWNER_UPLOADS} uploads of a key at once, got one more; "
                "try again later"
            )
        if self._uploads.total() >= _UPLOADS:
            raise OverloadedError(
                f"file: the server takes {_UPLOADS} uploads at once, its maximum; try again later"
            )
        self._uploads[name] += 1
        try:
            yield
        finally:
            self._uploads -= Counter([name])

    async def _kept(self, request: Request, owner: OwnerFolder, form: Any) -> FileObject:
        for name in form:
            if name not in _FIELDS:
                raise RequestError(f"{shown(name)}: unknown field; known: {', '.join(_FIELDS)}")
        file, purpose = form.get("file"), form.get("purpose")
        if file is None or isinstance(file, str):
            raise RequestError("file: expected a file with a name, got none")
        if purpose not in _PURPOSES:
            raise RequestError(f"purpose: expected 'batch', got {shown(purpose)}")
        size = file.size or 0
        if not 0 < size <= self._options.file_bytes:
            limit = self._options.file_bytes
            raise RequestError(f"file: expected 1 to {limit} bytes, got {size}")
        created = now()
        file_object = FileObject(
            id=new_name("file-"),
            bytes=size,
            created_at=created,
            expires_at=created + self._seconds(form),
            filename=_checked_name(file.filename or ""),
            purpose=purpose,
        )

        def keep() -> None:
            with owner.reserving() as used:
                self._check_room(owner, used + size)
                owner.reserve_file(file_object)
            owner.add_file(file_object, time.time_ns(), file.file)

        await self._server.while_connected(request, in_thread(keep))
        return file_object

    def _seconds(self, form: Any) -> int:
        anchor, seconds = (form.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        limit = int(self._options.seconds)
        if anchor is None and seconds is None:
            return limit
        if anchor != "created_at":
            raise RequestError(f"expires_after.anchor: expected 'created_at', got {shown(anchor)}")
        shortest, longest = _EXPIRY
        text = seconds if isinstance(seconds, str) else ""
        number = whole_number(text, longest)
        if not shortest <= number <= longest:
            raise RequestError(
                f"expires_after.seconds: expected {shortest} to {longest}, got {shown(seconds)}"
            )
        return min(number, limit)

    def _check_room(self, owner: OwnerFolder, size: int) -> None:
        """Check that a client may have one more file, with which it has so many bytes.

        Raises:
            RequestError: it has too many, or too large ones.
        """
        files, options = owner.files(), self._options
        if len(files) >= options.owner_files:
            raise RequestError(
                f"file: expected at most {options.owner_files} files of a key, got one more; "
                "delete some"
            )
        check_bytes(size, options, "file")

    async def list_files(self, request: Request) -> Page:
        """List files.

        Raises:
            RequestError: the query is wrong.
        """
        query = page_query(request)
        owner = self._folder.owner(request.state.client.name)
        files = await asyncio.to_thread(owner.files)
        if query.purpose is not None:
            files = [file for file in files if file.purpose == query.purpose]
        return page_of(files, query, 10_000, 10_000)

    async def get(self, request: Request) -> FileObject:
        """Describe a file.

        Raises:
            HTTPException: there is none.
        """
        return (await self._found(request))[1]

    async def delete(self, request: Request) -> Deleted:
        """Delete a file.

        Raises:
            HTTPException: there is none.
        """
        owner, file = await self._found(request)
        await asyncio.to_thread(owner.delete_file, file.id)
        return Deleted(file.id)

    async def content(self, request: Request) -> FileResponse:
        """Return a file's content.

        Raises:
            HTTPException: there is none.
        """
        owner, file = await self._found(request)
        return FileResponse(owner.content(file.id), media_type="application/octet-stream")

    async def _found(self, request: Request) -> tuple[OwnerFolder, FileObject]:
        owner = self._folder.owner(request.state.client.name)
        file_id = request.path_params["file_id"]
        file = await asyncio.to_thread(owner.file, file_id)
        if file is None:
            raise HTTPException(404, f"file_id: this key has no file {shown(file_id, 100)}")
        return owner, file


def check_bytes(size: int, options: BatchRoutesOptions, field: str) -> None:
    """Check that so many bytes of a client may be kept.

    Raises:
        RequestError: naming the field, because it has too many.
    """
    if size > options.owner_bytes:
        raise RequestError(
            f"{field}: expected at most {options.owner_bytes} bytes in all files and batches of a "
            f"key, got {size}; delete some"
        )


def page_query(request: Request) -> PageQuery:
    """Return the query of a list.

    Raises:
        RequestError: it is wrong.
    """
    return convert(dict(request.query_params), PageQuery, path="", error=RequestError)


def page_of(items: Sequence[Any], query: PageQuery, default: int, max_limit: int) -> Page:
    """Return a page.

    Args:
        items: the oldest first.
        default: limit of a query without one.
        max_limit: largest limit of a query.

    Raises:
        RequestError: the query is wrong.
    """
    ids, limit = [item.id for item in items], str(default) if query.limit is None else query.limit
    return Page(*page_after(query.after, items, ids, query.order, limit, max_limit, "one of them"))


def _checked_name(name: str) -> str:
    """Return the name of a file, which is shown and never a path.

    Raises:
        RequestError: it is too long, or looks like a path.
    """
    is_plain = name.isprintable() and not {"/", "\\"} & {*name} and name not in ("", ".", "..")
    if not is_plain or len(name) > _NAME_LENGTH:
        raise RequestError(
            f"file: expected a name of at most {_NAME_LENGTH} characters without slashes, got "
            f"{shown(name, 100)}"
        )
    return name
