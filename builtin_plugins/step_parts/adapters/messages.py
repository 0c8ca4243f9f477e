"""Messages between the halves of adapters, as msgpack, and messages of programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hardpoint.plugins import LoRARequest, RequestError


class AdapterSlot(msgspec.Struct, array_like=True, frozen=True):
    """A slot of a step, and the adapter that it has to hold.

    Attributes:
        index: number of the slot.
        content: hash of the adapter.
    """

    index: int
    content: str


class StepAdapters(msgspec.Struct, array_like=True):
    """The data of a plan for the worker halves: its slots, and the slot of each request.

    Attributes:
        scales: factors of the adapters' products, for requests with another one than 1.0.
    """

    slots: list[AdapterSlot]
    requests: dict[str, int]
    scales: dict[str, float]


class Read(msgspec.Struct, tag=True):
    """Begin to read an adapter; `ticket` names this reading."""

    ticket: int
    path: str


class Ask(msgspec.Struct, tag=True):
    """Report how far a reading is."""

    ticket: int


class Keep(msgspec.Struct, tag=True):
    """Keep the adapters read, and forget unused contents."""

    ticket: int
    forgotten: list[str]


class Drop(msgspec.Struct, tag=True):
    """Forget a reading, and contents that are not used any more."""

    ticket: int
    forgotten: list[str] = []


Call = Read | Ask | Keep | Drop
"""A request of the engine's half to the worker halves."""


class Progress(msgspec.Struct):
    """The answer to `Ask`.

    Attributes:
        is_done: whether the reading has ended.
        is_lost: whether it has to begin again, since a sleep has released the half.
        error: why it failed; None if it did not.
        content: hash of the adapter.
        unknown: modules of the adapter that this rank has no matrix for.
    """

    is_done: bool = False
    is_lost: bool = False
    error: str | None = None
    content: str = ""
    unknown: list[str] = []


def requested_lora(fields: Mapping[str, Any]) -> LoRARequest:
    """Return an adapter as a program states it.

    Raises:
        RequestError: it is not one.
    """
    try:
        lora = msgspec.convert(fields, LoRARequest)
    except msgspec.ValidationError as error:
        raise RequestError(f"lora: {error}") from None
    if not lora.name:
        raise RequestError("lora.name: expected a name, got an empty one")
    if lora.id < 1:
        raise RequestError(f"lora.id: expected at least 1, got {lora.id}")
    return lora
