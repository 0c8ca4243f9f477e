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
    config_defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def rotary_embeddings(self) -> Sequence[RotaryEmbedding | None]:
        """Return each layer's embedding; by default, for a context that was extended from 4096."""
        fields = self._fields
        parameters = fields.table("rope_parameters") or fields.table("rope_scaling")
        stated = (self._hf.get(_ORIGINAL), parameters.get(_ORIGINAL), _DEFAULT_ORIGINAL)
        original = next(value for value in stated if value is not None)
        rope = RotaryEmbedding(
            self._head_size,
            self.context,
            source=self._source,
            fields={**self._hf, _ORIGINAL: original},
        )
        return [rope] * self._num_layers

    def attention_biases(self) -> tuple[bool, bool]:
        """Return (False, False); the architecture has none, whatever `attention_bias` is."""
        return False, False
