"""The formulas of operations, in float64."""

from __future__ import annotations

import math

import torch

from hardpoint.plugins import ClampedSwiGLU

EPS = 1e-5


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `Ops.rms_norm` with `EPS`."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x)."""
    return x * x.sigmoid()


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, clamped: ClampedSwiGLU) -> torch.Tensor:
    """Return the activation of gpt-oss's experts."""
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return gate * (clamped.alpha * gate).sigmoid() * (up + 1)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form."""
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Return the attention of one sequence in both directions, float64 [tokens, heads, size]."""
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    if window is not None:
        places = torch.arange(len(q), device=q.device)
        scores.masked_fill_((places - places[:, None]).abs() > window, -math.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.double())
