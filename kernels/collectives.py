"""Collectives between the ranks of one host, through memory that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from . import cpu
from .shared_memory import Region, RegionSession, allocate, ring_size

__all__ = ["SUMMED", "Group", "allocate_group"]

SUMMED = (
    *(torch.bfloat16, torch.float32, torch.float16, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
"""Dtypes that `all_reduce` sums, by their number in kernels/src/collectives.h."""

_OTHERS = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (*SUMMED, *_OTHERS)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_UNKNOWN = len(_DTYPES)  # other dtypes are moved, not told apart
_OPERATIONS = ("", "all_reduce", "all_gather", "all_to_all", "broadcast", "send")


def allocate_group(size: int, slot_bytes: int, ring_bytes: int) -> int:
    """Allocate the memory of a group.

    Args:
        size: number of ranks.
        slot_bytes: size of the pieces in which large tensors are exchanged, at least 4096.
        ring_bytes: maximum size of what a rank has sent to another that has not received it;
            rounded up to a power of two.

    Returns:
        Its descriptor, which the caller closes once all ranks have opened it.

    Raises:
        KernelsUnavailableError: the compiled kernels are not there.
        NoMemoryError: there is too little memory.
    """
    library, ring = cpu.load(), ring_size(ring_bytes)
    slot = max(slot_bytes, 4096) // 64 * 64
    num_bytes = library.function("group_bytes", None)(size, slot, ring)
    descriptor = allocate(num_bytes, f"a group of {size} ranks")
    try:
        region = Region(descriptor)
        library.function("group_create", None)(region.address, size, slot, ring)
        region.close()
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Group:
    """A rank of a group. Tensors are contiguous, on the CPU; no call checks that.

    Calls fail with an AbortedError once the group is aborted, or another rank has ended.
    """

    def __init__(self, descriptor: int, rank: int, names: Sequence[str]) -> None:
        """Join a group; `watch` once all ranks have joined.

        Args:
            descriptor: descriptor of the group's memory; it may be closed afterwards.
            rank: this one.
            names: names of all ranks, for messages.
        """
        library, region = cpu.load(), Region(descriptor)
        try:
            if region.num_members != len(names):
                raise ValueError(
                    f"names: expected the names of {region.num_members} ranks, got {len(names)}"
                )
            self._session = RegionSession(library, region, rank, names, _note_text)
        except BaseException:
            region.close()
            raise
        self._rank, self._size = rank, len(names)
        self._functions = {
            name: library.function(f"group_{name}", None, releases=True)
            for name in (*_OPERATIONS[1:], "recv")
        }

    def watch(self) -> None:
        """Watch the processes of the other ranks from now on."""
        self._session.watch()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by the sum of the x of all ranks, and return it."""
        self._call("all_reduce", x.data_ptr(), x.nbytes, _code(x))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [ranks, *x.shape], the x of each rank."""
        result = x.new_empty((self._size, *x.shape))
        self._call("all_gather", x.data_ptr(), result.data_ptr(), x.nbytes, _code(x))
        return result

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return row i of x [ranks, ...] from each rank, for this rank i."""
        result, row = torch.empty_like(x), x.nbytes // self._size
        self._call("all_to_all", x.data_ptr(), result.data_ptr(), row, _code(x))
        return result

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Replace x by the tensor of a rank, and return it."""
        self._call("broadcast", x.data_ptr(), x.nbytes, _code(x), source)
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send x to another rank; x may be changed afterwards."""
        self._call("send", x.data_ptr(), x.nbytes, _code(x), destination)

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Replace x by the tensor that another rank has sent, and return it."""
        self._call("recv", x.data_ptr(), x.nbytes, _code(x), source)
        return x

    def abort(self, reason: str) -> None:
        """Let all calls of all ranks fail. For any thread."""
        self._session.abort(reason)

    def close(self) -> None:
        """Leave the group."""
        self._session.close()

    def _call(self, name: str, *arguments: int) -> None:
        self._session.call(self._functions[name], *arguments)


def _code(x: torch.Tensor) -> int:
    return _CODES.get(x.dtype, _UNKNOWN)


def _note_text(note: int) -> str:
    """Return the call of a rank, from the note that the ranks compare."""
    operation, root, code = note >> 60, note >> 52 & 0xFF, note >> 44 & 0xFF
    name = _OPERATIONS[operation]
    if name == "broadcast":
        name = f"broadcast from rank {root}"
    dtype = str(_DTYPES[code]).removeprefix("torch.") if code < _UNKNOWN else "another dtype"
    verb = "sends or receives" if name == "send" else f"called {name} with"
    return f"{verb} {note & (1 << 44) - 1} bytes of {dtype}"
