"""Weights of a GPU that wait in CPU memory while an engine sleeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["MovedWeights"]


class MovedWeights:
    """The bytes of tensors, in CPU memory; the tensors have none until they are moved back.

    Tensors stay the same objects, and views of them stay views, so that what a model has bound to
    them works again afterwards. Their addresses change.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors out; if the memory is not there, all stay where they are.

        Raises:
            RuntimeError, MemoryError: CPU memory is short.
        """
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        self._held = [(storage, _copied(_bytes(storage))) for storage in storages.values()]
        for storage, _ in self._held:
            storage.resize_(0)

    def move_back(self) -> None:
        """Give the tensors memory again, with what it held.

        Raises:
            RuntimeError: the device's memory is short; it can be tried again.
        """
        while self._held:
            storage, held = self._held[-1]
            storage.resize_(len(held))
            _bytes(storage).copy_(held)
            self._held.pop()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the memory of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(memory: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory, which is pinned where that is possible: it is copied faster."""
    pinned = None
    if memory.device.type == "cuda":
        try:
            pinned = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
        except RuntimeError:  # the system limits how much may be
            pass
    copy = torch.empty(memory.shape, dtype=memory.dtype) if pinned is None else pinned
    return copy.copy_(memory)
