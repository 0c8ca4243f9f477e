"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024): multi-head latent attention, and mixtures of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hardpoint.plugins import KVSpec, ModelContext
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import (
    ExpertsConfig,
    Linear,
    PackedLayer,
    RMSNorm,
    RotaryEmbedding,
    SoftmaxRouting,
    packed_weights,
    quantizable,
    weight_shapes,
)

from .llama import DecoderLayer, neighbours_in_halves
from .mixtral import MixtureAfterDense

_LATENT_EPS = 1e-6  # of the norms of latents, whatever `rms_norm_eps` is
_MAX_SIZE = 1 << 16  # far above all models that are known


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of multi-head latent attention (arXiv:2405.04434).

    Attributes:
        query: elements of the latent of queries; None: queries have none.
        latent: elements of the latent of keys and values.
        nope: elements of a head's key that come from its latent.
        rope: elements of a key that are rotated, which all heads share.
        value: elements of a head's value.
    """

    query: int | None
    latent: int
    nope: int
    rope: int
    value: int

    @classmethod
    def of(cls, fields: ConfigFields) -> LatentSizes:
        """Return the sizes of a config.

        Raises:
            ModelError: a size is missing or wrong.
        """
        whole = {
            name: fields.whole(name, at_most=_MAX_SIZE)
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        if whole["qk_rope_head_dim"] % 2:
            raise fields.error(
                "qk_rope_head_dim",
                f"expected an even number (RoPE rotates pairs), got {whole['qk_rope_head_dim']}",
            )
        return cls(fields.optional_whole("q_lora_rank"), *whole.values())


class LatentHeads:
    """The matrices that make the keys and values of heads from latents.

    Neither is made: q (K c) = (K^T q) c, so a query is multiplied by K^T, and the sum of latents
    that attention gives by the matrix of values (absorption). Heads are multiplied one by one, so
    that a row's result does not depend on the other rows.
    """

    def __init__(
        self,
        attention: str,
        sizes: LatentSizes,
        heads: int,
        mine: range,
        context: ModelContext,
        *,
        by_head: bool,
    ) -> None:
        """Describe the matrices.

        Args:
            attention: the Hugging Face name of the attention that they belong to.
            mine: the heads that this rank has.
            by_head: whether the checkpoint has them as they are multiplied, `k_b_proj` and
                `v_b_proj`, each of a head; otherwise it has K and the matrix of values of all heads
                in one, `kv_b_proj`.
        """
        self._name = f"{attention}.kv_b_proj.weight"
        self._whole = (heads * (sizes.nope + sizes.value), sizes.latent)
        self._rows = range(
            mine.start * (sizes.nope + sizes.value), mine.stop * (sizes.nope + sizes.value)
        )
        self._sizes, self._by_head = sizes, by_head
        self._keys = [
            Linear(
                [(f"{attention}.k_b_proj.{i}", sizes.latent)], sizes.nope, context, is_hooked=False
            )
            for i in mine
        ]
        self._values = [
            Linear(
                [(f"{attention}.v_b_proj.{i}", sizes.value)], sizes.latent, context, is_hooked=False
            )
            for i in mine
        ]
        self._matrices = [*self._keys, *self._values]
        self._owners = {name: part for part in self._matrices for name in part.shapes()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the matrices of this rank's heads, or of the matrix of all heads."""
        return weight_shapes(self._matrices) if self._by_head else {self._name: self._whole}

    def cuts(self) -> dict[str, Cut]:
        """Return the rows of the heads of this rank."""
        if self._by_head or len(self._rows) == self._whole[0]:
            return {}
        return {self._name: Cut(0, self._rows.start, self._rows.stop)}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load the matrix of one head, or of all heads."""
        if self._by_head:
            self._owners[name].load(name, tensor)
            return
        by_head = tensor.reshape(len(self._keys), -1, self._sizes.latent)
        for keys, values, matrix in zip(self._keys, self._values, by_head, strict=True):
            for part, part_tensor in (
                (keys, matrix[: self._sizes.nope].T),
                (values, matrix[self._sizes.nope :]),
            ):
                (own_name,) = part.shapes()
                part.load(own_name, part_tensor)

    def quantizable(self) -> list[str]:
        """Return the names of the matrices, where each is stored; one of all is cut as numbers."""
        return list(quantizable(self._matrices)) if self._by_head else []

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load one matrix of few bits."""
        self._owners[name].load_quantized(name, matrix)

    def packed(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrices."""
        return packed_weights(self._matrices)

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them."""
        for matrix in self._matrices:
            matrix.load_packed(tensors)

    def queries(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write q [..., nope], multiplied by the key matrices, to out [rows, heads, latent]."""
        for head, keys in enumerate(self._keys):
            out[:, head] = keys(q[:, head])

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the values [rows, heads * value] of latents [rows, heads, latent]."""
        return torch.cat([values(attended[:, i]) for i, values in enumerate(self._values)], 1)


@dataclass(frozen=True, kw_only=True)
class LatentLayer(DecoderLayer):
    """A decoder layer with a `qkv` product of latents, or of queries and a latent.

    Attributes:
        query_up: queries from their latent; None if `qkv` gives them.
        heads: the heads of the latent of keys and values.
    """

    query_up: Linear | None
    heads: LatentHeads

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        up: list[PackedLayer] = [] if self.query_up is None else [self.query_up]
        return [*super().layers(), *up, self.heads]


class DeepseekV3(MixtureAfterDense):
    """DeepSeek-V3, R1, Kimi K2, Moonlight and others: experts are chosen by sigmoids.

    The cache has one head per layer, for latents: a rotated key and a latent, from which the
    keys and values of all heads are computed.
    """

    contract = 1
    replayable = True
    rotates_neighbours = True
    scoring: ClassVar[str] = "sigmoid"
    selections: ClassVar[Sequence[str]] = ("noaux_tc",)
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    }

    def __init__(self, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        hf = {**self.config_defaults, **context.config.hf}
        fields = ConfigFields(hf, f"{context.config.architecture} config")
        self._sizes = LatentSizes.of(fields)
        self._by_head = fields.flag("kv_b_by_head", False)  # as loaders of GGUF files state it
        self.rotates_neighbours = fields.flag("rope_interleave", True)
        super().__init__(context)

    def attention_scale(self) -> float:
        """Return the scale of head keys, times the square of YaRN's factor (arXiv:2309.00071)."""
        scale = 1.0 / math.sqrt(self._sizes.nope + self._sizes.rope)
        fields = self._fields
        rope = fields.rope_parameters()
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default" or not rope.get("mscale_all_dim"):
            return scale
        factor = fields.positive("factor", rope.get("factor"))
        all_dim = fields.positive("mscale_all_dim", rope["mscale_all_dim"])
        stretch = 0.1 * all_dim * math.log(max(factor, 1.0)) + 1.0
        return scale * stretch * stretch

    def kv_specs(self) -> list[KVSpec]:
        """Return one spec per attention layer of this stage: all heads share the key."""
        sizes, scale = self._sizes, self.attention_scale()
        size = sizes.rope + sizes.latent
        spec = KVSpec(len(self._my_heads), 1, size, scale, value_size=sizes.latent)
        return [spec] * len(self._my_layers)

    def route(self, experts: ExpertsConfig) -> ExpertsConfig:
        """Return the experts with how they are chosen."""
        self._check_selection()
        return super().route(experts)

    def _check_selection(self) -> None:
        for name, expected in (("scoring_func", [self.scoring]), ("topk_method", self.selections)):
            value = self._hf.get(name)
            if value is not None and value not in expected:
                raise self._fields.error(
                    name, f"expected {' or '.join(map(repr, expected))}, got {short(value)}"
                )
        if (every := self._hf.get("moe_layer_freq", 1)) != 1:
            raise self._fields.error("moe_layer_freq", f"expected 1, got {short(every)}")

    def _project(
        self,
        layer: DecoderLayer,
        h: torch.Tensor,
        rope: RotaryEmbedding | None,  # noqa: ARG002 - all layers have it
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [tokens, heads, rope + latent], and the key [tokens, 1, ...] twice."""
        assert isinstance(layer, LatentLayer)
        assert layer.k_norm is not None
        sizes, tokens, heads = self._sizes, len(h), len(self._my_heads)
        down = layer.qkv(h)
        first = down.shape[1] - sizes.latent - sizes.rope
        q, latent, k_rope = torch.split(down, [first, sizes.latent, sizes.rope], 1)
        if layer.query_up is not None and layer.q_norm is not None:
            q = layer.query_up(layer.q_norm(q))
        q = q.view(tokens, heads, sizes.nope + sizes.rope)
        queries = q.new_empty(tokens, heads, sizes.rope + sizes.latent)
        queries[..., : sizes.rope] = self._in_order(q[..., sizes.nope :])
        layer.heads.queries(q[..., : sizes.nope], queries[..., sizes.rope :])
        k = torch.cat((self._in_order(k_rope.unsqueeze(1)), layer.k_norm(latent).unsqueeze(1)), -1)
        return queries, k, k

    def _in_order(self, rotated: torch.Tensor) -> torch.Tensor:
        """Return elements that are to be rotated, in the order of halves."""
        if not self.rotates_neighbours:
            return rotated
        return neighbours_in_halves(rotated, self._sizes.rope)

    def _output(self, layer: DecoderLayer, attended: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden] of the sums of latents, [tokens, heads, latent]."""
        assert isinstance(layer, LatentLayer)
        return layer.output(layer.heads.values(attended))

    def _decoder_layer(self, layer: int) -> LatentLayer:
        name, sizes, context, heads = (
            f"model.layers.{layer}",
            self._sizes,
            self.context,
            self._heads,
        )
        attention, mine = f"{name}.self_attn", self._my_heads
        bias, size = self._fields.flag("attention_bias", False), sizes.nope + sizes.rope
        q_rows, my_q = heads * size, range(mine.start * size, mine.stop * size)
        my_values = range(mine.start * sizes.value, mine.stop * sizes.value)
        query_up = q_norm = None
        if sizes.query is None:
            queries, row_range = (f"{attention}.q_proj", q_rows), my_q
            if bias:
                raise self._fields.error(
                    "attention_bias", "expected false where q_lora_rank is null, got True"
                )
        else:
            queries, row_range = (f"{attention}.q_a_proj", sizes.query), range(sizes.query)
            q_norm = RMSNorm(f"{attention}.q_a_layernorm", sizes.query, _LATENT_EPS, context)
            query_up = Linear(
                [(f"{attention}.q_b_proj", q_rows)], sizes.query, context, row_ranges=[my_q]
            )
        latent = sizes.latent + sizes.rope
        return LatentLayer(
            input_norm=self._rms_norm(f"{name}.input_layernorm", self._hidden),
            qkv=Linear(
                [queries, (f"{attention}.kv_a_proj_with_mqa", latent)],
                self._hidden,
                context,
                bias=bias,
                row_ranges=[row_range, range(latent)],
            ),
            output=Linear(
                [(f"{attention}.o_proj", self._hidden)],
                heads * sizes.value,
                context,
                bias=bias,
                column_range=my_values,
            ),
            mlp_norm=self._rms_norm(f"{name}.post_attention_layernorm", self._hidden),
            mlp=self.mlp(layer),
            q_norm=q_norm,
            k_norm=RMSNorm(f"{attention}.kv_a_layernorm", sizes.latent, _LATENT_EPS, context),
            query_up=query_up,
            heads=LatentHeads(attention, sizes, heads, mine, context, by_head=self._by_head),
        )

    def _read_head_size(self) -> int:
        return self._sizes.rope


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2, V2.5, V2-Lite and others: experts are chosen by a softmax."""

    contract = 1
    replayable = True
    scoring: ClassVar[str] = "softmax"
    selections: ClassVar[Sequence[str]] = ("greedy", "group_limited_greedy")
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
    }

    def route(self, experts: ExpertsConfig) -> ExpertsConfig:
        """Return the experts with how they are chosen."""
        self._check_selection()
        for name in ("norm_topk_prob", "mlp_bias"):
            if self._fields.flag(name, False):
                raise self._fields.error(name, "expected false, got True")
        groups = chosen = 1
        if self._hf.get("topk_method") == "group_limited_greedy":
            groups, chosen = self.read_groups(experts, least=1)
        routing = SoftmaxRouting(groups=groups, chosen_groups=chosen, scale=self.expert_scale())
        return dataclasses.replace(experts, softmax=routing)
