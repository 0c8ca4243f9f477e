"""Checks that the plugins share which run this package's C++ kernels."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict

import torch

from hardpoint.kernels import cpu
from hardpoint.plugins import AttentionContext, ModelError, OpsContext

_LARGE = 1 << 20  # bytes from which on results get memory of their own


def load_kernels(context: AttentionContext | OpsContext, path: str) -> cpu.Library:
    """Load the kernels for a component.

    Args:
        context: the component's.
        path: path in the configuration, which names the component.

    Raises:
        ModelError: they cannot run here, or there are none for the dtype.
    """
    if context.dtype not in cpu.DTYPES:
        raise ModelError(
            f"{path}: {context.name!r} computes in {', '.join(cpu.DTYPES.values())}, the model's "
            f"dtype is {str(context.dtype).removeprefix('torch.')}"
        )
    try:
        return cpu.load()
    except cpu.KernelsUnavailableError as cause:
        raise ModelError(f"{path}: {context.name!r} cannot be used: {cause}") from cause


def check_tensors(dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    """Reject tensors that kernels would read at a wrong address.

    Raises:
        TypeError: one is not on the CPU, or of another dtype.
    """
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype is not dtype:
            raise TypeError(
                f"expected a {dtype} tensor on cpu, got {tensor.dtype} {list(tensor.shape)} on "
                f"{tensor.device}"
            )


def check_rows(tensor: torch.Tensor) -> None:
    """Reject rows with a stride between elements.

    Raises:
        ValueError: they are not.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"expected rows with elements side by side, got a tensor {list(tensor.shape)} "
            f"with the strides {tensor.stride()}"
        )


class Results:
    """Memory of large results, which is used again when they are gone.

    The system's allocator gives large pieces back at once, so that each step would ask for all of
    its pages again.
    """

    def __init__(self, library: cpu.Library) -> None:
        """`library`: kernels that write the results. Recorded operations keep their results."""
        self._library = library
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._lent: dict[int, weakref.ref[memoryview]] = {}  # by address

    def empty(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with undefined elements."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < _LARGE or self._library.recording is not None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = 1 << (size - 1).bit_length()
        free = self._free[size]
        memory = free.pop() if free else cpu.allocate_pages(size)
        view = memoryview(memory)
        tensor = torch.frombuffer(view, dtype=dtype, count=count)
        place, lent = tensor.data_ptr(), self._lent

        def take_back(_view: weakref.ref[memoryview]) -> None:
            del lent[place]
            free.append(memory)

        lent[place] = weakref.ref(view, take_back)  # dies with the tensor
        return tensor.view(shape)
