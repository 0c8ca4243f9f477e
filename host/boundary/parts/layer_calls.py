"""The calls of worker halves from the layers of a model, in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hardpoint.plugins.model import LayerHooks
from hardpoint.plugins.model.forward import Branch
from hardpoint.plugins.worker_half import StepRows

from .bound_half import BoundWorkerHalf, form_of

Users = Mapping[BoundWorkerHalf, tuple[list[int], StepRows]]
"""The tokens of each half's requests: their indices, and whose they are."""


class LayerCalls:
    """Calls halves with the tokens of their own requests, and writes back their changes."""

    def __init__(
        self,
        users: Users,
        is_called: Callable[[BoundWorkerHalf], bool],
        run: Callable[..., Any],
        changed: Callable[..., torch.Tensor],
        leave_out: Callable[[BoundWorkerHalf, str, str], None],
    ) -> None:
        """Call halves by functions of `WorkerParts`.

        Args:
            is_called: whether one of them still is.
            run: calls a method of a half.
            changed: returns values with the rows of a half as it changed them.
            leave_out: leaves a half out of the rest of the step.
        """
        self._users, self._is_called = users, is_called
        self._run, self._changed, self._leave_out = run, changed, leave_out
        self._layers = {
            half: run(half, "layers", function=lambda half=half: half.half.layers)
            for half in users
            if half.overrides("added")
        }

    @contextmanager
    def bound(self, hooks: LayerHooks) -> Iterator[None]:
        """Let the hooks of a model call the halves that have a method for them."""
        names = [name for name in ("embedded", "linear", "added") if list(self._with(name))]
        try:
            for name in names:
                setattr(hooks, name, getattr(self, name))
            yield
        finally:
            for name in names:
                setattr(hooks, name, None)

    def _with(self, method: str) -> Iterator[tuple[BoundWorkerHalf, list[int], StepRows]]:
        for half, (indices, rows) in self._users.items():
            if half.overrides(method) and self._is_called(half):
                yield half, indices, rows

    def embedded(self, values: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens as the halves change them."""
        for half, indices, rows in self._with("embedded"):
            values = self._changed(half, "embedded", values, indices, rows)
        return values

    def linear(
        self, parts: Sequence[tuple[str, int]], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Return the product of a linear layer as the halves change it."""
        for half, indices, rows in self._with("linear"):
            inputs = x if len(indices) == len(x) else x[indices]
            y = self._changed(half, "linear", y, indices, rows, before=(parts, inputs))
        return y

    def added(
        self, layer: int, branch: Branch, residual: torch.Tensor, delta: torch.Tensor
    ) -> None:
        """Let halves change a residual stream and the summand of a layer, in place."""
        for half, indices, rows in self._with("added"):
            layers = self._layers[half]
            if not indices or not (layers is None or layer in layers):
                continue
            is_all = len(indices) == len(delta)
            pair = (residual, delta) if is_all else (residual[indices], delta[indices])
            result = self._run(half, "added", layer, branch, *pair, rows)
            if result is None:
                continue
            if not _fits(result, pair[1].shape):
                expected = f"two tensors {list(pair[1].shape)} or None"
                self._leave_out(half, "added", f"gave {form_of(result)}, expected {expected}")
                continue
            for values, changed in zip((residual, delta), result, strict=True):
                if is_all:
                    values.copy_(changed)
                else:
                    values[indices] = changed.to(values.dtype)


def _fits(value: Any, shape: torch.Size) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(part, torch.Tensor) and part.shape == shape for part in value)
    )
