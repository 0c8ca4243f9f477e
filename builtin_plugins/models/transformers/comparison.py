"""Compare attention through our backends with attention of transformers itself."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hardpoint.plugins import KVSpec, ModelContext, ModelError

from .attention import SharedStep, layer_of, observing

_TOKENS = 12
_LARGEST = 1e-4
"""Of differences of attention in float32, per size of the result."""
_SHARES = {torch.float32: 1e-3, torch.float64: 1e-3}
_SHARE = 0.1
"""Of differences of all logits, of their length; in dtypes of less precision."""
_MIXED = 0.01
"""The same of each token, of the prompts in another order: their rows are the same, so that
roundings are."""

_TINY = 1e-20

Hidden = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Attention = Callable[[KVSpec, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class MixedTokensError(ModelError):
    """A prompt has other results in a batch with another one."""


def compare(
    model: PreTrainedModel,
    step: SharedStep,
    hidden: Hidden,
    logits: Callable[[torch.Tensor], torch.Tensor],
    context: ModelContext,
    attention: Attention | None = None,
) -> None:
    """Compare attention layer by layer in float32, then the logits of two prompts in one batch.

    These are compared with the states of each alone, and of the prompts in another order.

    Args:
        model: the modules, with weights.
        step: data that their attention layers share.
        hidden: returns hidden states of token ids and positions.
        logits: returns logits of hidden states.
        context: the context of the model.
        attention: computes the attention of one sequence; by default it is causal.

    Raises:
        ModelError: they differ: the modules use something that attention does not get, or mix the
            tokens of prompts.
    """
    device, length = context.device, min(_TOKENS, context.max_model_len)
    ids = torch.arange(2 * length, device=device) * 7919 % context.config.vocab_size
    positions = torch.arange(length, device=device)
    first, second = ids[:length], ids[length:]
    attention = attention or attend
    with observing(model, _Compared(model, attention)):
        expected = torch.cat([logits(hidden(part, positions)) for part in (first, second)])
    step.attend = _Reference(model, length, attention)
    both, swapped = (hidden(x, positions.repeat(2)) for x in (ids, ids.roll(length)))
    step.attend = None
    actual, other = logits(both), logits(swapped).roll(length, 0)
    shares = (actual - expected).norm() / expected.norm().clamp_min(_TINY)
    limit = _SHARES.get(context.dtype, _SHARE)
    _check(shares, limit, "than eager attention of transformers gives each", context)
    shares = (other - actual).norm(dim=-1) / actual.norm(dim=-1).clamp_min(_TINY)
    _check(shares, _SHARES.get(context.dtype, _MIXED), "than in another order", context)


def check_classes(actual: torch.Tensor, expected: torch.Tensor, context: ModelContext) -> None:
    """Compare the logits of classes with the logits of transformers.

    Raises:
        ModelError: they differ: a head reads something besides the vector of a prompt.
    """
    share = float((actual - expected).norm() / expected.norm().clamp_min(_TINY))
    if not share <= _SHARES.get(context.dtype, _SHARE):  # NaN too
        raise ModelError(
            f"model: {context.config.architecture}: the logits of its classes differ from "
            f"transformers by {share:.2g} of their length: its head reads something besides the "
            "vector of a prompt, so that it cannot run through transformers"
        )


def _check(shares: torch.Tensor, limit: float, than: str, context: ModelContext) -> None:
    """Check differences of the logits of two prompts in one batch.

    Args:
        shares: lengths of differences, per length of the logits.
        limit: largest share that roundings may make.
        than: basis of the comparison.
    """
    share = float(shares.max())
    if not share <= limit:  # NaN too
        raise MixedTokensError(
            f"model: {context.config.architecture}: two prompts in one batch have other logits "
            f"{than}, by {share:.2g} of their length: its modules mix tokens besides attention, so "
            "that it cannot run through transformers"
        )


class _Compared:
    """Compares the attention of each layer with its own module, in float32."""

    def __init__(self, model: PreTrainedModel, attention: Attention) -> None:
        self._name, self._attention = type(model).__name__, attention

    def mask(self, mask: torch.Tensor, function: Any, window: int | None) -> None:
        """Ignore a mask."""

    def attended(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Return the result of the module's own attention.

        Raises:
            ModelError: the attention of the layer's spec differs.
        """
        layer, dtype = layer_of(module), q.dtype
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise ModelError(
                f"model: {self._name}, layer {layer.path}: {type(module).__module__} has no eager "
                "attention to compare with"
            )
        q, k, v = q.float(), k.float(), v.float()
        mask = None if mask is None else mask.float()
        expected: torch.Tensor = eager(module, q, k, v, mask, **arguments)[0]
        actual = self._attention(layer.spec, *(x[0].transpose(0, 1) for x in (q, k, v)))[None]
        largest = float((actual - expected).abs().max())
        if not largest <= _LARGEST * max(1.0, float(expected.abs().max())):
            raise ModelError(
                f"model: {self._name}, layer {layer.path}: eager attention of transformers differs "
                f"by {largest:.3g} from the observed settings, {layer.spec}: it uses "
                f"something else besides ({', '.join(_given(arguments))})"
            )
        return expected.to(dtype)


def _given(arguments: dict[str, Any]) -> list[str]:
    return sorted(name for name, value in arguments.items() if value is not None)


def attend(
    spec: KVSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, both_ways: bool = False
) -> torch.Tensor:
    """Return attention [tokens, heads, size of v] of one sequence, in the dtype of q.

    Args:
        spec: parameters of its layer.
        q: queries [tokens, heads, size].
        k: keys.
        v: values.
        both_ways: attention is bidirectional.
    """
    groups = spec.num_heads // spec.num_kv_heads
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    places = torch.arange(len(q), device=q.device)
    distance = places[:, None] - places[None, :]
    distance = distance.abs() if both_ways else distance
    seen = distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    scores = scores.masked_fill(~seen, -math.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype).view(-1, 1, 1)
        scores = torch.cat((scores, sinks.expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


class _Reference:
    """Attention of a step of prompts of one length, in float32."""

    def __init__(self, model: PreTrainedModel, length: int, attention: Attention) -> None:
        layers = [layer_of(m) for m in model.modules() if hasattr(m, "_hardpoint_layer")]
        self._specs = {layer.index: layer.spec for layer in layers}
        self._length, self._attention = length, attention

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None = None,  # noqa: ARG002 - modules rotate themselves
    ) -> torch.Tensor:
        parts = zip(*(torch.split(x.float(), self._length) for x in (q, k, v)), strict=True)
        return torch.cat([self._attention(self._specs[layer], *part) for part in parts]).to(q.dtype)
