"""Qwen3-Next: gated delta rule layers, which have a state, between layers with attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from hardpoint.plugins import ForwardBatch, KVSpec, ModelContext, ModelError, TensorSpec
from hardpoint.plugins.parallel import Cut
from hardpoint.toolkit.delta_rule import gated_delta_rule, short_convolution
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import MLP, Linear, PackedLayer, RMSNorm

from .llama import FULL, DecoderLayer, Llama
from .qwen_moe import QwenMixture

_LINEAR = "linear_attention"
_INTERVAL = 4  # of so many layers the last one has attention
_MAX_KERNEL = 1 << 6


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of the layers with a state.

    Attributes:
        key_heads, value_heads: as many value heads as key heads, or a multiple: several share one.
        key_size, value_size: elements of a head.
        kernel: tokens of the convolution, the token itself included.
        is_split: whether q, k and v of all heads are a matrix, and z is one; else the parts of a
            key head are together.
        has_own_gates: whether b is a matrix, and a is one; else a key head has them together.
        is_flat: whether the kernels are [channels, kernel], as in GGUF files; else there is a
            dimension of one between.
        alternates: whether neighbors among the value heads have key heads that are neighbors, as
            in GGUF files of Qwen3.5; else they share one.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    is_split: bool = False
    has_own_gates: bool = False
    is_flat: bool = False
    alternates: bool = False

    @classmethod
    def read(cls, fields: ConfigFields, *, has_own_gates: bool = False) -> DeltaSizes:
        """Return the sizes of a config.

        Args:
            fields: fields of the config.
            has_own_gates: whether checkpoints have a matrix for each of q, k and v together, z, b
                and a.

        Raises:
            ModelError: one is no size, or heads do not divide.
        """
        is_gguf = fields.flag("splits_in_proj_qkvz", False)
        sizes = cls(
            fields.whole("linear_num_key_heads"),
            fields.whole("linear_num_value_heads"),
            fields.whole("linear_key_head_dim"),
            fields.whole("linear_value_head_dim"),
            fields.whole("linear_conv_kernel_dim", at_most=_MAX_KERNEL),
            is_split=is_gguf or has_own_gates,
            has_own_gates=has_own_gates,
            is_flat=is_gguf,
            alternates=fields.flag("alternates_key_heads", False),
        )
        if sizes.value_heads % sizes.key_heads:
            raise fields.error(
                "linear_num_value_heads",
                f"expected a multiple of linear_num_key_heads {sizes.key_heads}, "
                f"got {sizes.value_heads}",
            )
        return sizes

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def splits(self) -> list[int]:
        """Elements of q, k, v and z of a key head."""
        values = self.shared * self.value_size
        return [self.key_size, self.key_size, values, values]


class DeltaRule:
    """Gated delta rule of a layer with a state, between its projections, with this rank's heads."""

    def __init__(
        self, name: str, hidden: int, eps: float, sizes: DeltaSizes, context: ModelContext
    ) -> None:
        """Describe the weights.

        Args:
            name: the Hugging Face name, before `.A_log`.
            hidden: size of the hidden states.
            eps: eps of the norm of the outputs.
        """
        self._name, self._sizes, self._context = name, sizes, context
        heads = context.parallel.share(sizes.key_heads, "key heads of layers with a state")
        self._heads, shared = heads, sizes.shared
        if sizes.alternates and shared > 1 and len(heads) < sizes.key_heads:
            raise ModelError(
                "parallel.tensor: the value heads of a key head are not together in this file, so "
                "that ranks cannot divide them; expected 1, or the model's safetensors files"
            )
        self._values = range(heads.start * shared, heads.stop * shared)
        self._norm = RMSNorm(f"{name}.norm", sizes.value_size, eps, context)
        parts, ranges = [("ba", 2 * sizes.value_heads)], [_rows(self._values, 2)]
        if sizes.has_own_gates:
            parts, ranges = [(gate, sizes.value_heads) for gate in "ba"], [self._values] * 2
        self._ba = Linear(
            _named(name, parts),
            hidden,
            context,
            out_dtype=torch.float32,
            row_ranges=ranges,
            quantize=False,
        )
        self._z = None
        if sizes.is_split:
            z = [(f"{name}.in_proj_z", sizes.value_heads * sizes.value_size)]
            self._z = Linear(z, hidden, context, row_ranges=[_rows(self._values, sizes.value_size)])
        self._tensors = {name: torch.empty(0) for name in self.shapes()}

    def projections(self, hidden: int) -> tuple[Linear, Linear]:
        """Return the projections to q, k and v, with z if they are not split, and of the output."""
        name, sizes, context = self._name, self._sizes, self._context
        all_values, mine = sizes.value_heads * sizes.value_size, _rows(self._heads, sizes.key_size)
        values = _rows(self._values, sizes.value_size)
        out = Linear([(f"{name}.out_proj", hidden)], all_values, context, column_range=values)
        if not sizes.is_split:
            rows = sum(sizes.splits)
            parts, ranges = [("qkvz", sizes.key_heads * rows)], [_rows(self._heads, rows)]
            return Linear(_named(name, parts), hidden, context, row_ranges=ranges), out
        keys = sizes.key_heads * sizes.key_size
        parts, ranges = [("q", keys), ("k", keys), ("v", all_values)], [mine, mine, values]
        qkv, stored = _named(name, parts), f"{name}.in_proj_qkv"
        return Linear(qkv, hidden, context, row_ranges=ranges, stored_as=stored), out

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights, but for the projections."""
        return [self._ba, self._norm, self, *([] if self._z is None else [self._z])]

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """The inputs of the convolution, and the matrix of each head."""
        sizes, dtype = self._sizes, str(self._context.dtype).removeprefix("torch.")
        matrix = len(self._values), sizes.key_size, sizes.value_size
        return (
            TensorSpec((sizes.kernel - 1, sum(map(len, self._channels))), dtype),
            TensorSpec(matrix, "float32"),
        )

    def __call__(
        self, projected: torch.Tensor, h: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return [tokens, values of all heads].

        Args:
            projected: q, k and v, or these and z of each key head after the other, [tokens, ...].
            h: normalized hidden states [tokens, hidden].
            layer: index among the layers with a state.
            batch: the step.
        """
        sizes, tokens = self._sizes, len(h)
        if self._z is not None:
            qkv, z = projected, self._z(h)
        else:
            heads = torch.split(projected.view(tokens, len(self._heads), -1), sizes.splits, -1)
            *parts, z = (x.flatten(1) for x in heads)
            qkv = torch.cat(parts, -1)
        groups = 1 if sizes.has_own_gates else len(self._heads)
        ba = self._ba(h).view(tokens, groups, -1)
        b, a = (x.flatten(1) for x in ba.chunk(2, -1))
        decay, bias = self._tensors[f"{self._name}.A_log"], self._tensors[f"{self._name}.dt_bias"]
        g = -decay.exp() * F.softplus(a + bias)
        output = batch.recur(layer, self._advance, qkv, g, b.sigmoid())
        values = self._norm(output.to(h.dtype).reshape(-1, sizes.value_size))
        return (values.view(z.shape).float() * F.silu(z.float())).to(h.dtype)

    def _advance(
        self,
        states: Sequence[torch.Tensor],
        starts: np.ndarray[Any, np.dtype[np.int64]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the outputs of the delta rule [tokens, heads, size], and the states."""
        (qkv, g, beta), (before, matrix) = inputs, states
        weight = self._tensors[f"{self._name}.conv1d.weight"]
        mixed, after = short_convolution(before, starts, qkv, weight)
        parts = torch.split(F.silu(mixed), list(map(len, self._channels)), -1)
        heads = (len(self._heads), len(self._heads), len(self._values))
        q, k, v = (x.view(len(x), n, -1) for x, n in zip(parts, heads, strict=True))
        if self._sizes.alternates:
            q, k = (x.repeat(1, self._sizes.shared, 1) for x in (q, k))
        output, matrix = gated_delta_rule(matrix, starts, q, k, v, g, beta)
        return output, (after, matrix)

    @property
    def _channels(self) -> tuple[range, range, range]:
        sizes, keys = self._sizes, self._sizes.key_heads * self._sizes.key_size
        mine = _rows(self._heads, sizes.key_size)
        first = 2 * keys
        values = range(
            first + self._values.start * sizes.value_size,
            first + self._values.stop * sizes.value_size,
        )
        return mine, range(keys + mine.start, keys + mine.stop), values

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the convolution and of the tensors of heads."""
        sizes = self._sizes
        channels = 2 * sizes.key_heads * sizes.key_size + sizes.value_heads * sizes.value_size
        between = () if sizes.is_flat else (1,)
        return {
            f"{self._name}.conv1d.weight": (channels, *between, sizes.kernel),
            f"{self._name}.A_log": (sizes.value_heads,),
            f"{self._name}.dt_bias": (sizes.value_heads,),
        }

    def cuts(self) -> dict[str, Cut]:
        """Return the parts of the heads of this rank."""
        if len(self._heads) == self._sizes.key_heads:
            return {}
        (first, *more), values = self._channels, self._values
        channels = Cut(0, first.start, first.stop, tuple((x.start, x.stop) for x in more))
        of_heads = Cut(0, values.start, values.stop)
        return dict(zip(self.shapes(), (channels, of_heads, of_heads), strict=True))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor; tensors of heads are kept in float32."""
        is_kernel = name.endswith(".conv1d.weight")
        dtype = self._context.dtype if is_kernel else torch.float32
        tensor = tensor.flatten(1) if is_kernel else tensor
        self._tensors[name] = tensor.to(self._context.device, dtype, copy=True)

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the tensors."""
        return dict(self._tensors)

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors."""
        for name in self._tensors:
            self._tensors[name] = tensors[name].to(self._context.device)


def _rows(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


def _named(name: str, parts: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(f"{name}.in_proj_{part}", rows) for part, rows in parts]


class DeltaLayers(Llama):
    """Base class of models with gated delta rule layers between layers with attention."""

    contract = 1
    replayable = False
    head_norms = True
    gates_attention = True
    rotates_part = True
    has_own_gates = False
    """Whether checkpoints have the projections to b and a apart, and that to z."""

    def __init__(self, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        self._rules: dict[int, DeltaRule] = {}  # by layer of the model
        super().__init__(context)

    @functools.cached_property
    def _types(self) -> list[str]:
        interval = self._fields.whole("full_attention_interval", _INTERVAL)
        types = self._hf.get("layer_types")
        if types is None:
            layers = range(1, self._num_layers + 1)
            return [_LINEAR if layer % interval else FULL for layer in layers]
        is_known = isinstance(types, list) and all(kind in (FULL, _LINEAR) for kind in types)
        if not is_known or len(types) != self._num_layers:
            raise self._fields.error(
                "layer_types",
                f"expected {self._num_layers} of {FULL} or {_LINEAR}, got {short(types)}",
            )
        return list(types)

    def windows(self) -> list[int | None]:
        """Return None for each layer."""
        return [None] * self._num_layers

    def kv_specs(self) -> list[KVSpec]:
        """Return one spec per layer with attention."""
        specs = zip(self._my_layers, super().kv_specs(), strict=True)
        return [spec for layer, spec in specs if layer not in self._rules]

    def state_specs(self) -> list[tuple[TensorSpec, ...]]:
        """Return the tensors of the other layers."""
        return [rule.state for rule in self._rules.values()]

    def mix(
        self, index: int, h: torch.Tensor, angles: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return the result of attention, or of the delta rule, for h [tokens, hidden]."""
        layer, number = self._decoder_layers[index], self._my_layers[index]
        before = sum(other < number for other in self._rules)  # layers with a state
        if (rule := self._rules.get(number)) is not None:
            mixed = rule(layer.qkv(h), h, before, batch)
            return layer.output(self.needed_rows(index, mixed, batch))
        size, kv = self._head_size, len(self._my_kv_heads) * self._head_size
        queries, k, v = torch.split(layer.qkv(h), [2 * len(self._my_heads) * size, kv, kv], -1)
        q, gate = queries.view(len(h), -1, 2 * size).chunk(2, -1)
        k, v = (x.view(len(h), -1, size) for x in (k, v))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q.contiguous()), layer.k_norm(k.contiguous())
        attended = batch.attend(index - before, q, k, v, angles)
        gated = (attended * gate.sigmoid()).flatten(1)
        return layer.output(self.needed_rows(index, gated, batch))

    def projections(self, layer: int) -> tuple[Linear, Linear]:
        """Return the projections of attention, or of the delta rule."""
        if self._types[layer] == FULL:
            return super().projections(layer)
        name = f"model.layers.{layer}.linear_attn"
        sizes = DeltaSizes.read(self._fields, has_own_gates=self.has_own_gates)
        rule = DeltaRule(name, self._hidden, self._eps, sizes, self.context)
        self._rules[layer] = rule
        return rule.projections(self._hidden)

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        built = super()._decoder_layer(layer)
        if layer in self._rules:
            return dataclasses.replace(built, q_norm=None, k_norm=None)
        return built

    def _layers(self) -> list[PackedLayer]:
        rules: Iterable[DeltaRule] = self._rules.values()
        return [*(part for rule in rules for part in rule.layers()), *super()._layers()]

    def _rms_norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(name, size, self._eps, self.context, offset=1.0)


class Qwen3Next(DeltaLayers, QwenMixture):
    """Qwen3-Next-80B-A3B (Qwen team, 2025)."""

    contract = 1
    has_shared_expert = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "norm_topk_prob": True,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "partial_rotary_factor": 0.25,
    }

    def mlp(self, layer: int) -> MLP:
        """Return a mixture of experts; an MLP if there are no experts."""
        return Llama.mlp(self, layer) if self._hf.get("num_experts") == 0 else super().mlp(layer)
