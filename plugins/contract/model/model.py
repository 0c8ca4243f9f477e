"""Models: compute hidden states and logits of one architecture."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import fitting, returns
from hardpoint.plugins.config.model_files import ModelConfig
from hardpoint.plugins.process.parallel import Parallel
from hardpoint.plugins.requests.media_format import MediaFormat

from .attention_step import KVSpec
from .cuts import Cut
from .forward import ForwardBatch, LayerHooks, TensorSpec
from .matrices import QuantizedMatrix
from .ops import Ops

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.config.model_files import ModelFiles

__all__ = ["Model", "ModelContext"]


@dataclass(frozen=True, kw_only=True)
class ModelContext(Context["Model"]):
    """Context of a model.

    Attributes:
        config: config of the checkpoint.
        dtype: dtype of weights and hidden states.
        device: device of both.
        max_model_len: maximum length of a sequence.
        ops: the operations of its layers, on that device.
        parallel: the share of the model that this rank computes; by default all of it.
        hooks: changes of step parts in the layers of a step.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    ops: Ops
    parallel: Parallel = field(default_factory=Parallel)
    hooks: LayerHooks = field(default_factory=LayerHooks)


def is_shape(shape: Any) -> bool:
    """Return whether a value is the shape of a tensor."""
    return isinstance(shape, tuple | list) and all(isinstance(n, int) and n >= 0 for n in shape)


def _is_spec(spec: Any) -> bool:
    if not isinstance(spec, KVSpec):
        return False
    numbers = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.window)
    return (
        all(type(number) is int and number >= 1 for number in numbers if number is not None)
        and None not in numbers[:3]
        and spec.num_heads % spec.num_kv_heads == 0
        and isinstance(spec.scale, int | float)
        and math.isfinite(spec.scale)
        and (spec.softcap is None or _is_positive(spec.softcap))
        and (spec.value_size is None or _is_size(spec.value_size, spec.head_size))
        and (spec.sinks is None or _are_sinks(spec.sinks, spec.num_heads))
    )


def _is_size(value: Any, at_most: int) -> bool:
    return type(value) is int and 1 <= value <= at_most


def _are_sinks(sinks: Any, heads: int) -> bool:
    shape_and_dtype = getattr(sinks, "shape", None), str(getattr(sinks, "dtype", None))
    return shape_and_dtype == ((heads,), "torch.float32")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


SHAPES = fitting(
    "a shape per name",
    lambda value: isinstance(value, Mapping) and all(map(is_shape, value.values())),
)
CUTS = fitting(
    "a Cut inside of the shape of each name",
    lambda value: (
        isinstance(value, Mapping) and all(isinstance(cut, Cut) for cut in value.values())
    ),
)
NAMES = fitting("names", lambda value: isinstance(value, Iterable) and not isinstance(value, str))
SPECS = fitting(
    "a list of KVSpec of whole numbers >= 1, a finite scale, a softcap > 0 and sinks float32 "
    "[num_heads], where num_kv_heads divides num_heads and value_size is at most head_size",
    lambda value: isinstance(value, list) and all(map(_is_spec, value)),
)
_STATE_DTYPES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
)


def _is_state(tensors: Any) -> bool:
    return (
        isinstance(tensors, tuple)
        and len(tensors) > 0
        and all(
            isinstance(spec, TensorSpec) and is_shape(spec.shape) and spec.dtype in _STATE_DTYPES
            for spec in tensors
        )
    )


STATES = fitting(
    "a list with a tuple of TensorSpec per layer, at least one in each",
    lambda value: isinstance(value, list) and all(map(_is_state, value)),
)
EXPERTS = fitting(
    "layers and experts per token, or None",
    lambda value: value is None or (is_shape(value) and len(value) == 2),
)
VARIANT = fitting("a string", lambda value: isinstance(value, str))


_WIDTHS = ("hidden_size", "n_embd", "d_model")
"""Names of the width of hidden states in the configurations of checkpoints."""


