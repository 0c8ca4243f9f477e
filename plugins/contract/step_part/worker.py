"""Context of the worker half of a step part: the worker's model and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hardpoint.plugins.component.base import Source

from .components import ComponentFactory

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.forward import ForwardBatch, LinearMatrix
    from hardpoint.plugins.model.loader import WeightLoader
    from hardpoint.plugins.model.ops import Ops

__all__ = ["WorkerHalfContext"]


class StepModel(Protocol):
    """A worker's model with checks of its results.

    Attributes:
        source: names it in messages.
    """

    source: Source

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states, as `Model.forward`.

        Raises:
            PluginFaultError: the model returned something else.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden states, as `Model.compute_logits`.

        Raises:
            PluginFaultError: the model returned something else.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens [tokens, hidden_size], as `Model.embed`."""

    def unembed(self, residual: torch.Tensor) -> torch.Tensor:
        """Return logits of the residual stream after a layer, as `Model.unembed`."""

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the embeddings of media, as `Model.encode_media`.

        Raises:
            PluginFaultError: the model returned something else.
        """


class PreparedModel(Protocol):
    """The model of a worker once more, with weights of another loader."""

    def read(self) -> None:
        """Build the model, read its weights and try it; in any thread, while steps run.

        Raises:
            ModelError: weights are missing or wrong, or memory is short.
            HardpointError: a plugin failed.
        """

    def use(self) -> None:
        """Let the worker run with it from the next step on; between steps, once it is read."""

    def close(self) -> None:
        """Release the model, unless it is in use; not while it is read."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model of a worker, with its operations and attention.

    Attributes:
        model: model with loaded weights.
        ops: operations of its layers.
        ops_source: names them in messages.
        attention_source: names the attention of its layers in messages.
        pads: whether it runs steps with padding, see `AttentionBackend.pads`.
        num_groups: number of KV cache groups of the layers.
        unreplayable: operations, model or attention with classes that do not declare
            `replayable`: their calls must not be recorded.
        max_model_len: tokens of a request, at most.
        decode_bytes: returns the bytes that a step of so many sequences with one token each needs
            at once, of the maximum length; measured on a GPU, 0 elsewhere.
        matrices: matrices of `LinearProducts.linear`, by the name that it gets.
        classify: `Model.classify`; None if the model does not classify.
        loader: loader of the weights; None if this was made by hand.
        prepare_again: returns the model once more, to be read with the weights of the loader that
            its argument returns; None if this was made by hand.
    """

    model: StepModel
    ops: Ops
    ops_source: Source
    attention_source: Source
    pads: bool
    num_groups: int
    unreplayable: Sequence[Source]
    max_model_len: int
    decode_bytes: Callable[[int], int]
    matrices: Mapping[str, LinearMatrix] = field(default_factory=dict)
    classify: Callable[[torch.Tensor], torch.Tensor] | None = None
    loader: WeightLoader | None = None
    prepare_again: Callable[[Callable[[], WeightLoader]], PreparedModel] | None = None


class SequenceModel(Protocol):
    """A further model in a worker, with a KV cache of its own: sequences of tokens by name.

    It computes without LoRA adapters, taps and hooks of step parts. No keys and values are shared
    with requests of the engine, also for the engine's own model.

    Attributes:
        vocab_size: vocabulary size of the model.
        max_model_len: tokens of a sequence, at most.
        cache_bytes: bytes of its KV cache.
    """

    vocab_size: int
    max_model_len: int
    cache_bytes: int

    def extend(
        self, token_ids: Mapping[str, Sequence[int]], *, all_rows: bool = False
    ) -> torch.Tensor:
        """Append tokens to sequences; return the logits after each, float32 [sequences, vocab].

        An unknown name begins a sequence. All tokens are computed in one step: divide long ones
        by `max_step_tokens` of the context. The result is the caller's own. After
        `weights.update`, sequences of the engine's own model first compute their earlier tokens
        again.

        Args:
            token_ids: new tokens, by the name of the sequence.
            all_rows: whether to return the logits after each token, [tokens, vocab], sequence by
                sequence in the order of `token_ids`.

        Raises:
            ValueError: no tokens for a sequence, or more than there is room for; nothing is
                appended.
        """

    def length(self, name: str) -> int:
        """Return the number of tokens of a sequence; 0 if there is none, as after a sleep."""

    def reserve(self, name: str, count: int) -> bool:
        """Return whether a sequence can get so many more tokens; the room is its own then.

        It cannot if the cache is full, or beyond `max_model_len`.
        """

    def cut(self, name: str, length: int) -> None:
        """Forget the tokens of a sequence after the first `length`, which may be 0.

        Reserved room behind them is free again. Unknown names are left out.
        """

    def sleep(self) -> None:
        """Release the KV cache, and forget all sequences."""

    def wake_up(self) -> None:
        """Allocate the KV cache again."""

    def close(self) -> None:
        """Release the model."""


class MainModel(Enum):
    """The engine's own model, for `ModelOpener`; no text, because any text may name a folder."""

    MAIN = "main"


