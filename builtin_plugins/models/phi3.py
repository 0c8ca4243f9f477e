"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini (Abdin et al., 2024): Llama with fused matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .llama import Llama


class Phi3(Llama):
    """Checkpoints have one matrix of q, k and v, and one of the gate and up of the MLP.

    Parts of heads may be rotated, with the factors of LongRoPE: see `RotaryEmbedding`.
    """

    contract = 1
    replayable = True
    is_fused = True
    config_defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def attention_biases(self) -> tuple[bool, bool]:
        """Return (False, False); the architecture has none, whatever `attention_bias` says."""
        return False, False
