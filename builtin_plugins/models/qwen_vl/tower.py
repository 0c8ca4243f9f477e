"""Vision towers of Qwen2.5-VL and Qwen3-VL: patches of images of any size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint.builtin_plugins.models.encoders.encoder import LayerNorm, Tensors, activation
from hardpoint.builtin_plugins.models.vision.layers import Affine
from hardpoint.plugins import ModelContext
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import PackedLayer, RMSNorm

_MAX_LAYERS = 1 << 10
_EPS = 1e-6
_THETA = 10000.0

Norm = RMSNorm | LayerNorm
Activation = Callable[[torch.Tensor], torch.Tensor]
Groups = Sequence[torch.Tensor]
"""Patches that attend to each other: indices [groups, patches] for each number of patches."""


class Block:
    """A layer of a tower: attention and MLP, each of normalized inputs."""

    def __init__(self, name: str, heads: int, norms: tuple[Norm, Norm], mlp: BlockMLP) -> None:
        """Create the layers.

        Args:
            name: before the names of the tensors.
            heads: attention heads.
            norms: the norms of the inputs of attention and MLP.
            mlp: the MLP.
        """
        self._heads, self._norms, self._mlp = heads, norms, mlp
        size, context = mlp.size, mlp.context
        self._qkv = Affine(f"{name}.attn.qkv", 3 * size, size, context)
        self._output = Affine(f"{name}.attn.proj", size, size, context)

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        return [*self._norms, self._qkv, self._output, *self._mlp.layers()]

    def __call__(self, x: torch.Tensor, angles: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return x [patches, size] after the layer."""
        attention_norm, mlp_norm = self._norms
        x = x + self._attend(attention_norm(x), angles, groups)
        return x + self._mlp(mlp_norm(x))

    def _attend(self, x: torch.Tensor, angles: torch.Tensor, groups: Groups) -> torch.Tensor:
        q, k, v = self._qkv(x).view(len(x), 3, self._heads, -1).unbind(1)
        q, k = _rotated(q, angles), _rotated(k, angles)
        result = torch.empty_like(q)
        for indices in groups:
            groups_q, groups_k, groups_v = (part[indices].transpose(1, 2) for part in (q, k, v))
            attended = F.scaled_dot_product_attention(groups_q, groups_k, groups_v)
            result[indices] = attended.transpose(1, 2)
        return self._output(result.flatten(1))


class BlockMLP:
    """The MLP of a block.

    Attributes:
        size: width of inputs and outputs.
        context: context of the model.
    """

    def __init__(
        self, names: Sequence[str], size: int, inner: int, act: Activation, context: ModelContext
    ) -> None:
        """`names`: names of the matrices; with three, the first one is the gate."""
        self.size, self.context, self._activation = size, context, act
        *inputs, output = names
        self._inputs = [Affine(name, inner, size, context) for name in inputs]
        self._down = Affine(output, size, inner, context)

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        return [*self._inputs, self._down]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for x [patches, size]."""
        first, *others = (linear(x) for linear in self._inputs)
        first = self._activation(first)
        return self._down(first * others[0] if others else first)


class Merger:
    """Two linear layers over each square of patches, to the width of the text model."""

    def __init__(
        self, names: Sequence[str], norm: Norm, inner: int, size: int, *, merges_first: bool = False
    ) -> None:
        """Create the layers.

        Args:
            names: names of the two layers.
            norm: norm of patches.
            inner: width of a square of patches.
            size: width of the text model.
            merges_first: whether squares are normalized.
        """
        self._norm, self._inner, self._merges_first = norm, inner, merges_first
        context = norm._context
        self._up = Affine(names[0], inner, inner, context)
        self._down = Affine(names[1], size, inner, context)

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        return [self._norm, self._up, self._down]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, size] for patches [patches, width]."""
        x = x.view(-1, self._inner) if self._merges_first else x
        return self._down(F.gelu(self._up(self._norm(x).view(-1, self._inner))))


