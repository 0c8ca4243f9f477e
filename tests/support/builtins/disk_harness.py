"""Stores of the kind "disk" with small blocks; their content follows from their number."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from hardpoint.builtin_plugins.kv_stores.disk import DiskStore
from hardpoint.builtin_plugins.kv_stores.disk_index import index_bytes, table_size
from hardpoint.plugins import KVStoreContext

SIZES = (128, 3000, 4000)
SLOT = 8192
"""Bytes of such a block in a slab."""


def open_disk(
    path: Path, blocks: int = 8, faults=None, sizes=SIZES, report_evicted=lambda _: None, **options
):
    """Return a store with room for some blocks; faults are appended to a list."""
    size_bytes = size_for(blocks, -(-sum(sizes) // 4096) * 4096)
    return DiskStore(
        KVStoreContext(
            name="disk",
            options=DiskStore.Options(path=str(path), **({"size_bytes": size_bytes} | options)),
            sizes=sizes,
            identity="00" * 32,
            report_evicted=report_evicted,
            report_fault=[].append if faults is None else faults.append,
        )
    )


def size_for(blocks: int, slot: int = SLOT) -> int:
    """Return the size of a store for some blocks, with its index."""
    return blocks * slot + index_bytes(table_size(blocks))


def key(number: int) -> bytes:
    """Return the key of a block."""
    return hashlib.sha256(b"%d" % number).digest()


def block(number: int, sizes=SIZES) -> list[memoryview]:
    """Return the content of a block."""
    part = hashlib.sha512(b"block %d" % number).digest()
    return [memoryview((part * (size // 64 + 1))[:size]).toreadonly() for size in sizes]


def keep(store: DiskStore, number: int) -> bool:
    """Store a block."""
    return store.store(key(number), block(number))


def has(store: DiskStore, number: int) -> bool:
    """Load a block; return whether it was there. It must be the right one."""
    buffer = [memoryview(bytearray(len(part))) for part in block(number)]
    if not store.load(key(number), buffer):
        return False
    assert [bytes(part) for part in buffer] == [bytes(part) for part in block(number)], number
    return True


def kept(store: DiskStore, numbers) -> list[int]:
    """Return which blocks are there; a lookup returns the same."""
    present = [number for number in numbers if has(store, number)]
    answers = store.lookup([key(number) for number in numbers])
    assert [n for n, answer in zip(numbers, answers, strict=True) if answer] == present
    return present


def descriptors() -> set[str]:
    """Return the open file descriptors of this process; garbage may close some at any time."""
    return set(os.listdir("/proc/self/fd"))


def run_killed(action: Callable[[], None], line: int) -> bool:
    """Run an action in a process that is killed before it runs the n-th line of the store's code.

    Returns:
        Whether it was killed; False if the action has fewer lines.
    """
    child = os.fork()
    if child:
        _child, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or status == 0, "the action failed"
        return os.WIFSIGNALED(status)
    lines = 0

    def trace(frame, event, _arg):
        nonlocal lines
        if "kv_stores/disk" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    code = 1
    try:
        sys.settrace(trace)
        action()
        code = 0
    finally:
        sys.settrace(None)
        os._exit(code)
