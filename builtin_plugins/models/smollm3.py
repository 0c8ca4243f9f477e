"""SmolLM3 (Hugging Face, 2025): the Llama architecture with some layers without positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hardpoint.toolkit.hf_config import short
from hardpoint.toolkit.layers import RotaryEmbedding

from .qwen import SlidingLayers


class SmolLM3(SlidingLayers):
    """Some layers rotate nothing (NoPE, arXiv:2305.19466), every fourth one for example."""

    contract = 1
    replayable = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }

    def rotary_embeddings(self) -> Sequence[RotaryEmbedding | None]:
        """Return the one of the config, or None for layers that rotate nothing."""
        ropes = zip(super().rotary_embeddings(), self._rotations(), strict=True)
        return [rope if rotates else None for rope, rotates in ropes]

    def sliding_layers(self) -> list[bool]:
        """Return whether each layer has the window: the layers without rotation."""
        return [not rotates for rotates in self._rotations()]

    def _rotations(self) -> list[bool]:
        fields, count = self._fields, self._num_layers
        marks = self._hf.get("no_rope_layers")
        if marks is None:
            interval = fields.whole("no_rope_layer_interval", 4)
            return [(layer + 1) % interval != 0 for layer in range(count)]
        if (
            not isinstance(marks, list)
            or len(marks) < count
            or not all(type(mark) in (int, bool) and mark in (0, 1) for mark in marks)
        ):
            raise fields.error(
                "no_rope_layers",
                f"expected {count} of 0 (the layer rotates nothing) or 1, got {short(marks)}",
            )
        return [bool(mark) for mark in marks[:count]]
