"""Models, weight loaders and attention backends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

from .component import Component, Context
from .ops import Ops
from .parallel import Cut, Parallel, needed_part
from .quantization import QuantizedMatrix, QuantizedWeight
from .type_variables import CacheT, PlanT

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "Attend",
    "AttentionBackend",
    "AttentionContext",
    "AttentionStep",
    "ForwardBatch",
    "KVSpec",
    "LoaderContext",
    "Model",
    "ModelConfig",
    "ModelContext",
    "ModelFiles",
    "WeightFormat",
    "WeightLoader",
]


@dataclass(frozen=True)
class ModelFiles:
    """Location of a model.

    Attributes:
        name: as configured.
        path: a directory, or a single file.
    """

    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a model, known before its weights are read.

    Attributes:
        architecture: for example "LlamaForCausalLM"; the name of a `models` plugin.
        hf: fields of a Hugging Face `config.json`, possibly translated from another format.
        vocab_size: width of a row of logits.
        max_position_embeddings: maximum context length that the model was trained for.
        eos_token_ids: end-of-sequence tokens that the model's files name.
        dtype: of the weights on disk, "bfloat16" for example; None if mixed or unknown.
        quantization: name of the scheme (kind `quantizations`) without which weights cannot be
            read; None if each weight says how it is stored.
        default_sampling: fields of SamplingParams that the model's files recommend, checked.
    """

    architecture: str
    hf: Mapping[str, Any]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    quantization: str | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightFormat:
    """How files store a weight.

    Attributes:
        name: of a `quantizations` component, "q4_k" for example; else a dtype, "bfloat16", or what
            the format calls numbers that the loader itself dequantises, "q2_k".
        num_bytes: in the files.
        is_quantized: whether the name is that of a scheme.
        stored: what the scheme is to read, without content: tensors on torch's device "meta". None
            if the loader does not say it.
    """

    name: str
    num_bytes: int
    is_quantized: bool = False
    stored: QuantizedWeight | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderContext(Context["WeightLoader"]):
    """Context of a weight loader."""

    files: ModelFiles


