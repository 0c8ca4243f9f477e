"""Cohere 2 (Command R7B, Command A; Cohere, 2024): attention and the MLP side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from hardpoint.plugins import ForwardBatch
from hardpoint.toolkit.layers import RMSNorm, RotaryEmbedding

from .layer_types import TypedLayers
from .llama import DecoderLayer


class Cohere2(TypedLayers):
    """Attention and the MLP of a layer get the same normalized states, and are added together.

    Layers with a window rotate neighbors; layers of full attention rotate nothing.
    """

    contract = 1
    replayable = True
    rotates_neighbours = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }

    def norm_eps(self) -> float:
        """Return `layer_norm_eps`."""
        return self._fields.number("layer_norm_eps", 1e-5)

    def full_attention_interval(self) -> int:
        """Return `sliding_window_pattern`."""
        return self._fields.whole("sliding_window_pattern", self.interval)

    def rotary_embeddings(self) -> Sequence[RotaryEmbedding | None]:
        """Return the one of the config for layers with a window, and None for the others."""
        ropes = zip(super().rotary_embeddings(), self._windows, strict=True)
        return [None if window is None else rope for rope, window in ropes]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden], in the last stage after the final norm."""
        x = self.embed(batch.token_ids) if batch.hidden is None else batch.hidden
        angles = {rope: rope.at(batch.positions) for rope in self._my_ropes()}
        added, add = self.context.hooks.added, self.context.ops.add
        skips = self.context.hooks.skips
        for index, layer in enumerate(self._decoder_layers[: batch.num_layers]):
            number = self._my_layers[index]
            skipped = None if skips is None else skips(number)
            rope = self._ropes[number]
            h = layer.input_norm(x) if layer.input_norm is not None else x
            q, k, v = self._project(layer, h, rope)
            turns = None if rope is None else angles[rope]
            attended = layer.output(batch.attend(index, q, k, v, turns).flatten(1))
            delta = self._run_mlp(index, h, batch, skipped)
            if added is not None:
                added(number, "attention", x, attended)
            add(x, attended)
            if added is not None:
                added(number, "mlp", x, delta)
            add(x, delta)
        return self._norm(x) if self.context.parallel.is_last else x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden states [rows, hidden], in float32."""
        return super().compute_logits(hidden).mul_(self._logit_scale)

    def _check_config(self) -> None:
        super()._check_config()
        self._logit_scale = self._fields.number("logit_scale", 0.0625)
        if self._fields.flag("use_qk_norm", False):
            raise self._fields.error("use_qk_norm", "expected false, got true")

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        return dataclasses.replace(super()._decoder_layer(layer), mlp_norm=None)

    def _rms_norm(self, name: str, size: int) -> RMSNorm:
        return _MeanNorm(name, size, self._eps, self.context)


class _MeanNorm(RMSNorm):
    """Layer normalization (arXiv:1607.06450) without a bias: the mean is subtracted, too."""

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [..., size], normalized; delta is added to x first, in place."""
        if delta is not None:
            self._context.ops.add(x, delta)
        return F.layer_norm(x, self._shape, self._weight, None, self._eps)
