"""Checks of tensors that plugins get and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class HandedOver:
    """Snapshot of a tensor's layout before a plugin gets it, to check the plugin's result.

    A plugin may edit the values. If it resizes or transposes the tensor, or puts other memory
    under it, the tensor agrees with itself and with a result that is the same object, so it is
    compared with its layout before the call.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._before = _layout(tensor)

    def result(self, result: Any) -> torch.Tensor:
        """Return a plugin's result, copied if its rows are not laid out one after the other.

        Raises:
            TypeError: it is not a tensor.
            ValueError: it is not as the tensor that was handed over: dense, of its shape, dtype
                and device; or the plugin changed the layout or the memory of that one.
        """
        tensor: torch.Tensor = self._tensor
        after = _layout(tensor)
        if after != self._before:
            raise ValueError(_difference(self._before, after))
        if result is not tensor:
            if not isinstance(result, type(tensor)):
                raise TypeError(f"expected a tensor, got {type(result).__name__}")
            for attribute in ("shape", "dtype", "device", "layout"):
                expected, got = getattr(tensor, attribute), getattr(result, attribute)
                if got != expected:
                    raise ValueError(f"expected logits of {attribute} {expected}, got {got}")
            tensor = result.detach().contiguous()
        return tensor


_PARTS = ("shape", "strides", "dtype", "device", "memory", "memory's size")


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.data_ptr(),
        storage.nbytes(),
    )


def _difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    differing = [part for part, old, new in zip(_PARTS, before, after, strict=True) if old != new]
    return (
        f"it changed the {', '.join(differing)} of the logits that it was given (now {after[2]} "
        f"{list(after[0])}); only their values may be edited in place"
    )