class WeightLoader(Component):
    """Reads one format: the model's configuration and its weights."""

    context: LoaderContext

    @classmethod
    @abstractmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether the files have this format. Must be fast and read no weights."""

    def architecture(self) -> str | None:
        """Return the architecture's name; None, the default, leaves it to `config`.

        Called before `config`, so that an architecture that is not supported is reported before
        its fields are, which may have other names.

        Raises:
            ModelError: if the files do not say it.
        """
        return None

    @abstractmethod
    def config(self) -> ModelConfig:
        """Return the model's configuration.

        Raises:
            ModelError: if the files are damaged, incomplete or of an unknown architecture.
        """

    @abstractmethod
    def weights(
        self, shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield every weight once, as (name, CPU tensor).

        A matrix that the files store with few bits is a `QuantizedWeight`, under the name of the
        matrix; the scheme that it names reads it.

        Args:
            shapes: of the weights that the model needs, by Hugging Face name. A loader that reads
                files may also yield others; the framework checks names and shapes.
        """

    def cut_weights(
        self, shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Cut]
    ) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Yield every weight once, and of those in `cuts` the part that is needed.

        A `QuantizedWeight` has the shape of that part, or of the whole, which is cut then.

        By default they are read whole and cut; a loader that can reads less, and finds what to read
        with `hardpoint.plugins.parallel.needed_part`. For a class that overrides `weights` alone,
        the default is called, whatever it inherits.

        Args:
            shapes: as for `weights`, of whole weights.
            cuts: by name.

        Raises:
            ModelError: a weight that is to be cut has another shape than `shapes` says.
        """
        for name, weight in self.weights(shapes):
            if isinstance(weight, QuantizedWeight):
                yield name, weight
                continue
            cut = needed_part(name, weight.shape, shapes, cuts)
            yield name, weight if cut is None else cut.of(weight)

    def formats(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, WeightFormat]:  # noqa: ARG002
        """Return how the files store the weights in `shapes`, by name, without reading them.

        An empty mapping, the default: it is not known.

        Raises:
            ModelError: a weight is stored in a way that cannot be read.
        """
        return {}

    def content_hash(self, hash_file: Callable[[Path], str]) -> str | None:  # noqa: ARG002
        """Return a text that says what the weights are, the same wherever their files lie.

        It is part of the keys of KV blocks. None, the default: the loader cannot say, and a model
        that it loads cannot have a KV connector.

        Args:
            hash_file: returns the SHA-256 of a file's content, which it keeps for the next time.
        """
        return None

    def fingerprint(self) -> str | None:
        """Return a text that differs whenever `weights` would yield something else.

        For weights in files, their names, sizes and times of change. What the model makes of them
        is then kept in the weight cache. None, the default: it is not.
        """
        return None


@dataclass(frozen=True)
class KVSpec:
    """One attention layer.

    Layers whose specs differ in their windows alone have caches of one shape: layers of several
    windows may share a cache, of which each uses other blocks.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_size: elements of a head.
        scale: multiplies the scores.
        window: sliding window in tokens, the token itself included; None is unlimited.
        softcap: a score s, scaled, becomes softcap * tanh(s / softcap) before it is masked; None
            leaves it. Backends whose `softcaps` is False cannot run such a layer.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Positions of the tokens of one step. Sequences with a single query come first.

    Layers with a sliding window may have blocks of their own. They are a group then, and a step has
    one of these for each group, which differ in `block_table`, `slots` and `group` alone. Blocks
    that the group's window has passed are no longer the sequence's: they may have been written to.

    A step that `Ops.record` records for later ones, of the sizes in `Ops.record_sizes`, has one
    query per sequence. Its `seq_lens` are the most that such steps may have; its tensors stay where
    they are, and have the values of the step that runs. Some of its sequences may be padding, of
    length 0 in `lens`: their slot is -1, where nothing is written, and their result is not read.
    Its `block_table` has room for the longest sequence; unused entries are any blocks.

    Attributes:
        query_starts: int [seqs + 1]; tokens of sequence i are query_starts[i]:query_starts[i+1].
        seq_lens: int [seqs]; length of each sequence, the step's tokens included.
        num_single: number of sequences with exactly one query.
        block_table: int64 [seqs, maximum blocks of a sequence]; unused entries are 0.
        slots: int64 [tokens]; cache position of each token's K and V, block * block_size + offset.
        block_size: tokens per block.
        group: index of the group.
        on_device: `starts` and `lens`; None: they are copied when they are needed.
    """

    query_starts: np.ndarray[Any, np.dtype[np.int64]]
    seq_lens: np.ndarray[Any, np.dtype[np.int64]]
    num_single: int
    block_table: torch.Tensor
    slots: torch.Tensor
    block_size: int
    group: int = 0
    on_device: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    @property
    def starts(self) -> torch.Tensor:
        """`query_starts` on the device, int64."""
        return self._tensors[0]

    @property
    def lens(self) -> torch.Tensor:
        """`seq_lens` on the device, int64."""
        return self._tensors[1]

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.on_device is not None:
            return self.on_device
        from hardpoint.plugins.device import to_device  # noqa: PLC0415 - the contract is imported without torch

        device = self.block_table.device
        return to_device(self.query_starts, device), to_device(self.seq_lens, device)


@dataclass(frozen=True, kw_only=True)
class AttentionContext(Context["AttentionBackend"]):
    """Context of an attention backend.

    Attributes:
        dtype: of keys, values and queries.
        block_size: tokens per block.
    """

    device: torch.device
    dtype: torch.dtype
    block_size: int


class AttentionBackend(Component, Generic[CacheT, PlanT]):
    """Stores keys and values in blocks and computes attention over them. One per device.

    `AttentionBackend[Cache, Plan]` as a base says what `allocate` and `plan` return. A constructor
    raises ModelError if the backend cannot run here, so that `backend = "auto"` tries others.
    """

    kv_layout: ClassVar[str] = ""
    """Name of the cache's shape and order; caches of other layouts never meet. May be empty."""
    kv_layout_version: ClassVar[int] = 1
    """To be raised when blocks of the same layout hold other bytes than before."""
    devices: ClassVar[tuple[str, ...]]
    """Device types that it runs on."""
    softcaps: ClassVar[bool] = False
    """Whether `attend` computes `KVSpec.softcap`; otherwise models that have it are refused."""
    rotates: ClassVar[bool] = False
    """Whether it has `rotate_and_attend`; otherwise `Ops.rotate` runs before `attend`.

    With it, the `rotate` of operations is not called for attention, not even a plugin's own.
    """
    pads: ClassVar[bool] = False
    """Whether it is `replayable` in steps of the sizes of `Ops.record_sizes`, and not in others."""

    context: AttentionContext

    def describe(self) -> str:
        """Return what runs, for the line that the engine logs: "native_cpu (avx2)" for example.

        By default the name, and why the engine does not use the one that it prefers.
        """
        reason = self.context.reason
        return f"{self.name} ({reason})" if reason else self.name

    @property
    def replayable(self) -> bool:
        """Whether `Ops.record` can record `attend`.

        Repeated, it reads the plan that `plan` returned last for the same group, and the same
        cache. With `pads`, in steps of one of the sizes in `Ops.record_sizes`, it reads the tensors
        of the step that was recorded (`AttentionStep`). It holds for the class that says so, not
        for those derived from it.
        """
        return False

    @abstractmethod
    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the bytes of one block of one layer."""

    @abstractmethod
    def allocate(self, spec: KVSpec, num_blocks: int) -> CacheT:
        """Return a zeroed cache of `num_blocks` blocks for one layer.

        Layers of other groups may share it if their specs differ from this one in the window alone.
        """

    def block_views(self, cache: CacheT) -> Sequence[torch.Tensor]:
        """Return a layer's cache as bytes by block, without copying, for KV connectors.

        Args:
            cache: what `allocate` returned.

        Returns:
            Views of its memory, uint8 [num_blocks, bytes], whose rows are contiguous; together
            they hold all of each block. What is copied from a block's rows to those of another
            one, in this or another cache of the same `kv_layout`, is read there as written here.

        Raises:
            NotImplementedError: the backend has no such views, which is the default; it cannot run
                together with a KV connector.
        """
        raise NotImplementedError(f"the attention backend {self.name!r} has no block_views")

    @abstractmethod
    def plan(self, step: AttentionStep) -> PlanT:
        """Return what the layers of a group share in a step, masks and indices for example.

        Called once for each group of a step, before any of their layers attend.
        """

    @abstractmethod
    def attend(
        self,
        spec: KVSpec,
        cache: CacheT,
        plan: PlanT,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k and v to the cache, then attend causally.

        Args:
            spec: the layer.
            cache: what `allocate` returned for it.
            plan: what `plan` returned for this step.
            q: [tokens, num_heads, head_size].
            k: [tokens, num_kv_heads, head_size].
            v: like k. All three may be parts of one wider tensor: heads are contiguous, tokens
                need not be.

        Returns:
            [tokens, num_heads, head_size].
        """

    def rotate_and_attend(
        self,
        spec: KVSpec,
        cache: CacheT,
        plan: PlanT,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate the heads of q and k as `Ops.rotate` does, then `attend`; called if `rotates`.

        Args:
            spec: the layer.
            cache: as for `attend`, as those that follow.
            plan: of this step.
            q: may be changed.
            k: may be changed.
            v: like k.
            angles: float32 [tokens, size]; of each token, cosines, then sines, for the first
                `size` elements of its heads.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rotate_and_attend")


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
        """Return what attention gives for q [tokens, num_heads, head_size], as q.

        Args:
            layer: index in `Model.kv_specs`.
            q: queries.
            k: keys [tokens, num_kv_heads, head_size].
            v: values, like k.
            angles: float32 [tokens, size], as for `Ops.rotate`. With them, the first `size`
                elements of the heads of q and k are rotated first, perhaps in place.
        """


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
            `Model.routed_experts` says: if a request asks for them, a mixture of experts writes
            the experts of each token here, in the layers of its stage. None if no request does.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attend: Attend = field(repr=False)
    hidden: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ModelContext(Context["Model"]):
    """Context of a model.

    Attributes:
        config: of the checkpoint.
        dtype: of weights and hidden states.
        device: of both.
        max_model_len: maximum length of a sequence.
        ops: the operations of its layers, on that device.
        parallel: the share of the model that this rank computes; by default all of it.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    ops: Ops
    parallel: Parallel = field(default_factory=Parallel)


class Model(Component):
    """One architecture. Its entry-point name is the name in a checkpoint's `architectures`."""

    parallelism: ClassVar[tuple[str, ...]] = ()
    """Which of "tensor", "pipeline" and "expert" of `parallel` it honours; others are refused."""

    context: ModelContext

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that stages pass on; by default that of the config."""
        return int(self.context.config.hf["hidden_size"])

    @property
    def routed_experts(self) -> tuple[int, int] | None:
        """Layers of the whole model, and experts that a token has in each.

        None, the default: it is no mixture of experts, or does not report which experts it chose.
        """
        return None

    @property
    def kv_variant(self) -> str:
        """What the keys and values of a token depend on besides its weights and its config.

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
        the class that says so, not for those derived from it. With it, steps of few tokens take
        less time: Python runs for the first ones of their size only. Steps that report
        `routed_experts` are not recorded.
        """
        return False

    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the needed checkpoint tensors, by Hugging Face name.

        They are those of the whole tensors, of which this rank may need a part: `weight_cuts`.
        """

    def weight_cuts(self) -> Mapping[str, Cut]:
        """Return the parts of the tensors of which this rank needs a part; the others are whole.

        `load_weights` gets these parts, and no more is read of the files where they allow it.
        """
        return {}

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load every tensor of `weight_shapes`, cut as `weight_cuts` says, in any order.

        Their shapes are checked.

        They are CPU tensors of any floating dtype; fuse and convert them here.
        """

    def quantizable(self) -> Iterable[str]:
        """Return the names in `weight_shapes` of matrices that may have few bits.

        Those that have are given to `load_quantized`; the others, and by default all, to
        `load_weights` as tensors.
        """
        return ()

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of `quantizable`, cut as `weight_cuts` says, in the place of its tensor.

        Called while `load_weights` asks for more weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_quantized")

    def packed_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Return what `load_weights` has made of the weights, by names of the model's own.

        The weight cache keeps it in a file, for `load_packed` of a later process with the same
        files, config, dtype, options and operations. Contiguous tensors, which stay as they are.
        None, the default: it is not kept.
        """
        return None

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what `packed_weights` returned in an earlier process, instead of `load_weights`.

        Args:
            tensors: on the CPU, in memory that cannot be written to, for as long as they are used.

        Raises:
            KeyError, ValueError: a name, shape or dtype is not what it should be; `load_weights`
                is called then.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_packed")

    @abstractmethod
    def kv_specs(self) -> list[KVSpec]:
        """Return one spec per attention layer of this stage, with the heads of this rank."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden]; of a stage but the last, what the next one needs.

        Calls `batch.attend` once for each layer of `kv_specs`, with tensors of the context's dtype
        and device. A step of two tokens is tried when the weights have been loaded.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of chosen hidden states [rows, hidden].

        Called in the last stage alone, in all of its ranks.
        """
