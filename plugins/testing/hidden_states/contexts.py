"""Contexts of taps and poolers under test: operations, and the unembedding of a random model."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.testing.engine_access import load_ops


def context_fields(hidden_size: int, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a context that come from the model."""
    ops = load_ops(dtype)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab_size, hidden_size, generator=generator).to(dtype)
    unembed = ops.linear(ops.pack(weight), (vocab_size, hidden_size))
    return {"ops": ops, "unembed": lambda values: unembed(values.to(dtype)).float()}
