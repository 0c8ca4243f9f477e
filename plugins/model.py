"""Models, weight loaders and attention backends: what computes hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .component import Component, Context

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
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
    "WeightLoader",
]


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is.

    Attributes:
        name: what the user called it.
        path: a directory, or a single file.
    """

    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is known of a model before its weights are read.

    Attributes:
        architecture: for example "LlamaForCausalLM"; the name of a `models` plugin.
        hf: the fields of a Hugging Face `config.json`, whatever file they came from.
        vocab_size: width of a row of logits.
        max_position_embeddings: longest context that the model was made for.
        eos_token_ids: end-of-sequence tokens that the model's files name.
        dtype: of the weights on disk, "bfloat16" for example; None if mixed or unknown.
        default_sampling: fields of SamplingParams that the model's files recommend, checked.
    """

    architecture: str
    hf: Mapping[str, Any]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoaderContext(Context["WeightLoader"]):
    """What a loader is built with."""

    files: ModelFiles


class WeightLoader(Component):
    """Reads one format: the model's configuration and its weights."""

    context: LoaderContext

    @classmethod
    @abstractmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Whether the files are of this format. Cheap: looks at names, reads no weights."""

    @abstractmethod
    def config(self) -> ModelConfig:
        """Return the model's configuration.

        Raises:
            ModelError: if the files are damaged, incomplete or of an unknown architecture.
        """

    @abstractmethod
    def weights(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight once, as (name, CPU tensor).

        Args:
            shapes: what the model wants, by Hugging Face name. A loader that reads files may
                yield others too; the framework checks the outcome.
        """


@dataclass(frozen=True)
class KVSpec:
    """One attention layer.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_size: elements of a head.
        scale: multiplies the scores.
        window: each token sees so many tokens, itself included; None is all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Where the tokens of one step stand. Sequences with a single query come first.

    Attributes:
        query_starts: int [seqs + 1]; tokens of sequence i are query_starts[i]:query_starts[i+1].
        seq_lens: int [seqs]; length of each sequence once the step's tokens are in.
        num_single: number of sequences with exactly one query.
        block_table: int64 [seqs, most blocks of any]; unused entries are 0.
        slots: int64 [tokens]; block * block_size + offset, where each token's K and V go.
        block_size: tokens of a block.
    """

    query_starts: np.ndarray[Any, np.dtype[np.int64]]
    seq_lens: np.ndarray[Any, np.dtype[np.int64]]
    num_single: int
    block_table: torch.Tensor
    slots: torch.Tensor
    block_size: int


@dataclass(frozen=True, kw_only=True)
class AttentionContext(Context["AttentionBackend"]):
    """What an attention backend is built with.

    Attributes:
        dtype: of keys, values and queries.
        block_size: tokens of a block.
    """

    device: torch.device
    dtype: torch.dtype
    block_size: int


class AttentionBackend(Component):
    """Keeps keys and values in blocks and attends over them. One per device."""

    kv_layout: ClassVar[str] = ""
    """Name of the cache's shape and order; caches of other layouts never meet. May be empty."""
    devices: ClassVar[tuple[str, ...]]
    """Device types that it runs on."""

    context: AttentionContext

    @abstractmethod
    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the bytes of one block of one layer."""

    @abstractmethod
    def allocate(self, spec: KVSpec, num_blocks: int) -> Any:
        """Return a zeroed cache of `num_blocks` blocks for one layer."""

    @abstractmethod
    def plan(self, step: AttentionStep) -> Any:
        """Prepare once per step what every layer shares (masks, indices)."""

    @abstractmethod
    def attend(
        self, spec: KVSpec, cache: Any, plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k and v to the cache, then attend causally.

        Args:
            spec: the layer.
            cache: what `allocate` returned for it.
            plan: what `plan` returned for this step.
            q: [tokens, num_heads, head_size].
            k: [tokens, num_kv_heads, head_size].
            v: like k.

        Returns:
            [tokens, num_heads, head_size].
        """


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One flat batch of tokens from many sequences, prefill and decode mixed.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens]; place of each token in its own sequence.
        attend: `attend(layer, q, k, v)` with q [tokens, num_heads, head_size], k and v
            [tokens, num_kv_heads, head_size]; returns [tokens, num_heads, head_size].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = field(
        repr=False
    )


@dataclass(frozen=True, kw_only=True)
class ModelContext(Context["Model"]):
    """What a model is built with.

    Attributes:
        config: of the checkpoint.
        dtype: of weights and hidden states.
        device: where both live.
        max_model_len: longest sequence that will come.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


class Model(Component):
    """One architecture. Its entry-point name is the name in a checkpoint's `architectures`."""

    context: ModelContext

    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that the model needs, by Hugging Face name."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take every tensor of `weight_shapes` once, in any order, already of the right shape.

        They are CPU tensors of any floating dtype; fuse and convert them here, once.
        """

    @abstractmethod
    def kv_specs(self) -> list[KVSpec]:
        """Return one spec per attention layer, in layer order."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden]."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of chosen hidden states [rows, hidden]."""
