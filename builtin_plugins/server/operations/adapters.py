"""The adapters that requests may name as their model: the seam between the server and the engine.

`AdapterEngine` is all that the server uses of an engine that holds adapters; of any other engine,
no name is one of an adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from msgspec import Meta

from hardpoint.builtin_plugins.server.access.counts import Counts
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.errors import shown
from hardpoint.plugins import LoRARequest, ModelError, RequestError
from hardpoint.plugins.server import AsyncGenerator
from hardpoint.typed import Strict

from .allowed_paths import allowed_path

Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]

_CONFIG = "adapter_config.json"
_CHANGES = "changes of adapters"


@runtime_checkable
class AdapterEngine(Protocol):
    """The calls of an engine that holds adapters."""

    async def add(self, request: LoRARequest) -> Any:
        """Load an adapter; one of the same name is replaced for the requests that follow."""

    async def remove(self, number: int, mode: str = ...) -> Any:
        """Unload an adapter."""

    async def resolve(self, name: str) -> Path | LoRARequest | None:
        """Return the adapter that the enabled resolvers find for a name; None if there is none.

        Raises:
            RequestError: one refuses the name.
            PluginFaultError: one failed, or took too long.
        """

    async def list(self) -> Collection[LoRARequest]:
        """Return the loaded adapters."""


class LoadAdapter(Strict):
    """An adapter to load.

    Attributes:
        lora_name: the name that requests give as their model.
        lora_path: absolute path of a folder as PEFT writes it, in a folder of
            `server.adapter_folders`.
        load_inplace: whether a loaded adapter of that name is replaced.
    """

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False


class UnloadAdapter(Strict):
    """An adapter to unload.

    Attributes:
        lora_name: its name.
        lora_int_id: its number; another one than it has is an error.
        mode: what happens to requests that use it, see
            `AsyncLLM.adapters.remove`; None is its default.
    """

    lora_name: str
    lora_int_id: int | None = None
    mode: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A loaded adapter.

    Attributes:
        request: what the engine gets with each request of it.
        since: seconds since 1970.
    """

    request: LoRARequest
    since: int


