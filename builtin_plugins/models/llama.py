"""The Llama architecture (Touvron et al., 2023): Llama 1 to 3 and others; Mistral."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ForwardBatch, KVSpec, Model, ModelContext, Ops
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import (
    MLP,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    PackedLayer,
    QuantizableLayer,
    RMSNorm,
    RotaryEmbedding,
    Vector,
    load_packed,
    load_weights,
    packed_weights,
    quantizable,
    weight_cuts,
    weight_shapes,
)

# Above all models that are known; a config's larger number would be built before the files that
# have no such layers are read.
_MAX_LAYERS = 1 << 10
_MAX_HEAD_SIZE = 1 << 16

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
"""The value of a config's `layer_types` for a layer."""

_GATES: dict[str, Callable[[Ops], Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": lambda ops: ops.silu_and_mul,
    "gelu_pytorch_tanh": lambda ops: ops.gelu_and_mul,
}
"""The operation of each `hidden_act`."""


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer.

    Attributes:
        input_norm, mlp_norm: the norms before attention and the MLP; None if there is none.
        q_norm, k_norm: set for models that normalize queries and keys.
        attention_output_norm, mlp_output_norm: set for models that normalize the outputs of
            attention and the MLP before the residual.
        sinks: set for models with attention sinks (`KVSpec.sinks`).
    """

    input_norm: RMSNorm | None
    qkv: Linear
    output: Linear
    mlp_norm: RMSNorm | None
    mlp: MLP
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    attention_output_norm: RMSNorm | None = None
    mlp_output_norm: RMSNorm | None = None
    sinks: Vector | None = None

    def layers(self) -> list[PackedLayer]:
        """Return the layers that have weights."""
        parts: list[PackedLayer | None] = [
            self.input_norm,
            self.qkv,
            self.q_norm,
            self.k_norm,
            self.sinks,
            self.output,
            self.attention_output_norm,
            self.mlp_norm,
            *self.mlp.layers(),
            self.mlp_output_norm,
        ]
        return [part for part in parts if part is not None]


class Llama(Model):
    """Decoder with RMSNorm, rotary embedding, grouped-query attention and a SiLU-gated MLP.

    The config's variants are supported: head_dim, attention_bias, mlp_bias, tie_word_embeddings
    and the RoPE parameters.
    """

    contract = 1
    replayable = True
    parallelism: ClassVar[tuple[str, ...]] = ("tensor", "pipeline")
    head_norms = False
    gates_attention = False
    """Whether `q_proj` has a gate of the output after the query of each head."""
    changes_before_scale = False
    """Whether step parts change embeddings before the factor, where `inputs_embeds` of transformers
    is multiplied by it."""
    is_fused = False
    """Whether checkpoints have q, k and v in one matrix, and gate and up in another one."""
    is_fused_mlp = False
    """Whether they have gate and up in one matrix, and q, k and v in three."""
    has_window = False
    """Whether all layers have the window of `sliding_window`, which others do not read."""
    rotates_part = False
    """Whether `partial_rotary_factor` is read, of how much of a head RoPE rotates."""
    rotates_neighbours = False
    """Whether RoPE rotates neighboring elements together, instead of elements of two halves."""
    config_defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that the config may leave out, if they differ from Llama."""
    activation_field = "hidden_act"
    default_activation = "silu"

    def __init__(self, context: ModelContext) -> None:
        """Create the layers; `load_weights` loads their weights.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        hf = self._hf = {**self.config_defaults, **context.config.hf}
        self._source = f"{context.config.architecture} config"
        fields = self._fields = ConfigFields(hf, self._source)
        self._hidden = fields.whole("hidden_size")
        self._intermediate = fields.whole("intermediate_size")
        self._num_layers = fields.whole("num_hidden_layers", at_most=_MAX_LAYERS)
        self._heads = fields.whole("num_attention_heads")
        self._kv_heads = fields.whole("num_key_value_heads", self._heads)
        self._head_size = self._read_head_size()
        self._eps = self.norm_eps()
        self._embedding_scale = self.embedding_scale()
        self._check_config()
        self._tied = fields.flag("tie_word_embeddings", False)
        self._windows = self.windows()
        self._ropes = self.rotary_embeddings()
        parallel, vocab = context.parallel, context.config.vocab_size
        self._my_heads = parallel.share(self._heads, "attention heads")
        self._my_kv_heads = parallel.share_or_copy(self._kv_heads, "key and value heads")
        self._my_layers = parallel.stage_layers(self._num_layers)
        self._embedding = Embedding("model.embed_tokens", vocab, self._hidden, context)
        self._decoder_layers = [self._decoder_layer(i) for i in self._my_layers]
        self._norm = self._rms_norm("model.norm", self._hidden)
        shares_table = self._tied and not parallel.is_first
        head = "model.embed_tokens" if shares_table else "lm_head"
        self._head = LMHead(head, vocab, self._hidden, context)

    def norm_eps(self) -> float:
        """Return the eps of the norms."""
        return self._fields.number("rms_norm_eps", 1e-6)

    @property
    def kv_variant(self) -> str:
        """The variant of the rotary embeddings."""
        return " ".join(dict.fromkeys(rope.variant for rope in self._ropes if rope is not None))

    def windows(self) -> list[int | None]:
        """Return each layer's sliding window in tokens; None is full attention."""
        window = self._fields.optional_whole("sliding_window") if self.has_window else None
        return [window] * self._num_layers

    def layer_types(self, default: Sequence[str]) -> list[str]:
        """Return whether each layer has full attention or the sliding window, from `layer_types`.

        Args:
            default: types of a config without that field.

        Raises:
            ModelError: there are others, or not one for each layer.
        """
        types = self._hf.get("layer_types")
        if types is None:
            types = list(default)
        known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
        if not known or len(types) != self._num_layers:
            raise self._fields.error(
                "layer_types",
                f"expected {self._num_layers} of {' or '.join(LAYER_TYPES)}, got {short(types)}",
            )
        return list(types)

    def rotary_embeddings(self) -> Sequence[RotaryEmbedding | None]:
        """Return each layer's rotary embedding; layers may share one, or have none."""
        return [self.rotary_embedding(self._hf)] * self._num_layers

    def rotary_embedding(self, fields: Mapping[str, Any]) -> RotaryEmbedding:
        """Return the one of the parameters in fields of a config."""
        return RotaryEmbedding(
            self._head_size,
            self.context,
            source=self._source,
            fields=fields,
            is_partial=self.rotates_part,
        )

    def attention_scale(self) -> float:
        """Return the factor of attention scores."""
        return 1.0 / math.sqrt(self._head_size)

    def attention_softcap(self) -> float | None:
        """Return the limit of attention scores (`KVSpec.softcap`); None is without one."""
        return None

    def embedding_scale(self) -> float:
        """Return the factor of embedded tokens."""
        return 1.0

    def attention_biases(self) -> tuple[bool, bool]:
        """Return whether q, k and v have biases, and whether the output projection has one."""
        bias = self._fields.flag("attention_bias", False)
        return bias, bias

    def mlp(self, layer: int) -> MLP:
        """Return the MLP of a layer of the model."""
        return GatedMLP(
            f"model.layers.{layer}.mlp",
            self._hidden,
            self._intermediate,
            self.context,
            gate=self._gate,
            bias=self._fields.flag("mlp_bias", False),
            is_fused=self.is_fused or self.is_fused_mlp,
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that the model needs, by Hugging Face name."""
        return weight_shapes(self._stored_layers())

    def weight_cuts(self) -> dict[str, Cut]:
        """Return the parts of them that this rank has."""
        return weight_cuts(self._stored_layers())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors one by one; fused matrices are packed once they are complete."""
        self._allocate_rotary()
        load_weights(self._stored_layers(), weights)
        if self._ties_head:
            self._head.tie(self._embedding)

    def quantizable(self) -> Iterable[str]:
        """Return the names of all matrices but routers of experts."""
        return self._quantizable.keys()

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        self._quantizable[name].load_quantized(name, matrix)

    @functools.cached_property
    def _quantizable(self) -> dict[str, QuantizableLayer]:
        return quantizable(self._stored_layers())

    def packed_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrices, the norms and the embedding."""
        return packed_weights(self._layers())

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them."""
        self._allocate_rotary()
        load_packed(self._layers(), tensors)

    def kv_specs(self) -> list[KVSpec]:
        """Return one spec per attention layer of this stage."""
        scale, softcap = self.attention_scale(), self.attention_softcap()
        heads, kv_heads = len(self._my_heads), len(self._my_kv_heads)
        return [
            KVSpec(
                *(heads, kv_heads, self._head_size, scale, self._windows[number], softcap),
                sinks=None if layer.sinks is None else layer.sinks.tensor,
            )
            for number, layer in zip(self._my_layers, self._decoder_layers, strict=True)
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden], in the last stage after the final norm."""
        x = self.embed(batch.token_ids) if batch.hidden is None else batch.hidden
        delta: torch.Tensor | None = None
        angles = {rope: rope.at(batch.positions) for rope in self._my_ropes()}
        added, skips = self.context.hooks.added, self.context.hooks.skips
        for index, layer in enumerate(self._decoder_layers[: batch.num_layers]):
            number = self._my_layers[index]
            skipped = None if skips is None else skips(number)
            rope = self._ropes[number]
            turns = None if rope is None else angles[rope]
            delta = self.mix(index, self._add(layer.input_norm, x, delta), turns, batch)
            if batch.needed is not None:
                x = self.needed_rows(index, x, batch)
            if layer.attention_output_norm is not None:
                delta = layer.attention_output_norm(delta)
            if added is not None:
                added(number, "attention", x, delta)
            delta = self._run_mlp(index, self._add(layer.mlp_norm, x, delta), batch, skipped)
            if layer.mlp_output_norm is not None:
                delta = layer.mlp_output_norm(delta)
            if added is not None:
                added(number, "mlp", x, delta)
        if not self.context.parallel.is_last and delta is not None:
            return x.add_(delta)
        hidden = self._norm(x, delta)
        if batch.needed is None:
            return hidden
        return hidden.new_zeros(len(batch.token_ids), self._hidden).index_copy_(
            0, batch.needed, hidden
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embedded tokens [tokens, hidden] for token_ids [tokens]."""
        x = self._embedding(token_ids)
        if self.changes_before_scale:
            x = self._embedding.changed(x)
        if self._embedding_scale != 1.0:
            self.context.ops.scale(x, self._embedding_scale)
        return x if self.changes_before_scale else self._embedding.changed(x)

    def mix(
        self, index: int, h: torch.Tensor, angles: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return the result of attention of a layer of this stage for h [tokens, hidden].

        The last layer returns `needed_rows`.

        Args:
            index: number of the layer, in this stage.
            h: normalized hidden states.
            angles: as for `ForwardBatch.attend`.
            batch: the step.
        """
        layer, rope = self._decoder_layers[index], self._ropes[self._my_layers[index]]
        q, k, v = self._project(layer, h, rope)
        attended = batch.attend(index, q, k, v, angles)
        if batch.needed is not None:
            attended = self.needed_rows(index, attended, batch)
        return self._output(layer, attended)

    def needed_rows(self, index: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return x [tokens, ...] of the tokens that a layer needs after its attention."""
        num_layers = batch.num_layers or len(self._decoder_layers)
        if batch.needed is None or index < num_layers - 1:
            return x
        return x.index_select(0, batch.needed)

    def run_mlp(self, index: int, h: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:  # noqa: ARG002
        """Return the result of the MLP of a layer of this stage for h [tokens, hidden]."""
        return self._decoder_layers[index].mlp(h)

    def _run_mlp(
        self, index: int, h: torch.Tensor, batch: ForwardBatch, skipped: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the result of the MLP for h [tokens, hidden]; zeros for tokens that skip it.

        It runs for all tokens if `hooks.linear` gets its products, which are of all tokens, and
        if engines share experts, which all of them call in each layer.
        """
        if skipped is None or self.context.parallel.engines.size > 1:
            return self.run_mlp(index, h, batch)
        result, rows = torch.zeros_like(h), skipped.logical_not().nonzero().flatten()
        if not len(rows):
            return result
        if self.context.hooks.linear is not None:
            return self.run_mlp(index, h, batch)
        routed = batch.routed_experts
        if routed is None:
            result[rows] = self.run_mlp(index, h[rows], batch)
        else:
            experts = routed[rows]
            part = dataclasses.replace(batch, routed_experts=experts)
            result[rows] = self.run_mlp(index, h[rows], part)
            routed[rows] = experts
        return result

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden states [rows, hidden], in float32."""
        return self._head(hidden)

    def unembed(self, residual: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of the residual stream [rows, hidden], in float32."""
        return self.compute_logits(self._norm(residual))

    def normalise_heads(
        self, q_norm: RMSNorm, k_norm: RMSNorm, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k [tokens, heads, head_size], each head normalized on its own."""
        return q_norm(q), k_norm(k)

    def _my_ropes(self) -> list[RotaryEmbedding]:
        ropes = dict.fromkeys(self._ropes[layer] for layer in self._my_layers)
        return [rope for rope in ropes if rope is not None]

    def _allocate_rotary(self) -> None:
        for rope in self._my_ropes():
            rope.allocate()

    def _add(
        self, norm: RMSNorm | None, x: torch.Tensor, delta: torch.Tensor | None
    ) -> torch.Tensor:
        """Add delta to the residual x in place, if there is one, and return it normalized."""
        if norm is not None:
            return norm(x, delta)
        if delta is not None:
            self.context.ops.add(x, delta)
        return x

    def _project(
        self, layer: DecoderLayer, h: torch.Tensor, rope: RotaryEmbedding | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [tokens, heads, head_size], k and v [tokens, kv_heads, ...], for attention."""
        heads, kv_heads = len(self._my_heads), len(self._my_kv_heads)
        qkv = layer.qkv(h).view(-1, heads + 2 * kv_heads, self._head_size)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.normalise_heads(layer.q_norm, layer.k_norm, q, k)
        if rope is not None and self.rotates_neighbours:
            q, k = (neighbours_in_halves(heads, rope.size) for heads in (q, k))
        return q, k, v

    def _output(self, layer: DecoderLayer, attended: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden] of the result of attention, [tokens, heads, head_size]."""
        return layer.output(attended.flatten(1))

    def _layers(self) -> list[PackedLayer]:
        parallel = self.context.parallel
        parts: list[PackedLayer] = [self._embedding] if parallel.is_first else []
        for layer in self._decoder_layers:
            parts += layer.layers()
        return [*parts, self._norm, self._head] if parallel.is_last else parts

    def _stored_layers(self) -> list[PackedLayer]:
        return self._layers()[:-1] if self._ties_head else self._layers()

    @property
    def _ties_head(self) -> bool:
        """Whether the head uses the table of the embedding, which is in this stage."""
        parallel = self.context.parallel
        return self._tied and parallel.is_first and parallel.is_last

    def projections(self, layer: int) -> tuple[Linear, Linear]:
        """Return the projections of a layer of the model: to q, k and v, and of the output."""
        attention, size = f"model.layers.{layer}.self_attn", self._head_size
        query = 2 * size if self.gates_attention else size
        my_q, my_kv, mine = (
            range(heads.start * rows, heads.stop * rows)
            for heads, rows in (
                (self._my_heads, query),
                (self._my_kv_heads, size),
                (self._my_heads, size),
            )
        )
        qkv = [
            (f"{attention}.q_proj", self._heads * query),
            (f"{attention}.k_proj", self._kv_heads * size),
            (f"{attention}.v_proj", self._kv_heads * size),
        ]
        qkv_bias, output_bias = self.attention_biases()
        return Linear(
            qkv,
            self._hidden,
            self.context,
            bias=qkv_bias,
            row_ranges=[my_q, my_kv, my_kv],
            stored_as=f"{attention}.qkv_proj" if self.is_fused else None,
        ), Linear(
            [(f"{attention}.o_proj", self._hidden)],
            self._heads * size,
            self.context,
            bias=output_bias,
            column_range=mine,
        )

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        name, size = f"model.layers.{layer}", self._head_size
        attention = f"{name}.self_attn"
        qkv, output = self.projections(layer)
        return DecoderLayer(
            input_norm=self._rms_norm(f"{name}.input_layernorm", self._hidden),
            qkv=qkv,
            output=output,
            mlp_norm=self._rms_norm(f"{name}.post_attention_layernorm", self._hidden),
            mlp=self.mlp(layer),
            q_norm=self._rms_norm(f"{attention}.q_norm", size) if self.head_norms else None,
            k_norm=self._rms_norm(f"{attention}.k_norm", size) if self.head_norms else None,
        )

    def _rms_norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(name, size, self._eps, self.context)

    def _read_head_size(self) -> int:
        stated = self._fields.optional_whole("head_dim")
        if stated is None and self._hidden % self._heads:
            raise self._fields.error(
                "num_attention_heads",
                f"expected a divisor of hidden_size {self._hidden} (or head_dim), "
                f"got {self._heads}",
            )
        return stated or self._hidden // self._heads

    def _check_config(self) -> None:
        fields = self._fields
        if self._heads % self._kv_heads:
            raise fields.error(
                "num_key_value_heads",
                f"expected a divisor of num_attention_heads {self._heads}, got {self._kv_heads}",
            )
        if self._head_size % 2 or self._head_size > _MAX_HEAD_SIZE:
            raise fields.error(
                "head_dim",
                f"expected an even number (RoPE rotates pairs) of at most {_MAX_HEAD_SIZE}, "
                f"got {self._head_size}",
            )
        if not fields.flag("is_causal", True):
            raise fields.error("is_causal", "expected true (causal attention), got false")
        name = self.activation_field
        activation = self._hf.get(name) or self.default_activation
        if not isinstance(activation, str) or activation not in _GATES:
            expected = " or ".join(map(repr, _GATES))
            raise fields.error(name, f"expected {expected}, got {short(activation)}")
        self._gate = _GATES[activation](self.context.ops)


class Mistral(Llama):
    """Mistral (Jiang et al., 2023): all layers may have a window."""

    contract = 1
    replayable = True
    has_window = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }


def neighbours_in_halves(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Return heads [tokens, heads, head_size] in the order of `Ops.rotate` for halves.

    Of the first `size` elements, even places come first. Scores are the same, as long as
    queries and keys have one order.
    """
    pairs = heads[..., :size].reshape(*heads.shape[:-1], size // 2, 2)
    rotated = pairs.transpose(-1, -2).flatten(-2)
    return rotated if size == heads.shape[-1] else torch.cat((rotated, heads[..., size:]), -1)
