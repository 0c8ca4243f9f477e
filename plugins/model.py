"""Models: what computes hidden states and logits of one architecture."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from .behaviour import fitting, returns
from .component import Component, Context
from .ops import Ops
from .parallel import Cut, Parallel
from .quantization import QuantizedMatrix

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .loader import ModelFiles
from .attention import KVSpec
from .loader import ModelConfig
from .logits import TensorSpec
from .media_format import MediaFormat

__all__ = [
    "Advance",
    "Attend",
    "ForwardBatch",
    "LayerHooks",
    "LinearMatrix",
    "Model",
    "ModelContext",
    "Recur",
]


class Attend(Protocol):
    """Attention of a layer, as `ForwardBatch.attend`."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the result of attention for q [tokens, num_heads, head_size], shaped as q.

        Args:
            layer: index in `Model.kv_specs`.
            q: queries.
            k: keys [tokens, num_kv_heads, head_size].
            v: values, like k. Of a layer with a `KVSpec.value_size` they are k, whose last elements
                are the values, and heads of the result have so many elements.
            angles: float32 [tokens, size], as for `Ops.rotate`. With them, the first `size`
                elements of the heads of q and k are rotated first, perhaps in place.
        """


class Advance(Protocol):
    """Moves the state of a layer over the tokens of sequences, for `ForwardBatch.recur`."""

    def __call__(
        self,
        states: Sequence[torch.Tensor],
        starts: np.ndarray[Any, np.dtype[np.int64]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return outputs [tokens, ...], and the states after the last token of each sequence.

        How the tokens of a sequence are divided into calls changes no result, but for rounding.

        Args:
            states: one tensor [seqs, ...] per `TensorSpec`, before the first token of each
                sequence. They are copies, which may be changed and returned.
            starts: int [seqs + 1]; tokens of sequence i are starts[i]:starts[i+1], at least one.
            inputs: those of the call, [tokens, ...].
        """


