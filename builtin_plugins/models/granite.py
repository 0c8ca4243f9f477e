"""Granite 3 (IBM, 2024): the Llama architecture with four factors."""

from __future__ import annotations

import torch

from hardpoint.plugins import ModelError
from hardpoint.toolkit.hf_config import LARGEST_FLOAT

from .llama import Llama


class Granite(Llama):
    """Granite: scales the embedding, the scores of attention, the logits and the residual branches.

    The hidden states here are the model's, divided by `residual_multiplier` m: a layer then
    adds its results as they are. The norms divide by the size of the hidden states again, so that
    their eps is divided by m^2, and nothing else changes. No weight is scaled: weights of low-bit
    matrices cannot be, and others would be rounded once more.
    """

    contract = 1
    replayable = True
    changes_before_scale = True

    def norm_eps(self) -> float:
        """Return the eps of the config, of hidden states divided by `residual_multiplier`."""
        eps, multiplier = super().norm_eps(), self._multiplier()
        if eps > LARGEST_FLOAT * multiplier * multiplier:
            raise self._too_small(f"so that rms_norm_eps {eps} / residual_multiplier^2")
        return eps / multiplier**2

    def embedding_scale(self) -> float:
        """Return `embedding_multiplier`, of hidden states divided by `residual_multiplier`."""
        scale, multiplier = self._fields.number("embedding_multiplier", 1.0), self._multiplier()
        if scale > LARGEST_FLOAT * multiplier:
            raise self._too_small(f"so that embedding_multiplier {scale} / residual_multiplier")
        return scale / multiplier

    def attention_scale(self) -> float:
        """Return `attention_multiplier`."""
        return self._attention_multiplier

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden states [rows, hidden], in float32."""
        return super().compute_logits(hidden).div_(self._logits_scaling)

    def _check_config(self) -> None:
        super()._check_config()
        self._logits_scaling = self._fields.number("logits_scaling", 1.0)
        self._attention_multiplier = self._fields.number("attention_multiplier", 1.0)

    def _too_small(self, requirement: str) -> ModelError:
        expected = f"expected a number {requirement} is finite in float32"
        return self._fields.error("residual_multiplier", f"{expected}, got {self._multiplier()}")

    def _multiplier(self) -> float:
        return self._fields.number("residual_multiplier", 1.0)
