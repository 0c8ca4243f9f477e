"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini (Abdin et al., 2024): Llama with fused matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hardpoint.toolkit.layers import RotaryEmbedding

from .llama import Llama

_ORIGINAL = "original_max_position_embeddings"
_DEFAULT_ORIGINAL = 4096


class Phi3(Llama):
    """Checkpoints have one matrix of q, k and v, and one of the gate and up of the MLP.

    Parts of heads may be rotated, with the factors of LongRoPE: see `RotaryEmbedding`.
    """

    contract = 1
    replayable = True
    is_fused = True
    has_window = True
    rotates_part = True
    config_defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def rotary_embeddings(self) -> Sequence[RotaryEmbedding | None]:
        """Return each layer's embedding; by default, for a context that was extended from 4096."""
        fields = self._fields
        parameters = fields.rope_parameters()
        stated = (self._hf.get(_ORIGINAL), parameters.get(_ORIGINAL), _DEFAULT_ORIGINAL)
        original = next(value for value in stated if value is not None)
        return [self.rotary_embedding({**self._hf, _ORIGINAL: original})] * self._num_layers

    def attention_biases(self) -> tuple[bool, bool]:
        """Return (False, False); the architecture has none, whatever `attention_bias` is."""
        return False, False
