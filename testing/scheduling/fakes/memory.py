"""A model of the workers' KV cache: what every slot of every block holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hardpoint.plugins import EngineCoreRequest
from hardpoint.testing.scheduling.checks.names import CONTENT

_MODULUS = 2**31 - 1
_BASE = 1_000_003


def step_history(value: int, token: int) -> int:
    """Return the history hash of a history and one token more."""
    return (value * _BASE + token + 1) % _MODULUS


def histories(source: EngineCoreRequest, tokens: Sequence[int]) -> list[int]:
    """Return per position what its keys and values depend on: the tokens and features up to it."""
    value = 0
    result = []
    codes = [0] * len(tokens)
    for feature in source.features:
        code = sum(feature.identifier.encode()) + 1
        for position in range(feature.offset, min(feature.offset + feature.length, len(tokens))):
            codes[position] = code * 1_000 + position - feature.offset
    for token, code in zip(tokens, codes, strict=True):
        value = step_history(value, token + 1_000_000 * code)
        result.append(value)
    return result


class Content(NamedTuple):
    """Keys and values of one token: equal where it may be shared."""

    group: int
    position: int
    history: int
    salt: str | None
    lora: str | None


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a slot holds.

    Attributes:
        content: None where it could not be loaded, or was computed from such.
        writer: id of the request that wrote it.
        bad_since: the step whose result says that it is bad.
    """

    content: Content | None
    writer: str
    bad_since: int = 0


class Memory:
    """Slots by block and offset.

    Attributes:
        delivered: the last step whose result the scheduler has.
    """

    def __init__(self, block_size: int) -> None:
        """Begin with nothing in it."""
        self.block_size = block_size
        self.delivered = 0
        self._slots: dict[tuple[int, int], _Slot] = {}

    def write(
        self, table: Sequence[int], content: Content, writer: str, bad_since: int = 0
    ) -> None:
        """Store one token's keys and values; `bad_since` tells that they are worth nothing."""
        block, offset = divmod(content.position, self.block_size)
        stored = None if bad_since else content
        self._slots[table[block], offset] = _Slot(stored, writer, bad_since)

    def read(self, table: Sequence[int], content: Content, reader: str) -> int:
        """Check that a token's keys and values are there.

        Returns:
            0 if they are; else the step whose result will say that they could not be loaded.
        """
        block, offset = divmod(content.position, self.block_size)
        slot = self._slots.get((table[block], offset))
        where = f"position {content.position} of {reader!r}, in block {table[block]},"
        if slot is None:
            raise CONTENT.broken(f"{where} is read, but nothing was ever written there")
        if slot.bad_since:
            if slot.bad_since <= self.delivered:
                raise CONTENT.broken(
                    f"{where} is read, which could not be loaded or was computed from what could "
                    f"not be, as the result of step {slot.bad_since} said",
                    "rewind who holds an invalid block, discard it, and compute it anew",
                )
            return slot.bad_since
        if slot.content != content:
            raise CONTENT.broken(f"{where} {_difference(slot, content)}")
        return 0

    def clear(self) -> None:
        """Take it that nothing is worth anything."""
        self._slots.clear()


def _difference(slot: _Slot, wanted: Content) -> str:
    there = slot.content
    assert there is not None
    if there.salt != wanted.salt:
        return f"has cache salt {wanted.salt!r}, but the block is of salt {there.salt!r}"
    if there.lora != wanted.lora:
        return f"has adapter {wanted.lora!r}, but the block is of adapter {there.lora!r}"
    if there.group != wanted.group:
        return f"is read in group {wanted.group}, but the block is of group {there.group}"
    if there.position != wanted.position:
        return f"is read, but the block holds position {there.position} of {slot.writer!r}"
    return f"is read, but the block holds another history, which {slot.writer!r} wrote"
