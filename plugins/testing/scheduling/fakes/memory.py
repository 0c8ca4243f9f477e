"""A model of the worker's KV cache: the content of every slot of every block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hardpoint.plugins import EngineCoreRequest
from hardpoint.testing.scheduling.rules import KV_CONTENT

_MODULUS = 2**31 - 1
_BASE = 1_000_003


def extend_history_hash(value: int, token: int) -> int:
    """Return the history hash after one more token."""
    return (value * _BASE + token + 1) % _MODULUS


def history_hashes(source: EngineCoreRequest, tokens: Sequence[int]) -> list[int]:
    """Return per position a hash of the tokens and features that its keys and values depend on."""
    value = 0
    result = []
    codes = [0] * len(tokens)
    for feature in source.features:
        code = sum(feature.identifier.encode()) + 1
        for position in range(feature.offset, min(feature.offset + feature.length, len(tokens))):
            codes[position] = code * 1_000 + position - feature.offset
    for token, code in zip(tokens, codes, strict=True):
        value = extend_history_hash(value, token + 1_000_000 * code)
        result.append(value)
    return result


class KVContent(NamedTuple):
    """The keys and values of one token; equal contents may share a slot."""

    group: int
    position: int
    history: int
    salt: str | None
    lora: str | None


@dataclass(frozen=True, slots=True)
class _Slot:
    """The content of a slot.

    Attributes:
        content: None if it failed to load, or was computed from content that did.
        writer: id of the request that wrote it.
        invalid_since: the step with a result that reports it as invalid; 0 if it is valid.
    """

    content: KVContent | None
    writer: str
    invalid_since: int = 0


class KVMemory:
    """The slots of all blocks, by block and offset.

    Attributes:
        last_delivered_step: the newest step with a result that the scheduler got.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.last_delivered_step = 0
        self._slots: dict[tuple[int, int], _Slot] = {}

    def write(
        self, table: Sequence[int], content: KVContent, writer: str, invalid_since: int = 0
    ) -> None:
        """Store one token's keys and values; a non-zero `invalid_since` marks them as invalid."""
        block, offset = divmod(content.position, self.block_size)
        stored = None if invalid_since else content
        self._slots[table[block], offset] = _Slot(stored, writer, invalid_since)

    def read(self, table: Sequence[int], content: KVContent, reader: str) -> int:
        """Check that a slot holds a token's keys and values.

        Returns:
            0 if it does; else the step with the result that will report them as not loaded.

        Raises:
            Violation: it holds something else.
        """
        block, offset = divmod(content.position, self.block_size)
        slot = self._slots.get((table[block], offset))
        where = f"position {content.position} of {reader!r}, in block {table[block]},"
        if slot is None:
            raise KV_CONTENT.violation(f"{where} is read, but was never written")
        if slot.invalid_since:
            if slot.invalid_since <= self.last_delivered_step:
                raise KV_CONTENT.violation(
                    f"{where} is read, but it could not be loaded, or was computed from content "
                    f"that could not be, as the result of step {slot.invalid_since} reported",
                    "rewind requests that hold an invalid block, discard it, and compute it again",
                )
            return slot.invalid_since
        if slot.content != content:
            raise KV_CONTENT.violation(f"{where} {_difference(slot, content)}")
        return 0

    def forget(self, blocks: Collection[int]) -> None:
        """Empty the slots of some blocks."""
        self._slots = {at: slot for at, slot in self._slots.items() if at[0] not in blocks}

    def clear(self) -> None:
        """Empty all slots."""
        self._slots.clear()


def _difference(slot: _Slot, wanted: KVContent) -> str:
    stored = slot.content
    assert stored is not None
    if stored.salt != wanted.salt:
        return f"has cache salt {wanted.salt!r}, but the block has salt {stored.salt!r}"
    if stored.lora != wanted.lora:
        return f"has adapter {wanted.lora!r}, but the block has adapter {stored.lora!r}"
    if stored.group != wanted.group:
        return f"is read in group {wanted.group}, but the block belongs to group {stored.group}"
    if stored.position != wanted.position:
        return f"is read, but the block holds position {stored.position} of {slot.writer!r}"
    return f"is read, but the block holds another history, which {slot.writer!r} wrote"
