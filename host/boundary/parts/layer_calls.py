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
        num_tokens: int,
        is_called: Callable[[BoundWorkerHalf], bool],
        run: Callable[..., Any],
        changed: Callable[..., torch.Tensor],
        leave_out: Callable[[BoundWorkerHalf, str, str], None],
    ) -> None:
        """Call halves by functions of `WorkerParts`.

        Args:
            num_tokens: tokens of the step.
            is_called: whether one of them still is.
            run: calls a method of a half.
            changed: returns values with the rows of a half as it changed them.
            leave_out: leaves a half out of the rest of the step.
        """
        self._users, self._num_tokens, self._is_called = users, num_tokens, is_called
        self._run, self._changed, self._leave_out = run, changed, leave_out
        self._layers = {
            half: run(half, "layers", function=lambda half=half: half.half.layers)
            for half in users
            if half.overrides("added")
        }
        self._skipped: dict[int, torch.Tensor | None] = {}  # by layer

    @contextmanager
    def bound(self, hooks: LayerHooks) -> Iterator[None]:
        """Let the hooks of a model call the halves that have a method for them."""
        names = [name for name in ("embedded", "linear", "added", "skips") if self._with(name)]
        if "skips" in names and "added" not in names:
            names.append("added")
        try:
            for name in names:
                setattr(hooks, name, getattr(self, name))
            yield
        finally:
            for name in names:
                setattr(hooks, name, None)

    def _with(self, method: str) -> list[tuple[BoundWorkerHalf, list[int], StepRows]]:
        return [
            (half, indices, rows)
            for half, (indices, rows) in self._users.items()
            if half.overrides(method) and self._is_called(half)
        ]

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
        if (skipped := self.skips(layer)) is not None:
            delta.masked_fill_(skipped.to(delta.device).unsqueeze(1), 0)
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

    def skips(self, layer: int) -> torch.Tensor | None:
        """Return which tokens skip a layer, bool [tokens]; None if none does."""
        if layer not in self._skipped:
            self._skipped[layer] = None
            for half, indices, rows in self._with("skips"):
                part = self._run(half, "skips", layer, rows) if indices else None
                if part is None:
                    continue
                if not _is_mask(part, len(indices)):
                    expected = f"a bool tensor [{len(indices)}] or None"
                    self._leave_out(half, "skips", f"gave {form_of(part)}, expected {expected}")
                    continue
                whole = self._skipped[layer]
                if whole is None:
                    whole = part.new_zeros(self._num_tokens)
                whole[indices] |= part.to(whole.device)
                self._skipped[layer] = whole
        return self._skipped[layer]


def _is_mask(value: Any, count: int) -> bool:
    is_bool = isinstance(value, torch.Tensor) and value.dtype == torch.bool
    return is_bool and value.shape == (count,)


def _fits(value: Any, shape: torch.Size) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(part, torch.Tensor) and part.shape == shape for part in value)
    )
