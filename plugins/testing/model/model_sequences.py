"""A model under test, run step by step with plain attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hardpoint.plugins import ForwardBatch, Model
from hardpoint.plugins.model import Advance, Recur
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import short_repr

from . import model_rules as rules
from .sequences import QueryAttention, WholeHistory

__all__ = ["ModelSequences", "SequenceStates", "relative_difference", "summary"]


class ModelSequences:
    """Runs a model step by step, with plain attention.

    Attributes:
        changed: fields of batches that the model changed.
        keys: keys of each call of attend.
        num_attended: layers that attended in the last step.
    """

    def __init__(self, model: Model, attention: QueryAttention) -> None:
        self._model = model
        self._histories = [WholeHistory(spec, attention) for spec in model.kv_specs()]
        self._states = SequenceStates(model)
        self._lengths: dict[str, int] = {}
        self._width: int | None = None
        self.changed: list[str] = []
        self.keys: list[torch.Tensor] = []
        self.num_attended = 0

    def step(
        self,
        tokens: Mapping[str, Sequence[int]],
        positions: Sequence[int] | None = None,
        hidden: torch.Tensor | None = None,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of one step, sequence by sequence.

        Args:
            tokens: further tokens by sequence.
            positions: positions of all tokens; None gives the right ones.
            hidden: result of the previous stage, if there is one.
            num_layers: as in `ForwardBatch`.
        """
        counts = [(name, len(part)) for name, part in tokens.items()]
        flat: list[int] = []
        for name, count in counts:
            start = self._lengths.get(name, 0)
            self._lengths[name] = start + count
            flat += range(start, start + count)
        called: set[int] = set()

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            angles: torch.Tensor | None = None,
        ) -> torch.Tensor:
            self._check_call(called, layer, {"q": q, "k": k, "v": v}, len(flat))
            if self._histories[layer].spec.value_size is not None and v is not k:
                raise rules.ATTEND.violation(
                    f"forward called attend for layer {layer} with values that are not its keys, "
                    f"expected one tensor as k and v, as kv_specs has a value_size"
                )
            if angles is not None:
                for x in (q, k):
                    self._model.context.ops.rotate(x[..., : angles.shape[1]], angles)
            history = self._histories[layer]
            history.append(counts, k, v)
            self.keys.append(k.clone())
            return history.attend(counts, q).to(q.device, q.dtype)

        device = self._model.context.device
        ids = torch.tensor([token for part in tokens.values() for token in part], device=device)
        where = torch.tensor(list(positions or flat), device=device)
        before = {"token_ids": snapshot(ids), "positions": snapshot(where)}
        recur = self._states.of_step(counts)
        batch = ForwardBatch(ids, where, attend, hidden, recur=recur, num_layers=num_layers)
        hidden = self._model.forward(batch)
        after = {"token_ids": snapshot(ids), "positions": snapshot(where)}
        self.changed += [name for name in before if before[name] != after[name]]
        self._check_complete(called, num_layers)
        self._states.check_complete()
        self._check_hidden(hidden, len(flat))
        return hidden

    def _check_complete(self, called: set[int], num_layers: int | None) -> None:
        self.num_attended = len(called)
        if missing := sorted(set(range(len(self._histories))[:num_layers]) - called):
            raise rules.ATTEND.violation(
                f"forward called attend for no layer {', '.join(map(str, missing))}, kv_specs has "
                f"{len(self._histories)} layers"
            )

    def _check_call(
        self, called: set[int], layer: Any, tensors: Mapping[str, Any], tokens: int
    ) -> None:
        if not isinstance(layer, int) or not 0 <= layer < len(self._histories):
            raise rules.ATTEND.violation(
                f"forward called attend for layer {short_repr(layer)}, kv_specs has "
                f"{len(self._histories)} layers"
            )
        if layer in called:
            raise rules.ATTEND.violation(f"forward called attend for layer {layer} twice")
        called.add(layer)
        spec, context = self._histories[layer].spec, self._model.context
        device = torch.empty(0, device=context.device).device  # with its index
        for name, tensor in tensors.items():
            heads = spec.num_heads if name == "q" else spec.num_kv_heads
            shape = (tokens, heads, spec.head_size)
            if (
                not isinstance(tensor, torch.Tensor)
                or tuple(tensor.shape) != shape
                or tensor.dtype != context.dtype
                or tensor.device != device
            ):
                raise rules.ATTEND.violation(
                    f"forward called attend for layer {layer} with {name} = {summary(tensor)}, "
                    f"expected {context.dtype} {list(shape)} on {device}, by kv_specs"
                )

    def _check_hidden(self, hidden: Any, tokens: int) -> None:
        if (
            not isinstance(hidden, torch.Tensor)
            or hidden.dim() != 2
            or hidden.shape[0] != tokens
            or self._width not in (None, hidden.shape[1])
        ):
            expected = f"[{tokens}, {self._width or 'hidden'}]"
            raise rules.SHAPES.violation(f"forward returned {summary(hidden)}, expected {expected}")
        self._width = hidden.shape[1]


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the maximum difference, relative to the largest number; inf where one is NaN."""
    difference = (actual.double() - expected.double()).abs().nan_to_num(torch.inf)
    return float(difference.max() / expected.double().abs().max().clamp(min=1e-9))


def summary(value: Any) -> str:
    """Return a tensor's dtype, shape and device, or the text of another value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return short_repr(value)