class Recur(Protocol):
    """Recurrence of a layer that keeps a state, as `ForwardBatch.recur`."""

    def __call__(self, layer: int, advance: Advance, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of `advance`, for all tokens of the step.

        It is called for some of the sequences at a time, with parts of their tokens: a state is
        kept where a block of the KV cache ends, too, so that other requests find it there.

        Args:
            layer: index in `Model.state_specs`.
            advance: computes outputs and the states that follow.
            inputs: tensors [tokens, ...] of all tokens of the step.
        """


def no_states(layer: int, advance: Advance, *inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Refuse a call of `ForwardBatch.recur`; that of batches of models without states.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"recur: expected a layer of state_specs(), which has none, got {layer}")


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One flat batch of tokens from many sequences, prefill and decode mixed.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens]; position of each token in its own sequence.
        hidden: [tokens, hidden_size], what `forward` of the stage before returned; None in the
            first stage.
        attend: attention of a layer: `attend(layer, q, k, v)`, or with `angles` after them, which
            rotate q and k.
        routed_experts: int32 [tokens, layers, experts per token], of the size that
            `Model.routed_experts` returns: if a request asks for them, a mixture of experts writes
            the experts of each token here, in the layers of its stage. None if no request does.
        token_types: int64 [tokens]; 1 for tokens of the second of two texts, 0 for others. None if
            all are 0, and for models without `token_types`.
        recur: recurrence of a layer of `Model.state_specs`: `recur(layer, advance, x)`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attend: Attend = field(repr=False)
    hidden: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    recur: Recur = field(default=no_states, repr=False)


@dataclass(frozen=True)
class LinearMatrix:
    """A matrix that a linear layer multiplies, as this rank has it.

    Attributes:
        stored_as: the checkpoint's matrix that it is, or is a part of; without `.weight`.
        shape: rows and columns of the checkpoint's matrix.
        rows: the rows of it that this rank has.
        columns: the columns of it that this rank has.
    """

    stored_as: str
    shape: tuple[int, int]
    rows: range
    columns: range


Branch = Literal["attention", "mlp"]


@dataclass(eq=False)
class LayerHooks:
    """Changes by step parts in the layers of a model, set while a step that they change runs.

    `Embedding.changed` and `Linear` of `hardpoint.toolkit.layers` call the first two, the model the
    third. A model that does not call one is refused together with a part that needs it.

    Attributes:
        embedded: called with the embedded tokens [tokens, hidden_size], where they enter the first
            layer; returns them, or others of the same shape.
        linear: called with the checkpoint matrices of a product, x [tokens, columns] and
            y [tokens, rows]; returns y, or another one. The matrices are (name without `.weight`,
            rows of this rank), stacked in this order. Where ranks add up their parts of y, it is
            called before that.
        added: called after attention and after the MLP of a decoder layer, with its index in the
            model, "attention" or "mlp", the residual stream [tokens, hidden_size] and what is about
            to be added to it, of the same shape; may change both in place. Where ranks share the
            layer, it is called after they have added up their parts.
        matrices: those that `linear` is called with, by name; layers add theirs when they are
            made.
    """

    embedded: Callable[[torch.Tensor], torch.Tensor] | None = None
    linear: (
        Callable[[Sequence[tuple[str, int]], torch.Tensor, torch.Tensor], torch.Tensor] | None
    ) = None
    added: Callable[[int, Branch, torch.Tensor, torch.Tensor], None] | None = None
    matrices: dict[str, LinearMatrix] = field(default_factory=dict)


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
        hooks: what step parts change in the layers of a step.
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
    found = getattr(sinks, "shape", None), str(getattr(sinks, "dtype", None))
    return found == ((heads,), "torch.float32")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


SHAPES = fitting(
    "a shape per name",
    lambda found: isinstance(found, Mapping) and all(map(is_shape, found.values())),
)
CUTS = fitting(
    "a Cut inside of the shape of each name",
    lambda found: (
        isinstance(found, Mapping) and all(isinstance(cut, Cut) for cut in found.values())
    ),
)
NAMES = fitting("names", lambda found: isinstance(found, Iterable) and not isinstance(found, str))
SPECS = fitting(
    "a list of KVSpec of whole numbers >= 1, a finite scale, a softcap > 0 and sinks float32 "
    "[num_heads], where num_kv_heads divides num_heads and value_size is at most head_size",
    lambda found: isinstance(found, list) and all(map(_is_spec, found)),
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
            isinstance(one, TensorSpec) and is_shape(one.shape) and one.dtype in _STATE_DTYPES
            for one in tensors
        )
    )


STATES = fitting(
    "a list with a tuple of TensorSpec per layer, at least one in each",
    lambda found: isinstance(found, list) and all(map(_is_state, found)),
)
EXPERTS = fitting(
    "layers and experts per token, or None",
    lambda found: found is None or (is_shape(found) and len(found) == 2),
)
VARIANT = fitting("a string", lambda found: isinstance(found, str))


_WIDTHS = ("hidden_size", "n_embd", "d_model")
"""Names of the width of hidden states in the configurations of checkpoints."""


class Model(Component):
    """One architecture. Its entry-point name is the name in a checkpoint's `architectures`."""

    parallelism: ClassVar[tuple[str, ...]] = ()
    """Which of "tensor", "pipeline" and "expert" of `parallel` it honours; others are refused."""
    generates: ClassVar[bool] = True
    """Whether it has logits of the next token; if not, step parts alone have tasks for it."""
    pooler: ClassVar[str] = "last"
    """Name of the pooler of its vectors, where its files name none."""
    classifies: ClassVar[bool] = False
    """Whether it has a head that classifies, `classify`, instead of vectors."""
    token_types: ClassVar[bool] = False
    """Whether it reads `ForwardBatch.token_types`, unless the config has but one type."""

    sees_ahead: ClassVar[bool] = False
    """Whether tokens of an image see those after them, by `AttentionStep.sees`."""

    is_architecture: ClassVar[bool] = True
    """Whether the plugin's name is that of the architecture which it computes."""

    context: ModelContext

    @classmethod
    def implementation(cls, architecture: str) -> str | None:  # noqa: ARG003
        """Return the name of the `models` plugin that computes an architecture; None if none does.

        Asked of the plugin in `models.use`, and of that in `models.fallback` about architectures
        that are no name of a plugin. By default None.
        """
        return None

    @classmethod
    def media_format(cls, config: ModelConfig, files: ModelFiles | None) -> MediaFormat | None:  # noqa: ARG003
        """Return how images become tokens of prompts; None, the default, for text alone.

        Called in the frontend and in the engine, where the model itself is not built.

        Raises:
            ModelError: the model's files ask for what is not supported.
        """
        return None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that stages pass on; by default that of the config."""
        hf = self.context.config.hf
        return int(next(hf[name] for name in _WIDTHS if name in hf))

    @property
    @returns(EXPERTS)
    def routed_experts(self) -> tuple[int, int] | None:
        """Layers of the whole model, and experts that a token has in each.

        None, the default: it is no mixture of experts, or does not report which experts it chose.
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
        the class that declares it, not for those derived from it. With it, steps of few tokens take
        less time: Python runs for the first ones of their size only. Steps that report
        `routed_experts` are not recorded.
        """
        return False

    @returns(SHAPES)
    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the needed checkpoint tensors, by Hugging Face name.

        They are those of the whole tensors, of which this rank may need a part: `weight_cuts`.
        """

    @returns(CUTS)
    def weight_cuts(self) -> Mapping[str, Cut]:
        """Return the parts of the tensors of which this rank needs a part; the others are whole.

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
        """Return the names in `weight_shapes` of matrices that may have few bits.

        Those that have are given to `load_quantized`; the others, and by default all, to
        `load_weights` as tensors.
        """
        return ()

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of `quantizable`, cut as in `weight_cuts`, in the place of its tensor.

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
        """Load what `packed_weights` returned in an earlier process, instead of `load_weights`.

        Args:
            tensors: tensors on the CPU, in memory that cannot be written to while they are used.

        Raises:
            KeyError, ValueError: a name, shape or dtype is not what it should be; `load_weights`
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
        for such a layer. Speculation and KV connectors are refused for a model that has one.
        """
        return []

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden]; of a stage but the last, what the next one needs.

        Calls `batch.attend` once for each layer of `kv_specs`, with tensors of the context's dtype
        and device, and `batch.recur` once for each layer of `state_specs`. A step of two tokens is
        tried when the weights have been loaded.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of chosen hidden states [rows, hidden].

        Called in the last stage alone, in all of its ranks.
        """

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the embeddings of media, each [length, hidden_size] for the tokens of one.

        Called with a `media_format` alone, in the ranks of the first stage.

        Args:
            modality: what all of them are.
            items: what `MediaFormat.process` made of each, on the context's device.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encode_media")

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits of classes [rows, classes] of the vectors of prompts [rows, hidden].

        Called with `classifies` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no classify")
