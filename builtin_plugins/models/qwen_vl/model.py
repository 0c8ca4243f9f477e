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
from hardpoint.toolkit.layers import PackedLayer

from .images import QwenImages
from .rotary import MultiAxisRotaryEmbedding
from .tower import DeepstackTower, QwenTower, WindowTower


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
        """Create the layers; those of images are in the ranks that embed tokens alone.

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