class SkippingHooks:
    """Hooks by which every n-th token of a step skips some layers.

    Attributes:
        called: layers for which `added` was called.
    """

    def __init__(self, layers: Collection[int], every: int) -> None:
        """Call `added` for no layer yet."""
        self._layers, self._every = layers, every
        self.called: set[int] = set()
        self._num_tokens = 0

    def run(
        self, model: Model, sequences: ModelSequences, step: Any, *, asks: bool
    ) -> torch.Tensor:
        """Return the hidden states of a step.

        Args:
            asks: whether the model gets `hooks.skips`.
        """
        hooks, self._num_tokens = model.context.hooks, sum(map(len, step.values()))
        hooks.added, hooks.skips = self._added, self._skips if asks else None
        try:
            return sequences.step(step)
        finally:
            hooks.added = hooks.skips = None

    def _added(self, layer: int, branch: str, residual: torch.Tensor, delta: torch.Tensor) -> None:  # noqa: ARG002
        self.called.add(layer)
        if (skipped := self._skips(layer)) is not None:
            delta.masked_fill_(skipped.unsqueeze(1).to(delta.device), 0)

    def _skips(self, layer: int) -> torch.Tensor | None:
        if layer not in self._layers:
            return None
        return torch.arange(self._num_tokens) % self._every == 0


class SequenceStates:
    """Runs the recurrences of a model, all sequences of a step at once."""

    def __init__(self, model: Model) -> None:
        self._specs, self._device = model.state_specs(), model.context.device
        self._states: dict[tuple[int, str], list[torch.Tensor]] = {}
        self._called: set[int] = set()

    def of_step(self, counts: Sequence[tuple[str, int]]) -> Recur:
        """Return the recurrence of a step, of so many further tokens by sequence."""
        starts = np.cumsum([0, *(count for _, count in counts)])
        self._called.clear()

        def recur(layer: int, advance: Advance, *inputs: torch.Tensor) -> torch.Tensor:
            self._check_call(layer)
            specs, keys = self._specs[layer], [(layer, name) for name, _ in counts]
            held = [self._states.get(key) or self._new(layer) for key in keys]
            states = [torch.stack(list(tensors)) for tensors in zip(*held, strict=True)]
            output, after = advance(states, starts, *inputs)
            for spec, state in zip(specs, after, strict=True):
                shape, dtype = (len(counts), *spec.shape), getattr(torch, spec.dtype)
                if tuple(state.shape) != shape or state.dtype != dtype:
                    raise rules.RECUR.violation(
                        f"advance of layer {layer} gave a state {state.dtype} {list(state.shape)}, "
                        f"expected {dtype} {list(shape)}, by state_specs"
                    )
            if len(output) != starts[-1]:
                raise rules.RECUR.violation(
                    f"advance of layer {layer} gave {len(output)} outputs for {starts[-1]} tokens"
                )
            for row, key in enumerate(keys):
                self._states[key] = [state[row].clone() for state in after]
            return output

        return recur

    def check_complete(self) -> None:
        """Check that every layer was called in the step."""
        if missing := sorted(set(range(len(self._specs))) - self._called):
            raise rules.RECUR.violation(
                f"forward called recur for no layer {', '.join(map(str, missing))}, state_specs "
                f"has {len(self._specs)} layers"
            )

    def _new(self, layer: int) -> list[torch.Tensor]:
        return [
            torch.full(spec.shape, spec.fill, dtype=getattr(torch, spec.dtype), device=self._device)
            for spec in self._specs[layer]
        ]

    def _check_call(self, layer: Any) -> None:
        if not isinstance(layer, int) or not 0 <= layer < len(self._specs) or layer in self._called:
            raise rules.RECUR.violation(
                f"forward called recur for layer {layer!r}, expected each of the "
                f"{len(self._specs)} layers of state_specs once"
            )
        self._called.add(layer)