class ModelOpener(Protocol):
    """Opens further models in a worker, or the engine's own model once more."""

    def __call__(
        self,
        model: str | MainModel,
        num_tokens: int,
        *,
        vocab_size: int | None = None,
        same_tokens: bool = False,
        num_layers: int | None = None,
    ) -> SequenceModel:
        """Return a loaded model, which the caller closes, with the settings of the engine's model.

        Args:
            model: as `EngineConfig.model`; or `MAIN_MODEL` of the context, the engine's own model,
                with shared weights. Its sequences have a KV cache of their own; state its
                `cache_bytes` as `memory`.
            num_tokens: tokens of all sequences together, for which its KV cache has room.
            vocab_size: required size of its vocabulary; None takes any.
            same_tokens: whether its token ids have to stand for the same texts as the token ids of
                the engine's model. Where one of them has no tokenizer, they are not compared.
            num_layers: number of decoder layers of `MAIN_MODEL` to compute before its last norm
                and output layer (early exit), with a KV cache of these layers; None is all.

        Raises:
            ModelError: it cannot be loaded, has another vocabulary or tokenizer, or does not fit;
                or the engine's own model is divided among ranks, keeps states, has fewer layers,
                or ignores `ForwardBatch.num_layers`, as models through transformers do.
        """


@dataclass(frozen=True)
class DraftingHead:
    """A loaded head, with attention layers in the engine's KV cache.

    Attributes:
        model: the head, with loaded weights; a plugin of the kind `models`.
        loader: loader of its weights.
        first_layer: index of its first attention layer, for `AllocatedCache.attend`.
    """

    model: Any
    loader: WeightLoader
    first_layer: int


class HeadOpener(Protocol):
    """Opens drafting heads in a worker."""

    def __call__(self, model: str | MainModel, architecture: str = "") -> DraftingHead:
        """Return a loaded head, which the caller closes; dtype and length are the engine's.

        Called by constructors alone: the KV cache gets the layers of its `kv_specs`.

        Args:
            model: as `EngineConfig.model`; or `MAIN_MODEL` of the context, for a head that is in
                the files of the engine's model.
            architecture: name of the plugin that computes it; empty is that of its config.

        Raises:
            ModelError: it cannot be loaded or does not fit; or the engine's model is divided among
                ranks, or has a sliding window in all layers.
        """


@dataclass(frozen=True, kw_only=True)
class WorkerHalfContext:
    """Context of the half in a worker.

    Attributes:
        device: device of the model, a `torch.device`.
        rank: rank of the worker.
        world_size: number of workers.
        vocab_size: vocabulary size of the model.
        hidden_size: hidden size of the model.
        components: builds components of other kinds.
        describe_fault: as in `EngineHalfContext`.
        host_memory: returns the bytes that the process may still allocate in CPU memory.
        loaded: the model itself; None if the context was made by hand.
        open_model: opens a further model; None if the context was made by hand.
        open_head: opens a drafting head; None if the context was made by hand.
        num_draft_tokens: most drafts of a request that a step verifies; 0 if no part drafts.
        num_layers: layers of the model with attention, the largest `num_layers` of `open_model`;
            0 if the context was made by hand.
        MAIN_MODEL: the engine's own model, for `open_model`.
    """

    MAIN_MODEL: ClassVar[MainModel] = MainModel.MAIN

    device: Any
    rank: int
    world_size: int
    vocab_size: int
    hidden_size: int
    components: ComponentFactory
    describe_fault: Callable[[BaseException], str]
    host_memory: Callable[[], int]
    loaded: LoadedModel | None = None
    open_model: ModelOpener | None = None
    open_head: HeadOpener | None = None
    num_draft_tokens: int = 0
    num_layers: int = 0
