"""Qwen 2 and 3: the Llama architecture with biases on q, k and v, or a norm per head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from hardpoint.toolkit.hf_config import short

from .llama import FULL, SLIDING, Llama


class SlidingLayers(Llama):
    """Common to models with a sliding window that is optional and applies to some layers only."""

    contract = 1
    replayable = True

    def windows(self) -> list[int | None]:
        """Return each layer's sliding window, from `use_sliding_window` and `layer_types`."""
        fields = self._fields
        if not fields.flag("use_sliding_window", False):
            return [None] * self._num_layers
        window = fields.optional_whole("sliding_window")
        types = self._hf.get("layer_types")
        if types is None:
            types = [SLIDING if slides else FULL for slides in self.sliding_layers()]
        return [window if kind == SLIDING else None for kind in self.layer_types(types)]

    @abstractmethod
    def sliding_layers(self) -> list[bool]:
        """Return whether each layer has the window, of a config without `layer_types`."""


class _Qwen(SlidingLayers):
    """Common to both."""

    contract = 1
    replayable = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    }

    def sliding_layers(self) -> list[bool]:
        """Return whether each layer has the window, from `max_window_layers`."""
        limit = self._hf.get("max_window_layers", 28)
        if not isinstance(limit, int) or limit < 0:
            raise self._fields.error(
                "max_window_layers", f"expected a whole number >= 0, got {short(limit)}"
            )
        return [self.slides(layer, limit) for layer in range(self._num_layers)]

    def slides(self, layer: int, limit: int) -> bool:
        """Return whether a layer has a sliding window, of a config without `layer_types`.

        Args:
            layer: index.
            limit: `max_window_layers`.
        """
        return layer >= limit


class Qwen2(_Qwen):
    """Qwen2 and Qwen2.5 (Yang et al., 2024)."""

    contract = 1
    replayable = True

    def attention_biases(self) -> tuple[bool, bool]:
        """Return (True, False); the config has no field for it."""
        return True, False


class Qwen3(_Qwen):
    """Qwen3 (Yang et al., 2025): q and k are normalized per head."""

    contract = 1
    replayable = True
    head_norms = True
    config_defaults: ClassVar[Mapping[str, Any]] = {**_Qwen.config_defaults, "head_dim": 128}