class ServedAdapters:
    """The loaded adapters by name. Concurrent requests look up an unloaded adapter once."""

    def __init__(
        self,
        engine: AsyncGenerator,
        names: Sequence[str],
        folders: Sequence[str],
        counts: Counts | None = None,
    ) -> None:
        """Know none yet.

        Args:
            names: names of the base model.
            folders: paths that adapters may be loaded from by an administrator.
            counts: counts of the server, by which its workers know of changes.
        """
        self._counts = counts or Counts()
        self._seen = 0
        self._adapters, self._plugins, self._names = engine.adapters, engine.plugins, names
        self._folders = folders
        self._loaded: dict[str, Loaded] = {}
        self._looked_up: dict[str, asyncio.Task[LoRARequest | None]] = {}
        self._leaving: set[int] = set()  # numbers of those that are being unloaded
        self._adding = asyncio.Lock()
        self._changes = self._last_number = 0

    async def listed(self) -> list[Loaded]:
        """Return the adapters of the engine, including adapters that other clients loaded."""
        await self._refresh()
        return list(self._loaded.values())

    async def find(self, name: str) -> LoRARequest | None:
        """Return the adapter of a name, which is loaded first if a resolver finds it; or None.

        Raises:
            RequestError: a resolver refuses the name, or the adapter cannot be loaded.
            PluginFaultError: a resolver failed.
        """
        if not isinstance(self._adapters, AdapterEngine):
            return None
        if self._counts.total(_CHANGES) != self._seen:  # by another worker
            await self._refresh()
        if (loaded := self._loaded.get(name)) is not None:
            return loaded.request
        if (task := self._looked_up.get(name)) is None:
            task = self._looked_up[name] = asyncio.ensure_future(self._look_up(name))
            task.add_done_callback(lambda done: self._forget(name, done))
        return await asyncio.shield(task)  # others wait for it, too

    def _forget(self, name: str, done: asyncio.Task[LoRARequest | None]) -> None:
        del self._looked_up[name]
        with contextlib.suppress(asyncio.CancelledError):
            done.exception()  # all who waited may have gone

    async def _look_up(self, name: str) -> LoRARequest | None:
        await self._refresh()
        if (loaded := self._loaded.get(name)) is not None:
            return loaded.request
        adapter = await self._check_engine().resolve(name)
        if adapter is None:
            return None
        path = adapter.path if isinstance(adapter, LoRARequest) else str(adapter)
        content_hash = adapter.content_hash if isinstance(adapter, LoRARequest) else ""
        async with self._adding:
            if (loaded := self._loaded.get(name)) is not None:  # in the meantime
                return loaded.request
            return await self._add(name, path, content_hash, param="model")

    async def load(self, body: LoadAdapter) -> LoRARequest:
        """Load an adapter for an administrator.

        Raises:
            AnswerError: the name is taken, or its files are not in an allowed folder.
            HardpointError: the engine cannot load it.
        """
        name, path = body.lora_name, self._allowed(body.lora_path)
        if name in self._names:
            raise AnswerError(
                400,
                f"lora_name: expected another name than those of the model, got {name!r}",
                param="lora_name",
            )
        self._check_engine()
        async with self._adding:
            await self._refresh()
            if name in self._loaded and not body.load_inplace:
                raise AnswerError(
                    400,
                    f"lora_name: {name!r} is loaded already; load_inplace = true replaces it",
                    param="lora_name",
                    code="already_loaded",
                )
            return await self._add(name, str(path), "", param="lora_path")

    async def unload(self, body: UnloadAdapter) -> LoRARequest:
        """Unload an adapter for an administrator.

        Raises:
            AnswerError: there is none of that name and number.
            HardpointError: the engine cannot unload it.
        """
        engine = self._check_engine()
        await self._refresh()
        loaded = self._loaded.get(body.lora_name)
        if loaded is None:
            raise AnswerError(
                404,
                f"lora_name: expected a loaded adapter, got {shown(body.lora_name, 200)}",
                param="lora_name",
                code="not_found",
            )
        number = loaded.request.id
        if body.lora_int_id not in (None, number):
            raise AnswerError(
                400,
                f"lora_int_id: expected {number}, which {body.lora_name!r} has, got "
                f"{body.lora_int_id}",
                param="lora_int_id",
            )
        # From here on, no request gets an adapter that is about to go.
        del self._loaded[body.lora_name]
        self._changed()
        self._leaving.add(number)
        try:
            await engine.remove(number, *([] if body.mode is None else [body.mode]))
        finally:
            self._leaving.discard(number)
            self._changed()
        return loaded.request

    async def _add(self, name: str, path: str, content_hash: str, *, param: str) -> LoRARequest:
        """Load an adapter under a number that no other has.

        Raises:
            AnswerError: its files are broken, or not those of an adapter for this model; `param`
                is the field that named it.
            HardpointError: the engine cannot load it.
        """
        engine = self._check_engine()
        # One that no other worker takes in the meantime.
        width, column = self._counts.num_processes, self._counts.column
        self._last_number += 1 + (column - self._last_number - 1) % width
        request = LoRARequest(name, self._last_number, path, content_hash)
        try:
            added = await engine.add(request)
        except ModelError as error:
            raise AnswerError(400, str(error), param=param, code="invalid_adapter") from error
        request = added if isinstance(added, LoRARequest) else request
        self._loaded[name] = Loaded(request, int(time.time()))
        self._changed()
        return request

    def _changed(self) -> None:
        """Let answers of the engine that were asked for before count no more, in any worker."""
        self._changes += 1
        self._counts.add(_CHANGES)

    async def _refresh(self) -> None:
        if not isinstance(self._adapters, AdapterEngine):
            return
        changes, seen = self._changes, self._counts.total(_CHANGES)
        listed = await self._adapters.list()
        listed = [*listed, *await self._lost(listed)]
        self._last_number = max(self._last_number, *(request.id for request in listed), 0)
        if changes != self._changes:  # the answer is older than what is known
            return
        self._seen = seen
        held = {request.name: request for request in listed if request.id not in self._leaving}
        before, now = self._loaded, int(time.time())
        self._loaded = {
            name: before[name] if name in before and before[name].request == request
            else Loaded(request, now)
            for name, request in held.items()
        }  # fmt: skip

    async def _lost(self, listed: Collection[LoRARequest]) -> list[LoRARequest]:
        """Return adapters that the engine lacks without a removal, as after a restart.

        The next request of each loads it again.
        """
        taken = {key for request in listed for key in (request.name, request.id)}
        known = [loaded.request for loaded in self._loaded.values()]
        lacking = [request for request in known if taken.isdisjoint((request.name, request.id))]
        if not lacking:
            return []
        removed = await self._plugins.call_part("adapters", "removed")
        return [request for request in lacking if request.id not in removed]

    def _check_engine(self) -> AdapterEngine:
        if not isinstance(self._adapters, AdapterEngine):
            raise RequestError("lora_name: expected none, because this engine holds no adapters")
        return self._adapters

    def _allowed(self, path: str) -> Path:
        real = allowed_path(path, self._folders, "lora_path", "server.adapter_folders")
        if not (real / _CONFIG).is_file():
            raise AnswerError(
                404,
                f"lora_path: expected a folder with {_CONFIG}, got {shown(path, 200)}",
                param="lora_path",
                code="not_found",
            )
        return real
