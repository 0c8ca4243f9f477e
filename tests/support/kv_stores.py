"""KV stores by hand, and blocks for them."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest

from hardpoint.plugins import KVStore, KVStoreContext
from hardpoint.plugins.kv_store import BlockBuffer
from hardpoint.testing import ScriptedClock

SIZES = (128, 1000, 24)


def open_store(cls: type[KVStore], *, name: str = "kept", sizes=SIZES, context=(), **options):
    """A store of a class, with options."""
    return cls(
        KVStoreContext(
            name=name,
            options=cls.Options(**options),
            sizes=sizes,
            identity="ab" * 32,
            **dict(context),
        )
    )


def scripted_clock(patch: pytest.MonkeyPatch, *modules: str) -> ScriptedClock:
    """Return a clock that tests advance; modules of the built-in plugins use it."""
    clock = ScriptedClock(now=1000.0)
    replaced = SimpleNamespace(**{**vars(time), "monotonic": clock})
    for module in modules:
        patch.setattr(f"hardpoint.builtin_plugins.{module}.time", replaced)
    return clock


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block_of(number: int, sizes=SIZES) -> BlockBuffer:
    """The block that is stored under a key, read-only."""
    return BlockBuffer(memoryview(random.Random(number).randbytes(sum(sizes))), sizes)


def room(sizes=SIZES) -> BlockBuffer:
    """A buffer to load into."""
    return BlockBuffer(memoryview(bytearray(sum(sizes))), sizes)


def loaded(store: KVStore, number: int, sizes=SIZES) -> bool:
    """Whether a block is there; if so, it is checked."""
    buffer = room(sizes)
    is_there = store.load(key_of(number), buffer)
    assert isinstance(is_there, bool)
    right = buffer.whole == block_of(number, sizes).whole
    assert right or not is_there, f"another block under key {number}"
    return is_there


def keep(store: KVStore, *numbers: int) -> None:
    for number in numbers:
        assert store.store(key_of(number), block_of(number)) is True, f"block {number} not kept"


def found(store: KVStore, *numbers: int) -> list[bool]:
    return list(store.lookup([key_of(number) for number in numbers]))
