"""Llama-like models with two types of layers: full attention, and a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hardpoint.toolkit.hf_config import short
from hardpoint.toolkit.layers import RotaryEmbedding

from .llama import FULL, SLIDING, Llama


class TypedLayers(Llama):
    """Layers with a window alternate with layers of full attention, as in `layer_types`."""

    contract = 1
    interval: ClassVar[int] = 4
    """Of a config without `layer_types`, the last of so many layers has full attention."""

    def full_attention_interval(self) -> int:
        """Return n: of n layers the last one has full attention, the others have a window."""
        return self.interval

    def types(self) -> list[str]:
        """Return each layer's type; a config without `layer_types` has them in a fixed pattern."""
        interval = self.full_attention_interval()
        return self.layer_types(
            [SLIDING if (layer + 1) % interval else FULL for layer in range(self._num_layers)]
        )

    def windows(self) -> list[int | None]:
        """Return each layer's sliding window, from `sliding_window` and its type."""
        window = self._fields.optional_whole("sliding_window")
        return [window if kind == SLIDING else None for kind in self.types()]

    def rotary_embeddings_by_type(
        self, thetas: Mapping[str, tuple[str, float]]
    ) -> list[RotaryEmbedding]:
        """Return each layer's rotary embedding, shared by the layers of a type.

        The parameters are in `rope_parameters` by type of layer. Configs without these have the
        base frequencies in separate fields. `rope_scaling` changes the ones of full attention.

        Args:
            thetas: the field with the base frequency of each type, and its default.

        Raises:
            ModelError: the parameters are not supported.
        """
        fields, stated = self._fields, self._fields.table("rope_parameters")
        if unknown := stated.keys() - {FULL, SLIDING}:
            raise fields.error(
                "rope_parameters",
                f"expected a table for {FULL} and one for {SLIDING}, got {short(min(unknown))}",
            )
        ropes = {}
        others: dict[str, Any] = {"rope_scaling": None, "original_max_position_embeddings": None}
        for kind, (theta, default) in thetas.items():
            parameters: Any = stated.get(kind) or {}
            if not isinstance(parameters, Mapping):
                raise fields.error(
                    "rope_parameters", f"{kind}: expected a table, got {short(parameters)}"
                )
            scaling = fields.table("rope_scaling") if kind == FULL else {}
            parameters = {"rope_theta": fields.number(theta, default), **parameters, **scaling}
            ropes[kind] = self.rotary_embedding(
                {**self._hf, **others, "rope_parameters": parameters}
            )
        return [ropes[kind] for kind in self.types()]
