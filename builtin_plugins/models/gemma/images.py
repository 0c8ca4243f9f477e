"""Gemma 3 with images: SigLIP, and a projector to the text model's embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from hardpoint.builtin_plugins.models.encoders.encoder import Tensors
from hardpoint.builtin_plugins.models.vision.settings import ProcessorSettings, read_processor
from hardpoint.plugins import ModelConfig, ModelContext, ModelFiles
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.plugins.requests import MediaFormat
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import PackedLayer, RMSNorm

from . import processor as image_processor
from .siglip import SiglipTower
from .text import Gemma3

_TEXT = "language_model."
_OWN = ("model.", "lm_head.")
_BILINEAR = 2  # as Pillow numbers it
_VERSION = 1  # of how images are resized, and their numbers read


class Gemma3Images(MediaFormat):
    """Images of Gemma 3: resized to one size, each of them as many tokens."""

    placeholder = "<start_of_image>"
    around = "\n\n"
    sees_itself = True

    def __init__(self, config: ModelConfig, processor: Mapping[str, Any]) -> None:
        """Read the settings.

        Args:
            processor: fields of its image processor.

        Raises:
            ModelError: one is not supported.
        """
        fields = ConfigFields(config.hf, f"{config.architecture} config")
        self.placeholder_id = fields.whole("boi_token_index", 255_999)
        self.begin_ids = (self.placeholder_id,)
        self.end_ids = (fields.whole("eoi_token_index", 256_000),)
        self.token_id = fields.whole("image_token_index", 262_144)
        self.num_tokens = fields.whole("mm_tokens_per_image", 256)
        vision = ConfigFields(fields.table("vision_config"), f"{config.architecture} config")
        size = vision.whole("image_size", 224)
        self.item_shape = (size, size, 3)
        patches = (size // vision.whole("patch_size", 16)) ** 2
        widths = vision.whole("hidden_size", 768), vision.whole("intermediate_size", 3072)
        self.encode_bytes = 4 * patches * (8 * widths[0] + 2 * widths[1])
        settings = self._pixels = ProcessorSettings(processor, _BILINEAR, (0.5,) * 3, (0.5,) * 3)
        self._check(ConfigFields(processor, "image processor"), processor, size)
        self.processor, self.processor_settings = image_processor.__file__, {"size": size}
        numbers = settings.factor, settings.mean, settings.std
        self.settings = json.dumps(["gemma3", _VERSION, size, *numbers])

    def _check(self, fields: ConfigFields, processor: Mapping[str, Any], size: int) -> None:
        """Refuse settings of the image processor that are not supported.

        Raises:
            ModelError: it has one.
        """
        if processor.get("do_pan_and_scan"):
            raise fields.error("do_pan_and_scan", "expected false (one image for each), got true")
        stated = fields.table("size") or {"height": size, "width": size}
        if (stated.get("height"), stated.get("width")) != (size, size):
            raise fields.error("size", f"expected {size} x {size}, got {short(stated)}")

    def numbers(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the processor's output as a tensor, float32 [3, size, size]."""
        return self._pixels.normalized(pixels)


class Gemma3WithImages(Gemma3):
    """Gemma 3 (Gemma Team, 2025) of text and images; tokens of an image see each other."""

    contract = 1
    replayable = True
    sees_ahead = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        **Gemma3.config_defaults,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }

    @classmethod
    def media_format(cls, config: ModelConfig, files: ModelFiles | None) -> MediaFormat:
        """Return how prompts have images.

        Raises:
            ModelError: a setting of the image processor is not supported.
        """
        return Gemma3Images(config, {} if files is None else read_processor(files.path))

    def __init__(self, context: ModelContext) -> None:
        """Create the layers; layers for images only in the ranks that embed tokens.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        matrices = context.hooks.matrices
        for name, matrix in matrices.items():
            matrices[name] = replace(matrix, stored_as=_stored(matrix.stored_as))
        self._images = Gemma3Images(context.config, {})
        vision = self._fields.table("vision_config")
        tower = self._tower = SiglipTower("vision_tower", vision, context)
        projector = "multi_modal_projector"
        self._soft_norm = RMSNorm(
            f"{projector}.mm_soft_emb_norm", tower.hidden, tower.eps, context, offset=1.0
        )
        self._projection_name = f"{projector}.mm_input_projection_weight"
        self._projection = Tensors({self._projection_name: (tower.hidden, self._hidden)}, context)
        side = math.isqrt(self._images.num_tokens)
        if side**2 != self._images.num_tokens or tower.side % side:
            raise self._fields.error(
                "mm_tokens_per_image",
                f"expected the square of a divisor of {tower.side}, the patches of a side, got "
                f"{self._images.num_tokens}",
            )
        self._pooled = tower.side // side

    @property
    def hidden_size(self) -> int:
        """Width of the text model's hidden states."""
        return self._hidden

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        """Return embeddings [num_tokens, hidden_size] of resized images."""
        return [self._encoded(item) for item in items]

    def _encoded(self, item: torch.Tensor) -> torch.Tensor:
        tower = self._tower
        x = tower(self._images.numbers(item)).T.view(1, tower.hidden, tower.side, tower.side)
        x = F.avg_pool2d(x, self._pooled, self._pooled).flatten(2)[0].T.contiguous()
        return self._soft_norm(x) @ self._projection[self._projection_name]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that the model needs, by Hugging Face name."""
        return {_stored(name): shape for name, shape in super().weight_shapes().items()}

    def weight_cuts(self) -> dict[str, Cut]:
        """Return the parts of them that this rank has."""
        return {_stored(name): cut for name, cut in super().weight_cuts().items()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors one by one."""
        super().load_weights((name.removeprefix(_TEXT), tensor) for name, tensor in weights)

    def quantizable(self) -> Iterable[str]:
        """Return the names of the text model's matrices."""
        return [_stored(name) for name in super().quantizable()]

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        super().load_quantized(name.removeprefix(_TEXT), matrix)

    def _layers(self) -> list[PackedLayer]:
        if not self.context.parallel.is_first:
            return super()._layers()
        vision_layers: list[PackedLayer] = [
            *self._tower.layers(),
            self._soft_norm,
            self._projection,
        ]
        return [*vision_layers, *super()._layers()]


def _stored(name: str) -> str:
    return _TEXT + name if name.startswith(_OWN) else name
