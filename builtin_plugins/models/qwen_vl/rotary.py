"""Rotary embeddings of positions with several axes (M-RoPE; Wang et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hardpoint.plugins import ModelContext
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import RotaryEmbedding


class MultiAxisRotaryEmbedding(RotaryEmbedding):
    """Angles whose frequencies are divided among time, row and column.

    Each axis has a section of the frequencies, or every third one.
    """

    def __init__(
        self,
        head_size: int,
        context: ModelContext,
        *,
        source: str,
        fields: Mapping[str, Any],
        sections: Sequence[int],
        interleaved: bool,
    ) -> None:
        """Compute the frequencies.

        Args:
            head_size: elements of a head.
            context: context of the model.
            source: names the config in messages.
            fields: fields of the config.
            sections: frequencies of each axis, if the config has no `mrope_section`.
            interleaved: whether the axes take turns.

        Raises:
            ModelError: parameters of RoPE are not supported.
        """
        values = ConfigFields(fields, source)
        parameters = values.rope_parameters()
        stated = parameters.pop("mrope_section", None) or list(sections)
        parameters.pop("mrope_interleaved", None)
        for name in ("type", "rope_type"):
            if parameters.get(name) == "mrope":
                parameters[name] = "default"
        plain = {**fields, "rope_scaling": None, "rope_parameters": parameters}
        super().__init__(head_size, context, source=source, fields=plain, is_partial=False)
        if not _are_sections(stated, head_size // 2):
            raise values.error(
                "rope_parameters.mrope_section",
                f"expected three whole numbers with the sum {head_size // 2}, half of a head, got "
                f"{short(stated)}",
            )
        columns = _interleaved(stated) if interleaved else _consecutive(stated)
        half = head_size // 2
        self._columns = [
            torch.tensor([*axis, *(column + half for column in axis)], device=context.device)
            for axis in columns
        ]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles for `ForwardBatch.attend`, float32 [tokens, size].

        Args:
            positions: [tokens], or [axes, tokens].
        """
        if positions.dim() == 1:
            return super().at(positions)
        time, *others = (super(MultiAxisRotaryEmbedding, self).at(axis) for axis in positions)
        for columns, angles in zip(self._columns, others, strict=True):
            time[:, columns] = angles[:, columns]
        return time


def _are_sections(value: Any, total: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(type(number) is int and number >= 0 for number in value)
        and sum(value) == total
    )


def _consecutive(sections: Sequence[int]) -> list[range]:
    """Return the frequencies of row and column, which follow those of time."""
    time, rows, columns = sections
    return [range(time, time + rows), range(time + rows, time + rows + columns)]


def _interleaved(sections: Sequence[int]) -> list[range]:
    """Return the frequencies of row and column: of each three, the second and the third."""
    total = sum(sections)
    return [range(axis, min(3 * sections[axis], total), 3) for axis in (1, 2)]
