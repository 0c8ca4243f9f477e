"""The half of a step part in a worker, and what it gets of the worker's model and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hardpoint.plugins.component.base import Source
from hardpoint.plugins.kv_cache.block_hash import BlockIdentity
from hardpoint.plugins.model.forward import Forward
from hardpoint.plugins.requests.plan import SchedulerOutput

from .components import ComponentFactory

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.attention import AttentionStep
    from hardpoint.plugins.model.forward import Attend, Branch, ForwardBatch, LinearMatrix
    from hardpoint.plugins.model.ops import Ops
    from hardpoint.plugins.sampling.phases import LogitsStage
    from hardpoint.plugins.sampling.rows import LogitsRequest

__all__ = [
    "StepRows",
    "WorkerHalf",
    "WorkerHalfContext",
]


class StepModel(Protocol):
    """A worker's model, whose results are checked.

    Attributes:
        source: names it in messages.
    """

    source: Source

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states, as `Model.forward`.

        Raises:
            PluginFaultError: the model returned something else.
        """

    def encode_media(self, modality: str, items: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the embeddings of media, as `Model.encode_media`.

        Raises:
            PluginFaultError: the model returned something else.
        """


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model of a worker, with what computes it.

    Attributes:
        model: model whose weights are loaded.
        ops: operations of its layers.
        ops_source: names them in messages.
        attention_source: names the attention of its layers in messages.
        pads: whether it runs steps with padding, see `AttentionBackend.pads`.
        num_groups: number of KV cache groups of the layers.
        unreplayable: those of operations, model and attention whose own classes do not state
            `replayable`: what they do must not be recorded.
        max_model_len: tokens of a request, at most.
        decode_bytes: returns the bytes that a step of so many sequences with one token each needs
            at once, of the maximum length; measured on a GPU, 0 elsewhere.
        matrices: matrices of `WorkerHalf.linear`, by the name that it gets.
        classify: `Model.classify`; None if the model does not classify.
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


class SequenceModel(Protocol):
    """A further model in a worker, with a KV cache of its own: sequences of tokens by name.

    Attributes:
        vocab_size: vocabulary size of the model.
        max_model_len: tokens of a sequence, at most.
        cache_bytes: bytes of its KV cache.
    """

    vocab_size: int
    max_model_len: int
    cache_bytes: int

    def extend(self, token_ids: Mapping[str, Sequence[int]]) -> torch.Tensor:
        """Append tokens to sequences; return the logits after each, float32 [sequences, vocab].

        A name that is not known begins a sequence.

        Raises:
            ValueError: no tokens for a sequence, or more than there is room for.
        """

    def length(self, name: str) -> int:
        """Return the number of tokens of a sequence; 0 if there is none."""

    def reserve(self, name: str, count: int) -> bool:
        """Return whether a sequence can get so many more tokens; the room is its own then."""

    def cut(self, name: str, length: int) -> None:
        """Forget the tokens of a sequence after the first `length`; all of them with 0."""

    def sleep(self) -> None:
        """Release the KV cache, and forget all sequences."""

    def wake_up(self) -> None:
        """Allocate the KV cache again."""

    def close(self) -> None:
        """Release the model."""


class ModelOpener(Protocol):
    """Opens further models in a worker."""

    def __call__(
        self,
        model: str,
        num_tokens: int,
        *,
        vocab_size: int | None = None,
        same_tokens: bool = False,
    ) -> SequenceModel:
        """Return a loaded model, which the caller closes. Settings are those of the engine's model.

        Args:
            model: as `EngineConfig.model`.
            num_tokens: tokens of all sequences together, for which its KV cache has room.
            vocab_size: required size of its vocabulary; None takes any.
            same_tokens: whether its token ids have to stand for the same texts as those of the
                engine's model. Where one of them has no tokenizer, they are not compared.

        Raises:
            ModelError: it cannot be loaded, has another vocabulary or tokenizer, or does not fit.
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
    """

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


@dataclass(frozen=True)
class KVBlocks:
    """The KV cache of a rank, as a step part sees it that moves blocks.

    Attributes:
        identity: what the bytes of its blocks depend on, besides tokens.
        layers: per layer of this rank, views of its memory, uint8 [num_blocks, bytes], which
            together are all bytes of each block: of keys and values, and of `block_memory`.
    """

    identity: BlockIdentity
    layers: Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class AllocatedCache:
    """The KV cache of a worker.

    Attributes:
        attend: plans a step over this cache, whose layouts it gets by group; returns its attention.
        max_model_len: tokens of a sequence, at most.
        block_size: tokens per block.
        num_groups: KV cache groups.
        num_blocks: blocks, of all groups.
        group_of: group of each layer of this rank.
        windows: tokens that the layers of each group see; None is all. Blocks before these may be
            others' by now.
    """

    attend: Callable[[Sequence[AttentionStep]], Attend]
    max_model_len: int
    block_size: int
    num_groups: int
    num_blocks: int = 0
    group_of: Sequence[int] = ()
    windows: Sequence[int | None] = ()


@dataclass(frozen=True)
class StepRows:
    """The requests of a worker's step that use a part, in the order of their tokens.

    Attributes:
        request_ids: ids of these requests.
        starts: index of the first token of each request, and at the end the number of all tokens.
    """

    request_ids: Sequence[str]
    starts: Sequence[int]


class WorkerHalf:
    """The half of a step part in a worker.

    Every method is optional. `begin`, `around_layers`, `embedded`, `linear`, `added`,
    `after_layers`, `hidden`, `logits`, `processed`, `sampled` and `report` are called in steps for
    which the engine's half gave data; those between `around_layers` and `sampled` get the rows of
    the requests that use the part, and no others. The other methods need no half in the engine.

    Attributes:
        packs: whether `ForwardStep.packed` is needed.
        encodes: whether it encodes the features of plans, `SchedulerOutput.encoder_inputs`.
        wants_layers: whether `around_layers`, `embedded`, `linear` and `added` are called in this
            step; read after `begin`. If not, a step of few tokens may be repeated without Python.
        layers: decoder layers for which `added` is called in this step, by their indices in the
            model; read after `begin`. None is all.
    """

    packs: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    wants_layers: bool = True
    layers: Collection[int] | None = None

    def start(self, blocks: KVBlocks | None) -> bytes | None:  # noqa: ARG002
        """Take the KV cache, which was just allocated; of a part that moves blocks alone.

        Args:
            blocks: None if another rank could not start its half again: this one is not to touch a
                block any more.

        Returns:
            Data for `EngineHalf.started`.
        """
        return None

    def release_blocks(self) -> None:
        """Let go of the KV cache, whose memory is released by a sleep."""

    def take_blocks(self, blocks: KVBlocks) -> None:
        """Take the KV cache, which was allocated again after `release_blocks`."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that the half is going to allocate, by what they are for.

        Called once, before the KV cache is sized, which leaves them free.
        """
        return {}

    def around_model(self, forward: Forward) -> Forward:
        """Return a function that is called instead of `forward` in each step; by default itself.

        Called once, when the model is loaded. `forward` has the functions of the parts before this
        one in it; a function that gives hidden states without it leaves those out. An exception
        of the function ends the step as one of the model does.
        """
        return forward

    def cache_allocated(self, cache: AllocatedCache) -> None:
        """Notify the half of the KV cache, which is allocated, also again after a sleep."""

    def cache_released(self) -> None:
        """Forget the KV cache, whose memory is to be released."""

    def weights_changed(self) -> None:
        """Notify the half that the model has other weights from the next step on."""

    def block_memory(self) -> Sequence[torch.Tensor]:
        """Return the memory of the half that belongs to blocks, to be moved with them.

        Called after `cache_allocated`, if a part moves blocks. The identity of the blocks differs
        from that of blocks without it.

        Returns:
            Per layer of this rank, uint8 [num_blocks, bytes].
        """
        return ()

    def finished(self, request_ids: Collection[str]) -> None:
        """Notify the half of requests that have ended, of all that the worker had."""

    def call(self, message: bytes) -> bytes:  # noqa: ARG002
        """Answer a call of the engine's half, `EngineHalfContext.call_workers`; between steps.

        Raises:
            HardpointError: gets to the engine's half, as other exceptions do as faults.
        """
        return b""

    def idle(self) -> bool | None:
        """Do one piece of work ahead, while the engine has nothing to do.

        A request that comes waits until it returns. Never called if no half overrides it.

        Returns:
            Whether there is more to do now; None if there will be nothing until the KV cache is
            allocated again.
        """
        return None

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the data of the engine's half, before the model runs."""

    def around_layers(self, attend: Attend) -> Attend:
        """Return a function that is called instead of `attend` for each layer of the step."""
        return attend

    def embedded(
        self,
        embedded: torch.Tensor,  # noqa: ARG002
        rows: StepRows,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return changed embeddings [tokens, hidden_size] of a step; None leaves them.

        Called with the tokens as they enter the first layer. The keys and values that follow
        depend on it, so that `EngineHalf.block_key` has to differ where it changes any.
        """
        return None

    def linear(
        self,
        parts: Sequence[tuple[str, int]],  # noqa: ARG002
        x: torch.Tensor,  # noqa: ARG002
        y: torch.Tensor,  # noqa: ARG002
        rows: StepRows,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return a changed product of a linear layer; None leaves it. See `LayerHooks.linear`.

        The keys and values that follow depend on it, as on those of `embedded`.

        Args:
            parts: the stacked checkpoint matrices: name without `.weight`, rows of this rank.
            x: [tokens, columns].
            y: [tokens, rows of all parts].
            rows: whose tokens these are.
        """
        return None

    def added(
        self,
        layer: int,  # noqa: ARG002
        branch: Branch,  # noqa: ARG002
        residual: torch.Tensor,  # noqa: ARG002
        delta: torch.Tensor,  # noqa: ARG002
        rows: StepRows,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a changed residual stream, and what is added to it; None leaves both.

        See `LayerHooks.added`. The keys and values that follow depend on it, as on `embedded`.

        Args:
            layer: its index in the model.
            branch: what gave `delta`.
            residual: [tokens, hidden_size]; not to be changed in place.
            delta: the same.
            rows: whose tokens these are.
        """
        return None

    def after_layers(self) -> None:
        """Complete what the calls of `around_layers` began; called after the last layer."""

    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> torch.Tensor | None:  # noqa: ARG002
        """Return changed hidden states [tokens, hidden_size] of a step; None leaves them."""
        return None

    def logits(
        self,
        logits: torch.Tensor,  # noqa: ARG002
        request_ids: Sequence[str],  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return changed logits, before masks and logits processors; None leaves them.

        Args:
            logits: float32 [rows, vocab_size].
            request_ids: request of each row; a request with drafts has one more row for each.
        """
        return None

    def processed(
        self, stage: LogitsStage, logits: torch.Tensor, requests: Sequence[LogitsRequest]
    ) -> None:
        """Read the logits as they are after a stage, in the rank that samples.

        Called for `MODEL`, then for `MASK`, if there is one, and for each logits processor that
        runs. After a fault of a processor, they follow again; the last time counts.

        Args:
            stage: what ran last.
            logits: float32 [rows, vocab_size]; a copy, which the half may keep.
            requests: request of each row, or its view after a draft.
        """

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Read the tokens of the step by request, before `report`, in the rank that samples.

        Those of requests that use the part: accepted drafts, then one more token.
        """

    def report(self) -> bytes | None:
        """Return a report of the step for the engine's half.

        Of a part that moves blocks, each rank's report reaches it; else that of the rank that
        samples.
        """
        return None

    def sleep(self, level: int) -> None:
        """Release memory, see `Worker.sleep`; level 2 is followed by `close`."""

    def wake_up(self) -> None:
        """Allocate again what `sleep` released."""

    def close(self) -> None:
        """Release resources; called once."""
