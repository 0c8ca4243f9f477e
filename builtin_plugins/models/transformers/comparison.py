"""A step with attention as backends get it, compared with that of transformers itself."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hardpoint.plugins import KVSpec, ModelContext, ModelError

from .attention import NAME, Step, layer_of, observing, use

_TOKENS = 12
_LARGEST = 1e-4
"""Of differences of attention in float32, per size of the result."""
_SHARES = {torch.float32: 1e-3, torch.float64: 1e-3}
_SHARE = 0.1
"""Of differences of all logits, of their length; in dtypes of less precision."""

Hidden = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def compare(
    model: PreTrainedModel,
    step: Step,
    hidden: Hidden,
    logits: Callable[[torch.Tensor], torch.Tensor],
    context: ModelContext,
) -> None:
    """Compare attention layer by layer in float32, then the logits of two prompts in one batch.

    Args:
        model: the modules, with weights.
        step: what their attention layers share.
        hidden: returns hidden states of token ids and positions.
        logits: returns logits of hidden states.
        context: the context of the model.

    Raises:
        ModelError: they differ: the modules use something that attention does not get, or mix the
            tokens of prompts.
    """
    device, length = context.device, min(_TOKENS, context.max_model_len)
    ids = torch.arange(2 * length, device=device) * 7919 % context.config.vocab_size
    positions = torch.arange(length, device=device)
    first, second = ids[:length], ids[length:]
    with observing(model, _Compared(model)):
        hidden(first, positions)
    use(model, "eager")
    try:
        expected = torch.cat([logits(hidden(part, positions)) for part in (first, second)])
    finally:
        use(model, NAME)
    step.attend = _Reference(model, length)
    found = logits(hidden(ids, positions.repeat(2)))
    step.attend = None
    share = float((found - expected).norm() / expected.norm().clamp_min(1e-20))
    if not share <= _SHARES.get(context.dtype, _SHARE):  # NaN too
        largest = float((found - expected).abs().max())
        raise ModelError(
            f"model: {context.config.architecture}: two prompts in one batch have other logits "
            f"than eager attention of transformers gives each, by up to {largest:.3g} "
            f"({share:.2g} of their length): its modules mix tokens besides attention, so that it "
            "cannot run through transformers"
        )


class _Compared:
    """Compares the attention of each layer with that of its own module, in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._name = type(model).__name__

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
        found = attend(layer.spec, *(x[0].transpose(0, 1) for x in (q, k, v))).unsqueeze(0)
        largest = float((found - expected).abs().max())
        if not largest <= _LARGEST * max(1.0, float(expected.abs().max())):
            raise ModelError(
                f"model: {self._name}, layer {layer.path}: eager attention of transformers differs "
                f"by {largest:.3g} from what it was observed to need, {layer.spec}: it uses "
                f"something else besides ({', '.join(_given(arguments))})"
            )
        return expected.to(dtype)


def _given(arguments: dict[str, Any]) -> list[str]:
    return sorted(name for name, value in arguments.items() if value is not None)


def attend(spec: KVSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention [tokens, heads, size of v] of one sequence, in the dtype of q."""
    groups = spec.num_heads // spec.num_kv_heads
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    places = torch.arange(len(q), device=q.device)
    distance = places[:, None] - places[None, :]
    seen = distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


class _Reference:
    """Attention of a step of prompts of one length, in float32."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        layers = [layer_of(m) for m in model.modules() if hasattr(m, "_hardpoint_layer")]
        self._specs = {layer.index: layer.spec for layer in layers}
        self._length = length

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None = None,  # noqa: ARG002 - modules rotate themselves
    ) -> torch.Tensor:
        """Return the result of attention, shaped as q."""
        parts = zip(*(torch.split(x.float(), self._length) for x in (q, k, v)), strict=True)
        return torch.cat([attend(self._specs[layer], *part) for part in parts]).to(q.dtype)
