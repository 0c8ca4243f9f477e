"""Encoders with bidirectional attention: BERT and its kind.

They have no KV cache, so that each prompt is computed in one step, and give vectors alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from hardpoint.plugins import ForwardBatch, KVSpec, Model, ModelContext
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.toolkit.hf_config import ConfigFields, short
from hardpoint.toolkit.layers import (
    Linear,
    PackedLayer,
    load_packed,
    load_weights,
    packed_weights,
    quantizable,
    weight_shapes,
)

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation(
    fields: ConfigFields, config: Mapping[str, Any], name: str, default: str
) -> Activation:
    """Return the activation that a field of a config names.

    Raises:
        ModelError: it is not supported.
    """
    value = config.get(name, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise fields.error(name, f"expected one of {', '.join(ACTIVATIONS)}, got {short(value)}")
    return ACTIVATIONS[value]


class Tensors:
    """Tensors of a checkpoint as they are, in the dtype of the model."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], context: ModelContext) -> None:
        """`shapes` are by Hugging Face name."""
        self._shapes, self._context = dict(shapes), context
        self._tensors: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return their shapes."""
        return dict(self._shapes)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one."""
        self._tensors[name] = tensor.to(self._context.device, self._context.dtype, copy=True)

    def packed(self) -> dict[str, torch.Tensor]:
        """Return them."""
        return dict(self._tensors)

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them.

        Raises:
            KeyError, ValueError: a tensor is missing or wrong.
        """
        for name, shape in self._shapes.items():
            tensor = tensors[name]
            if tensor.shape != shape or tensor.dtype != self._context.dtype:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}")
            self._tensors[name] = tensor.to(self._context.device)


class LayerNorm(Tensors):
    """Layer normalization (arXiv:1607.06450), with or without a bias."""

    def __init__(
        self, name: str, size: int, eps: float, context: ModelContext, *, bias: bool = True
    ) -> None:
        """`name` is the Hugging Face name without `.weight`; `size` is the last dimension."""
        self._names = f"{name}.weight", f"{name}.bias" if bias else None
        self._size, self._eps = size, eps
        super().__init__({part: (size,) for part in self._names if part}, context)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalized over its last dimension."""
        weight, bias = self._names
        shift = None if bias is None else self[bias]
        return F.layer_norm(x, (self._size,), self[weight], shift, self._eps)


class EncoderModel(Model):
    """Base class of encoders: layers, loading and packing of tensors, attention."""

    generates: ClassVar[bool] = False
    pooler: ClassVar[str] = "cls"
    prefix: ClassVar[str] = ""
    """Before the names of all tensors except tensors of a head."""

    def __init__(self, context: ModelContext) -> None:
        """Read the sizes.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        self._hf: Mapping[str, Any] = context.config.hf
        fields = self._fields = ConfigFields(self._hf, f"{context.config.architecture} config")
        self._hidden = fields.whole("hidden_size")
        self._intermediate = fields.whole("intermediate_size")
        self._num_layers = fields.whole("num_hidden_layers", at_most=1000)
        self._heads = fields.whole("num_attention_heads")
        if self._hidden % self._heads:
            raise fields.error(
                "num_attention_heads",
                f"expected a divisor of hidden_size {self._hidden}, got {self._heads}",
            )
        self._head_size = self._hidden // self._heads

    def _activation(self, field: str) -> Activation:
        """Return the activation that a field of the config names.

        Raises:
            ModelError: it is not supported.
        """
        return activation(self._fields, self._hf, field, "gelu")

    @abstractmethod
    def layers(self) -> Sequence[PackedLayer]:
        """Return the layers that have weights."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that the model needs, by Hugging Face name."""
        return weight_shapes(self.layers())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors one by one."""
        load_weights(self.layers(), weights)

    def quantizable(self) -> Iterable[str]:
        """Return the names of all matrices."""
        return quantizable(self.layers()).keys()

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        quantizable(self.layers())[name].load_quantized(name, matrix)

    def packed_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrices, the norms and the embeddings."""
        return packed_weights(self.layers())

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them."""
        load_packed(self.layers(), tensors)

    def kv_specs(self) -> list[KVSpec]:
        """Return none: keys and values are used in their own step alone."""
        return []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raise: it has none."""
        raise NotImplementedError(f"{self.context.config.architecture} has no logits")

    def _num_classes(self) -> int:
        names = self._hf.get("id2label")
        known = len(names) if isinstance(names, Mapping) else 0
        return known or self._fields.whole("num_labels", 2)

    def _head(self, name: str, rows: int, *, bias: bool = True) -> Linear:
        head = Linear([(name, rows)], self._hidden, self.context, bias=bias)
        del self.context.hooks.matrices[name]  # `forward` does not multiply it
        return head

    def _starts(self, batch: ForwardBatch) -> list[int]:
        return [*(batch.positions == 0).nonzero()[:, 0].tolist(), len(batch.positions)]

    def _attend(
        self,
        qkv: torch.Tensor,
        starts: Sequence[int],
        angles: torch.Tensor | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the result of attention, [tokens, hidden].

        Args:
            qkv: queries, keys and values, [tokens, 3 * hidden].
            starts: see `Ops.attend_within`.
            angles: rotate q and k.
            window: see `Ops.attend_within`.
        """
        ops = self.context.ops
        q, k, v = qkv.view(-1, 3, self._heads, self._head_size).unbind(1)
        if angles is not None:
            ops.rotate(q, angles)
            ops.rotate(k, angles)
        return ops.attend_within(q, k, v, starts, self._head_size**-0.5, window).flatten(1)
