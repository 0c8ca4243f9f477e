"""The vision tower of SigLIP (Zhai et al., 2023), for models with images in prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint.builtin_plugins.models.encoders.encoder import LayerNorm, Tensors, activation
from hardpoint.builtin_plugins.models.vision.layers import Affine
from hardpoint.plugins import ModelContext
from hardpoint.toolkit.hf_config import ConfigFields
from hardpoint.toolkit.layers import PackedLayer

_MAX_LAYERS = 1 << 10


@dataclass(frozen=True)
class _Layer:
    """A layer: attention and MLP with normalized inputs."""

    attention_norm: LayerNorm
    q: Affine
    k: Affine
    v: Affine
    output: Affine
    mlp_norm: LayerNorm
    up: Affine
    down: Affine

    def layers(self) -> list[PackedLayer]:
        attention: list[PackedLayer] = [self.attention_norm, self.q, self.k, self.v, self.output]
        return [*attention, self.mlp_norm, self.up, self.down]


class SiglipTower:
    """Vision transformer over the patches of a square image; they attend to each other.

    Attributes:
        image_size: pixels of a side.
        side: patches of a side.
        hidden: width of its output for each patch.
        eps: epsilon of its norms.
    """

    def __init__(self, name: str, config: Mapping[str, Any], context: ModelContext) -> None:
        """Create the layers.

        Args:
            name: before the names of its tensors.
            config: the model's `vision_config`.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        source = f"{context.config.architecture} config: vision_config"
        fields = ConfigFields(config, source)
        self.image_size = fields.whole("image_size", 224)
        self._patch = fields.whole("patch_size", 16)
        self._channels = fields.whole("num_channels", 3)
        self.hidden = fields.whole("hidden_size", 768)
        self._intermediate = fields.whole("intermediate_size", 3072)
        self._heads = fields.whole("num_attention_heads", 12)
        self.eps = fields.number("layer_norm_eps", 1e-6)
        self.side = self.image_size // self._patch
        if self._channels != 3:
            raise fields.error("num_channels", f"expected 3, got {self._channels}")
        if self.hidden % self._heads:
            raise fields.error(
                "num_attention_heads",
                f"expected a divisor of hidden_size {self.hidden}, got {self._heads}",
            )
        self._activation = activation(fields, config, "hidden_act", "gelu_pytorch_tanh")
        self._context = context
        embeddings = f"{name}.embeddings"
        shape = (self.hidden, self._channels, self._patch, self._patch)
        self._names = {
            "patches": f"{embeddings}.patch_embedding.weight",
            "bias": f"{embeddings}.patch_embedding.bias",
            "positions": f"{embeddings}.position_embedding.weight",
        }
        self._embeddings = Tensors(
            {
                self._names["patches"]: shape,
                self._names["bias"]: (self.hidden,),
                self._names["positions"]: (self.side**2, self.hidden),
            },
            context,
        )
        count = fields.whole("num_hidden_layers", 12, at_most=_MAX_LAYERS)
        self._layers = [self._layer(f"{name}.encoder.layers.{i}") for i in range(count)]
        self._norm = LayerNorm(f"{name}.post_layernorm", self.hidden, self.eps, context)

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        parts: list[PackedLayer] = [self._embeddings]
        for layer in self._layers:
            parts += layer.layers()
        return [*parts, self._norm]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return hidden states [patches, hidden] of an image [3, image_size, image_size]."""
        patches, bias, positions = (self._embeddings[name] for name in self._names.values())
        image = image.to(patches.dtype)[None]
        x = F.conv2d(image, patches, bias, self._patch)[0].flatten(1).T + positions
        for layer in self._layers:
            x = x + self._attend(layer, layer.attention_norm(x))
            x = x + layer.down(self._activation(layer.up(layer.mlp_norm(x))))
        return self._norm(x)

    def _attend(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).view(len(x), self._heads, -1).transpose(0, 1)[None]
            for project in (layer.q, layer.k, layer.v)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return layer.output(out[0].transpose(0, 1).flatten(1))

    def _layer(self, name: str) -> _Layer:
        size, context = self.hidden, self._context
        q, k, v, output = (
            Affine(f"{name}.self_attn.{part}_proj", size, size, context)
            for part in ("q", "k", "v", "out")
        )
        return _Layer(
            LayerNorm(f"{name}.layer_norm1", size, self.eps, context),
            q,
            k,
            v,
            output,
            LayerNorm(f"{name}.layer_norm2", size, self.eps, context),
            Affine(f"{name}.mlp.fc1", self._intermediate, size, context),
            Affine(f"{name}.mlp.fc2", size, self._intermediate, context),
        )