class QwenTower(ABC):
    """Common to both towers: patches in the order of their squares, and their positions."""

    name = "model.visual"
    patch_size = 14
    hidden_act = "silu"
    has_patch_bias = False

    def __init__(self, config: Mapping[str, Any], hidden: int, context: ModelContext) -> None:
        """Create the layers.

        Args:
            config: the `vision_config` of the model.
            hidden: width of the text model.
            context: context of the model.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        source = f"{context.config.architecture} config: vision_config"
        fields = self._fields = ConfigFields(config, source)
        self._context, self._config = context, config
        self._patch = fields.whole("patch_size", self.patch_size)
        self._merge = fields.whole("spatial_merge_size", 2)
        self._frames = fields.whole("temporal_patch_size", 2)
        self._size = fields.whole("hidden_size")
        self._heads = fields.whole("num_heads", 16)
        if self._size % (4 * self._heads):
            raise fields.error(
                "num_heads",
                f"expected a divisor of hidden_size / 4, {self._size / 4:g}, got {self._heads}",
            )
        for name, expected in (("in_channels", 3), ("out_hidden_size", hidden)):
            if (number := fields.whole(name, expected)) != expected:
                raise fields.error(name, f"expected {expected}, got {number}")
        self._out, self._inner = hidden, self._size * self._merge**2
        self._activation = activation(fields, config, "hidden_act", self.hidden_act)
        patch = f"{self.name}.patch_embed.proj"
        self._names = f"{patch}.weight", f"{patch}.bias"
        shape = (self._size, 3, self._frames, self._patch, self._patch)
        shapes: dict[str, tuple[int, ...]] = {self._names[0]: shape}
        if self.has_patch_bias:
            shapes[self._names[1]] = (self._size,)
        self._embedding = Tensors(shapes, context)
        count = fields.whole("depth", 32, at_most=_MAX_LAYERS)
        self._blocks = [self._block(f"{self.name}.blocks.{index}") for index in range(count)]

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        return [self._embedding, *(part for block in self._blocks for part in block.layers())]

    @abstractmethod
    def _block(self, name: str) -> Block:
        """Return a layer."""

    @abstractmethod
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of an image [3, height, width], [tokens, width]."""

    def indices(self, name: str, default: Sequence[int]) -> list[int]:
        """Return a field that is a list of indices of layers.

        Raises:
            ModelError: the field is not such a list.
        """
        value = self._config.get(name, list(default))
        count = len(self._blocks)
        is_list = isinstance(value, list)
        if not is_list or not all(type(index) is int and 0 <= index < count for index in value):
            raise self._fields.error(
                name, f"expected indices of {count} layers, got {short(value)}"
            )
        return list(value)

    def _grid(self, image: torch.Tensor) -> tuple[int, int]:
        return image.shape[1] // self._patch, image.shape[2] // self._patch

    def _by_square(self, grid: torch.Tensor) -> torch.Tensor:
        """Return values [rows, columns] of patches in the order of their squares, [patches]."""
        rows, columns = grid.shape
        squares = grid.view(rows // self._merge, self._merge, columns // self._merge, self._merge)
        return squares.transpose(1, 2).flatten()

    def _embedded(self, image: torch.Tensor) -> torch.Tensor:
        """Return the embedded patches of an image, each of them as two equal frames."""
        rows, columns = self._grid(image)
        patch, merge = self._patch, self._merge
        squares = image.view(3, rows // merge, merge, patch, columns // merge, merge, patch)
        patches = squares.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        patches = patches.expand(*patches.shape[:5], self._frames, patch, patch)
        weight = self._embedding[self._names[0]].flatten(1)
        bias = self._embedding[self._names[1]] if self.has_patch_bias else None
        flat = patches.reshape(rows * columns, weight.shape[1]).to(weight.dtype)
        return F.linear(flat, weight, bias)

    def _angles(self, image: torch.Tensor) -> torch.Tensor:
        """Return float32 [patches, head size / 2]: angles of the row, then of the column."""
        rows, columns = self._grid(image)
        device, size = image.device, self._size // self._heads // 2
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        frequencies = 1.0 / _THETA**exponents
        both = torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        )
        axes = [torch.outer(self._by_square(axis).float(), frequencies) for axis in both]
        return torch.cat(axes, 1)


def _rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return heads [patches, heads, size] rotated by angles [patches, size / 2], in float32."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = heads.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(heads.dtype)


class WindowTower(QwenTower):
    """Tower of Qwen2.5-VL: attention in windows, and of the whole image in a few layers."""

    def __init__(self, config: Mapping[str, Any], hidden: int, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(config, hidden, context)
        self._whole = set(self.indices("fullatt_block_indexes", (7, 15, 23, 31)))
        unit = self._patch * self._merge
        window = self._fields.whole("window_size", 112)
        if window < unit:
            raise self._fields.error("window_size", f"expected at least {unit}, got {window}")
        self._window = window // self._merge // self._patch
        name = f"{self.name}.merger"
        norm = RMSNorm(f"{name}.ln_q", self._size, _EPS, context)
        self._merger = Merger([f"{name}.mlp.0", f"{name}.mlp.2"], norm, self._inner, hidden)

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        return [*super().layers(), *self._merger.layers()]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of an image [3, height, width], [tokens, hidden_size]."""
        x, angles = self._embedded(image), self._angles(image)
        whole, windows = [torch.arange(len(x), device=x.device)[None]], self._windows(image)
        for index, block in enumerate(self._blocks):
            x = block(x, angles, whole if index in self._whole else windows)
        return self._merger(x)

    def _windows(self, image: torch.Tensor) -> Groups:
        """Return the patches of each window, windows of equal size together."""
        rows, columns = self._grid(image)
        indices = torch.arange(rows * columns, device=image.device)
        squares = indices.view(rows // self._merge, columns // self._merge, -1)
        by_size: dict[int, list[torch.Tensor]] = {}
        for stripe in torch.split(squares, self._window, 0):
            for window in torch.split(stripe, self._window, 1):
                by_size.setdefault(window.numel(), []).append(window.flatten())
        return [torch.stack(windows) for windows in by_size.values()]

    def _block(self, name: str) -> Block:
        context, size = self._context, self._size
        norms = tuple(RMSNorm(f"{name}.norm{n}", size, _EPS, context) for n in (1, 2))
        names = [f"{name}.mlp.{part}_proj" for part in ("gate", "up", "down")]
        inner = self._fields.whole("intermediate_size", 3420)
        mlp = BlockMLP(names, size, inner, self._activation, context)
        return Block(name, self._heads, (norms[0], norms[1]), mlp)


class DeepstackTower(QwenTower):
    """Tower of Qwen3-VL: learned positions, and embeddings of several of its layers."""

    patch_size = 16
    hidden_act = "gelu_pytorch_tanh"
    has_patch_bias = True

    def __init__(self, config: Mapping[str, Any], hidden: int, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(config, hidden, context)
        self._tapped = self.indices("deepstack_visual_indexes", ())
        positions = self._fields.whole("num_position_embeddings", 2304)
        self._side = int(positions**0.5)
        self._table_name = f"{self.name}.pos_embed.weight"
        self._table = Tensors({self._table_name: (positions, self._size)}, context)
        self._merger = self._merged(f"{self.name}.merger", merges_first=False)
        self._mergers = [
            self._merged(f"{self.name}.deepstack_merger_list.{index}", merges_first=True)
            for index in range(len(self._tapped))
        ]

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        mergers = [part for merger in (self._merger, *self._mergers) for part in merger.layers()]
        return [*super().layers(), self._table, *mergers]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return the embeddings and outputs of each layer, [tokens, (1 + layers) * hidden_size]."""
        x, angles = self._embedded(image), self._angles(image)
        x = x + self._learned(image).to(x.dtype)
        whole = [torch.arange(len(x), device=x.device)[None]]
        tapped: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self._blocks):
            x = block(x, angles, whole)
            if index in self._tapped:
                place = self._tapped.index(index)
                tapped[place] = self._mergers[place](x)
        # transformers adds them in the order of the layers of the tower.
        return torch.cat([self._merger(x), *tapped.values()], 1)

    def _learned(self, image: torch.Tensor) -> torch.Tensor:
        """Return the learned positions of patches, interpolated to the grid of the image."""
        rows, columns = (self._taps(count, image.device) for count in self._grid(image))
        result: torch.Tensor | float = 0.0
        for row, row_weight in rows:
            for column, column_weight in columns:
                index = self._by_square(row[:, None] * self._side + column)
                weight = self._by_square(row_weight[:, None] * column_weight)
                result = result + self._table[self._table_name][index] * weight[:, None]
        assert isinstance(result, torch.Tensor)
        return result

    def _taps(self, count: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the two nearest learned positions of each of `count`, with their weights."""
        places = torch.linspace(0, self._side - 1, count, device=device)
        below = places.floor().long()
        above = (below + 1).clamp(max=self._side - 1)
        weight = places - below
        return [(below, 1 - weight), (above, weight)]

    def _block(self, name: str) -> Block:
        context, size = self._context, self._size
        norms = tuple(LayerNorm(f"{name}.norm{n}", size, _EPS, context) for n in (1, 2))
        names = [f"{name}.mlp.linear_fc{n}" for n in (1, 2)]
        inner = self._fields.whole("intermediate_size", 4304)
        mlp = BlockMLP(names, size, inner, self._activation, context)
        return Block(name, self._heads, (norms[0], norms[1]), mlp)

    def _merged(self, name: str, *, merges_first: bool) -> Merger:
        size = self._inner if merges_first else self._size
        norm = LayerNorm(f"{name}.norm", size, _EPS, self._context)
        names = [f"{name}.linear_fc{n}" for n in (1, 2)]
        return Merger(names, norm, self._inner, self._out, merges_first=merges_first)
