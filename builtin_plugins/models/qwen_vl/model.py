"""Qwen2.5-VL and Qwen3-VL: Qwen 2 and 3 with images, M-RoPE and a vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.builtin_plugins.models.qwen import Qwen2, Qwen3
from hardpoint.builtin_plugins.models.qwen_moe import Qwen3Moe
from hardpoint.builtin_plugins.models.vision.settings import read_processor
from hardpoint.plugins import ModelConfig, ModelContext, ModelFiles
from hardpoint.plugins.requests import MediaFormat
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import PackedLayer, RotaryEmbedding

from .images import QwenImages
from .tower import DeepstackTower, QwenTower, WindowTower


class MultiAxisRotaryEmbedding(RotaryEmbedding):
    """Rotary angles with frequencies divided among time, row and column (M-RoPE).

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
    """Return the frequencies of row and column after the frequencies of time."""
    time, rows, columns = sections
    return [range(time, time + rows), range(time + rows, time + rows + columns)]


def _interleaved(sections: Sequence[int]) -> list[range]:
    """Return the frequencies of row and column: of each three, the second and the third."""
    total = sum(sections)
    return [range(axis, min(3 * sections[axis], total), 3) for axis in (1, 2)]


class _QwenVL(Llama):
    """Common to both: images, their positions and the tower."""

    contract = 1
    replayable = True
    tower_class: ClassVar[type[QwenTower]]
    sections: ClassVar[Sequence[int]]
    interleaved: ClassVar[bool] = False

    @classmethod
    def media_format(cls, config: ModelConfig, files: ModelFiles | None) -> MediaFormat:
        """Return the format of images in prompts.

        Raises:
            ModelError: a setting of the image processor is not supported.
        """
        processor = {} if files is None else read_processor(files.path)
        return QwenImages(config, processor, patch_size=cls.tower_class.patch_size)

    def __init__(self, context: ModelContext) -> None:
        """Create the layers; layers for images only in the ranks that embed tokens.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        vision = self._fields.table("vision_config")
        self._tower = self.tower_class(vision, self._hidden, context)
        added = len(vision.get("deepstack_visual_indexes") or ())
        if context.parallel.is_first and added > len(self._my_layers):
            raise self._fields.error(
                "vision_config.deepstack_visual_indexes",
                f"expected at most as many as the first stage has layers, {len(self._my_layers)}, "
                f"got {added}",
            )

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states of the text model."""
        return self._hidden

    def rotary_embedding(self, fields: Mapping[str, Any]) -> MultiAxisRotaryEmbedding:
        """Return the one of the parameters in fields of a config."""
        return MultiAxisRotaryEmbedding(
            self._head_size,
            self.context,
            source=self._source,
            fields=fields,
            sections=self.sections,
            interleaved=self.interleaved,
        )

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        """Return the embeddings of images, each [tokens, width]."""
        return [self._tower(item) for item in items]

    def _layers(self) -> list[PackedLayer]:
        if not self.context.parallel.is_first:
            return super()._layers()
        return [*self._tower.layers(), *super()._layers()]


class Qwen2_5VL(_QwenVL, Qwen2):  # noqa: N801
    """Qwen2.5-VL (Bai et al., 2025)."""

    contract = 1
    replayable = True
    tower_class = WindowTower
    sections = (16, 24, 24)
    config_defaults: ClassVar[Mapping[str, Any]] = {**Qwen2.config_defaults, "rms_norm_eps": 1e-5}


class _Deepstack(_QwenVL):
    """Common to Qwen3-VL: embeddings are added after the first decoder layers, too."""

    contract = 1
    replayable = True
    tower_class = DeepstackTower
    sections = (24, 20, 20)
    interleaved = True


class Qwen3VL(_Deepstack, Qwen3):
    """Qwen3-VL (Qwen Team, 2025)."""

    contract = 1
    replayable = True


class Qwen3VLMoe(_Deepstack, Qwen3Moe):
    """Qwen3-VL with a mixture of experts (Qwen Team, 2025)."""

    contract = 1
    replayable = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3Moe.config_defaults,
        "norm_topk_prob": True,
    }
