"""Access to the response store of a plugin; its contract is checked at each call."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from hardpoint.builtin_plugins.server.faults import BrokenContractError, Owned
from hardpoint.builtin_plugins.server.routes.answers import new_id
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins.server import Client, ResponseStore

from .input import (
    CompactionItem,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

_PREFIXES: dict[type, str] = {
    MessageItem: "msg_",
    ReasoningItem: "rs_",
    FunctionCallItem: "fc_",
    FunctionOutputItem: "fco_",
    CustomCallItem: "ctc_",
    CustomOutputItem: "ctco_",
    CompactionItem: "cmp_",
}


class StoreClient:
    """A client of the response store, which keeps records by client and id."""

    def __init__(self, service: Service, owned: Owned) -> None:
        self._service, self._owned = service, owned
        self._store: ResponseStore = owned.part

    @property
    def retain_seconds(self) -> float | None:
        """See `ResponseStore`."""
        return self._store.retain_seconds

    async def put(self, client: Client, name: str, record: msgspec.Struct) -> None:
        """Store a record.

        Raises:
            RequestError: the store refuses it.
            BlamedError: the store failed.
        """
        await self._run(self._store.put, client.name, name, msgspec.json.encode(record))

    async def get(self, client: Client, name: str, type_: type[RecordT]) -> RecordT | None:
        """Return a record; None if the client has none of that id.

        Raises:
            BlamedError: the store failed.
        """
        record: RecordT | None = await self._run(self._get, client.name, name, type_)
        return record

    async def delete(self, client: Client, name: str) -> bool:
        """Delete a record; return whether there was one.

        Raises:
            BlamedError: the store failed.
        """
        was_there: bool = await self._run(self._delete, client.name, name)
        return was_there

    async def _get(self, owner: str, name: str, type_: type[RecordT]) -> RecordT | None:
        content: object = await self._store.get(owner, name)
        if content is None:
            return None
        if not isinstance(content, bytes):
            kind = type(content).__name__
            raise BrokenContractError(f"get returned a {kind}, expected bytes or None")
        try:
            return msgspec.json.decode(content, type=type_)
        except msgspec.MsgspecError:
            raise BrokenContractError("get returned what was never put") from None

    async def _delete(self, owner: str, name: str) -> bool:
        was_there: object = await self._store.delete(owner, name)
        if not isinstance(was_there, bool):
            kind = type(was_there).__name__
            raise BrokenContractError(f"delete returned a {kind}, expected a bool")
        return was_there

    async def _run(self, function: Any, *arguments: Any) -> Any:
        run = self._service.faults.run
        return await run(self._owned, "response store", function, *arguments, may_refuse=True)


def complete_record(item: InputItem) -> dict[str, Any]:
    """Return an item as it is stored, with the fields that OpenAI's answers always have."""
    fields: dict[str, Any] = msgspec.to_builtins(item)
    record = {name: value for name, value in fields.items() if value is not None}
    if "id" not in record:
        record["id"] = new_id(_PREFIXES[type(item)])
    if record["type"] == "compaction":
        return record
    record = {"status": "completed", **record}
    content = record.get("content")
    if record["type"] == "message" and isinstance(content, str):
        is_answer = record["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_answer else "input_text"}
        part["text"] = content
        record["content"] = [part | {"annotations": []} if is_answer else part]
    return record