class Model(Component):
    """One architecture. Its entry-point name is the name in a checkpoint's `architectures`."""

    parallelism: ClassVar[tuple[str, ...]] = ()
    """Which of "tensor", "pipeline" and "expert" of `parallel` it honors; others are rejected."""
    generates: ClassVar[bool] = True
    """Whether it has logits of the next token; if not, step parts alone have tasks for it."""
    pooler: ClassVar[str] = "last"
    """Name of the pooler of its vectors, where its files name none."""
    classifies: ClassVar[bool] = False
    """Whether it has a head that classifies, `classify`, instead of vectors."""
    token_types: ClassVar[bool] = False
    """Whether it reads `ForwardBatch.token_types`, unless the config has but one type."""

    sees_ahead: ClassVar[bool] = False
    """Whether tokens of an image see later tokens of it, by `AttentionStep.sees`."""

    is_architecture: ClassVar[bool] = True
    """Whether the plugin has the name of its architecture."""

    context: ModelContext

    @classmethod
    def implementation(cls, architecture: str) -> str | None:  # noqa: ARG003
        """Return the name of the `models` plugin that computes an architecture; None if none does.

        Asked of the plugin in `models.use`, and of that in `models.fallback` about architectures
        that are not the name of a plugin. By default None.
        """
        return None

    @classmethod
    def media_format(cls, config: ModelConfig, files: ModelFiles | None) -> MediaFormat | None:  # noqa: ARG003
        """Return how images become tokens of prompts; None, the default, for text alone.

        Called in the frontend and in the engine, where the model itself is not built.

        Raises:
            ModelError: the model's files need an unsupported feature.
        """
        return None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that stages exchange; by default the config's."""
        hf = self.context.config.hf
        return int(next(hf[name] for name in _WIDTHS if name in hf))

    @property
    @returns(EXPERTS)
    def routed_experts(self) -> tuple[int, int] | None:
        """Layers of the whole model, and experts that a token has in each.

        None, the default: it is not a mixture of experts, or does not report which experts it
        chose.
        """
        return None

    @property
    @returns(VARIANT)
    def kv_variant(self) -> str:
        """The settings that the keys and values of a token depend on besides weights and config.

        For factors of rotary embeddings that `max_model_len` chooses, which one is chosen. It is
        part of the keys of KV blocks. "", the default: they depend on nothing else.
        """
        return ""

    @property
    def replayable(self) -> bool:
        """Whether steps with as many tokens run the same operations, which may be recorded.

        `forward` then computes with nothing but `context.ops`, `batch.attend`, operations of torch
        and views, and does not look at elements of tensors. Operations of torch are recorded on a
        GPU alone; `Ops.record` of a CPU notices them, and Python runs in every step. It holds for
        the declaring class, not for its subclasses. With it, steps of few tokens take
        less time: Python runs for the first ones of their size only. Steps that report
        `routed_experts` are not recorded.
        """
        return False

    @returns(SHAPES)
    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the needed checkpoint tensors, by Hugging Face name.

        The shapes are of whole tensors; this rank may need a part of them: `weight_cuts`.
        """

    @returns(CUTS)
    def weight_cuts(self) -> Mapping[str, Cut]:
        """Return the parts of tensors that this rank needs; unnamed tensors are whole.

        `load_weights` gets these parts, and no more is read of the files where they allow it.
        """
        return {}

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load every tensor of `weight_shapes`, cut as in `weight_cuts`, in any order.

        Their shapes are checked.

        They are CPU tensors of any floating dtype; fuse and convert them here.
        """

    @returns(NAMES)
    def quantizable(self) -> Iterable[str]:
        """Return the names in `weight_shapes` of quantizable matrices.

        Quantized weights are passed to `load_quantized`; the others, and by default all, to
        `load_weights` as tensors.
        """
        return ()

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of `quantizable`, cut as in `weight_cuts`, instead of its tensor.

        Called while `load_weights` asks for more weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_quantized")

    def packed_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Return the weights as `load_weights` has packed them, by names of the model's own.

        The weight cache keeps it in a file, for `load_packed` of a later process with the same
        files, config, dtype, options and operations. Contiguous tensors, which stay as they are.
        None, the default: it is not kept.
        """
        return None

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `packed_weights` from an earlier process, instead of `load_weights`.

        Args:
            tensors: tensors on the CPU, in memory that cannot be written to while they are used.

        Raises:
            KeyError, ValueError: a name, shape or dtype is wrong; `load_weights`
                is called then.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_packed")

    @returns(SPECS)
    @abstractmethod
    def kv_specs(self) -> list[KVSpec]:
        """Return one spec per attention layer of this stage, with the heads of this rank."""

    @returns(STATES)
    def state_specs(self) -> list[tuple[TensorSpec, ...]]:
        """Return the tensors of each layer of this stage that keeps a state; by default none.

        A state replaces the keys and values of all tokens before: `forward` calls `batch.recur`
        for such a layer. Speculation and KV connectors are rejected for a model that has one.
        """
        return []

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden], or the input of the next pipeline stage.

        Calls `batch.attend` once for each layer of `kv_specs`, with tensors of the context's dtype
        and device, and `batch.recur` once for each layer of `state_specs`. A step of two tokens is
        tried when the weights have been loaded.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of chosen hidden states [rows, hidden].

        Called in the last stage alone, in all of its ranks.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens [tokens, hidden], as they enter the first layer.

        For drafting heads that share the embedding; optional.
        """
        raise NotImplementedError(f"{type(self).__name__} has no embed()")

    def unembed(self, residual: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of the residual stream after any layer [rows, hidden].

        They are the logits of the model if it ended after the layer: its last norm, then
        `compute_logits`. For plugins; optional.
        """
        raise NotImplementedError(f"{type(self).__name__} has no unembed()")

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the embeddings of media, each [length, hidden_size] for the tokens of one.

        Called with a `media_format` alone, in the ranks of the first stage.

        Args:
            modality: modality of all items.
            items: `MediaFormat.encoder_input` of each, on the context's device.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encode_media")

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits of classes [rows, classes] of the vectors of prompts [rows, hidden].

        Called with `classifies` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no classify")
