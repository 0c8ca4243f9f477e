"""Worker hooks of step parts: one protocol for each thing that a part does.

The half of a part in a worker is an object of any class with the members of the protocols that it
needs; see `engine_hooks`. Any half may also have `close()`, which releases its resources and is
called once.

The hooks of a step are called if the engine's half gave data for it, `PlanData.begin`: hooks of
`WorkerStep`, `HiddenStates` and `ModelLogits`, and hooks in the layers of the model. They get the
rows of the requests that use the part, and no others. The other hooks need no half in the engine.
"""

# ruff: noqa: ARG002

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from hardpoint.plugins.model.forward import Forward
from hardpoint.plugins.requests.plan import SchedulerOutput

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.forward import Attend, AttentionWeights, Branch
    from hardpoint.plugins.sampling.phases import LogitsStage
    from hardpoint.plugins.sampling.rows import DraftedStep, LogitsRequest

    from .worker_data import AllocatedCache, KVBlocks, StepRows

__all__ = [
    "BlockAccess",
    "CacheObserver",
    "ForwardWrapper",
    "HiddenStates",
    "InputEmbeddings",
    "LayerWrapper",
    "LinearProducts",
    "ModelLogits",
    "ResidualStream",
    "WorkerCalls",
    "WorkerMemory",
    "WorkerStep",
]


class WorkerStep(Protocol):
    """Takes the data of the engine's half for a step, and reports to it.

    Attributes:
        only_users: whether `finished` is called only for requests that use the part, i.e. of
            plans with data of the engine's half.
    """

    only_users: ClassVar[bool] = False

    @abstractmethod
    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the data of the engine's half, before the model runs."""

    def processed(
        self, stage: LogitsStage, logits: torch.Tensor, requests: Sequence[LogitsRequest]
    ) -> None:
        """Read the logits as they are after a stage, in the rank that samples.

        Called for `MODEL`, then for `MASK`, if there is one, and for each logits processor that
        runs. After a fault of a processor, they follow again; the last time counts.

        Args:
            stage: the last stage.
            logits: float32 [rows, vocab_size]; a copy, which the half may keep.
            requests: request of each row, or its view after a draft.
        """
        return None

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Read the tokens of the step by request, before `report`, in the rank that samples.

        Tokens of requests that use the part: accepted drafts, then one more token.
        """
        return None

    def report(self) -> bytes | None:
        """Return a report of the step for the engine's half.

        If a part moves blocks, each rank's report reaches it; else the report of the rank that
        samples.
        """
        return None

    def finished(self, request_ids: Collection[str]) -> None:
        """Notify the half of requests that have ended; without `only_users`, of all.

        Needs no data of the engine's half for the step.
        """
        return None


class HiddenStates(Protocol):
    """Reads or changes the hidden states that the model gave."""

    @abstractmethod
    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        """Return changed hidden states [tokens, hidden_size] of a step; None leaves them."""


class ModelLogits(Protocol):
    """Changes the logits of the model, or combines the logits of a group."""

    def logits(self, logits: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor | None:
        """Return changed logits, before masks and logits processors; None leaves them.

        Args:
            logits: float32 [rows, vocab_size].
            request_ids: request of each row; a request with drafts has one more row for each.
        """
        return None

    def combine(self, logits: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return the combined logits of a request and its members.

        Called in the rank that samples, before `logits`, for each row of a request for which
        `FrontendHalf.members` of the part opened members; needs no data of the engine's half. The
        token sampled from the result is that of the request and of its members. A fault ends the
        request, whatever the `fault_scope` of the part.

        Args:
            logits: float32 [1 + members, vocab_size]; the first row is the request's.
            arguments: arguments of the request for the part, as plain data.

        Returns:
            [vocab_size]; without an override, the request's own.
        """
        return logits[0]


class DraftVerifier(Protocol):
    """Verifies draft tokens, in the rank that samples."""

    @abstractmethod
    def verify_drafts(self, step: DraftedStep) -> Sequence[int]:
        """Return how many drafts of each request of `step.requests` are accepted.

        Called in steps with drafts of any part; needs no data of the engine's half. Of several
        halves, the last one is called. A draft can be accepted if it is the token that
        `step.sample` returned for the row before it. The request then gets its accepted drafts,
        and the token of the row after them. So drafts change no token.

        An exception ends the step as one of the sampler does.
        """


class InputEmbeddings(Protocol):
    """Changes the embeddings that enter the first layer.

    Attributes:
        encodes: whether it encodes the features of plans, `SchedulerOutput.encoder_inputs`.
        wants_layers: whether the hooks in the layers are called in this step; read after `begin`.
            If not, a step of few tokens may be repeated without Python.
    """

    encodes: ClassVar[bool] = False
    wants_layers: bool = True

    @abstractmethod
    def embedded(self, embedded: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        """Return changed embeddings [tokens, hidden_size] of a step; None leaves them.

        Called with the tokens as they enter the first layer. The keys and values that follow
        depend on it, so that `BlockKey.block_key` has to differ where it changes any.
        """


class LinearProducts(Protocol):
    """Changes the products of linear layers.

    Attributes:
        wants_layers: see `InputEmbeddings`.
    """

    wants_layers: bool = True

    @abstractmethod
    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        x: torch.Tensor,
        y: torch.Tensor,
        rows: StepRows,
    ) -> torch.Tensor | None:
        """Return a changed product of a linear layer; None leaves it. See `LayerHooks.linear`.

        The keys and values that follow depend on it, as on the result of `embedded`.

        Args:
            parts: the stacked checkpoint matrices: name without `.weight`, rows of this rank.
            x: [tokens, columns].
            y: [tokens, rows of all parts].
            rows: the requests of these tokens.
        """


class ResidualStream(Protocol):
    """Reads or changes the outputs of attention and MLP of each layer, or skips layers.

    Attributes:
        layers: decoder layers for which `added` is called in this step, by their indices in the
            model; read after `begin`. None is all.
        wants_layers: see `InputEmbeddings`.
    """

    layers: Collection[int] | None = None
    wants_layers: bool = True

    def added(
        self,
        layer: int,
        branch: Branch,
        residual: torch.Tensor,
        delta: torch.Tensor,
        rows: StepRows,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a changed residual stream and a changed layer output; None leaves both.

        See `LayerHooks.added`. The keys and values that follow depend on it, as on `embedded`.

        Args:
            layer: its index in the model.
            branch: source of `delta`.
            residual: [tokens, hidden_size]; not to be changed in place.
            delta: the same.
            rows: the requests of these tokens.
        """
        return None

    def skips(self, layer: int, rows: StepRows) -> torch.Tensor | None:
        """Return which tokens skip a layer, bool [tokens]; None if none does.

        Called before each layer. The residual stream of these tokens stays as it is: outputs of
        attention and MLP of the layer are zero when `added` of all parts is called. The layer
        computes keys and values of these tokens from this residual stream, by its own norm and
        projections, so that later tokens of any depth see them (state propagation, Schuster et al.,
        "Confident adaptive language modeling", 2022). States of layers without attention advance
        likewise. To end the layers of a token, let it skip all that follow.

        A token's result must not depend on other tokens of the step. Keys and values depend on it,
        as on `embedded`.

        Args:
            layer: its index in the model.
            rows: the requests of these tokens.
        """
        return None


class LayerWrapper(Protocol):
    """Wraps the attention of each layer.

    Attributes:
        wants_layers: see `InputEmbeddings`.
    """

    wants_layers: bool = True

    @abstractmethod
    def around_layers(self, attend: Attend) -> Attend:
        """Return a function that is called instead of `attend` for each layer of the step."""

    def take_attention_weights(self, weights: AttentionWeights) -> None:
        """Take the attention weights of the step, to be called in its layers.

        Called before `around_layers`. The start fails with an attention backend without
        `reports_weights`.
        """
        return None

    def after_layers(self) -> None:
        """Complete the calls of `around_layers`; called after the last layer."""
        return None


class ForwardWrapper(Protocol):
    """Wraps the forward pass of the model.

    Attributes:
        packs: whether `ForwardStep.packed` is needed.
        changes_inputs: whether its function changes the inputs of a step. It is then around the
            functions of halves that do not, such as functions that repeat recorded steps.
    """

    packs: ClassVar[bool] = False
    changes_inputs: ClassVar[bool] = False

    @abstractmethod
    def around_model(self, forward: Forward) -> Forward:
        """Return a function that is called instead of `forward` in each step.

        Called once, when the model is loaded. `forward` has the functions of the parts before this
        one in it; a function that returns hidden states without calling it skips them. An exception
        of the function ends the step as one of the model does.
        """

    def idle(self) -> bool | None:
        """Do one piece of work ahead, while the engine has nothing to do.

        A request that comes waits until it returns. Never called if no half has it.

        Returns:
            Whether there is more to do now; None if there will be nothing until the KV cache is
            allocated again.
        """
        return None


class WorkerMemory(Protocol):
    """Allocates memory in a worker."""

    @abstractmethod
    def memory(self) -> Mapping[str, int]:
        """Return the bytes that the half is going to allocate, by purpose.

        Called once, before the KV cache is sized, which leaves them free.
        """

    def sleep(self, level: int) -> None:
        """Release memory, see `Worker.sleep`; level 2 is followed by `close`."""
        return None

    def wake_up(self) -> None:
        """Allocate the memory that `sleep` released."""
        return None


class CacheObserver(Protocol):
    """Keeps data that depends on the KV cache or on the weights of the model."""

    @abstractmethod
    def cache_allocated(self, cache: AllocatedCache) -> None:
        """Notify the half of the KV cache, which is allocated, also again after a sleep."""

    @abstractmethod
    def cache_released(self) -> None:
        """Drop all references to the KV cache before its memory is released."""

    def block_memory(self) -> Sequence[torch.Tensor]:
        """Return the memory of the half that belongs to blocks, to be moved with them.

        Called after `cache_allocated`, if a part moves blocks. The identity of the blocks differs
        from the identity of blocks without it.

        Returns:
            Per layer of this rank, uint8 [num_blocks, bytes].
        """
        return ()

    def weights_changed(self) -> None:
        """Notify the half that the model has other weights from the next step on."""
        return None


class BlockAccess(Protocol):
    """Reads and writes blocks of the KV cache; of a part with `StepPart.moves_blocks`."""

    @abstractmethod
    def start(self, blocks: KVBlocks | None) -> bytes | None:
        """Take the KV cache, which was just allocated.

        Args:
            blocks: None if another rank could not start its half again: this one is not to touch a
                block any more.

        Returns:
            Data for `BlockTransfer.started`.
        """

    @abstractmethod
    def release_blocks(self) -> None:
        """Release the KV cache because a sleep releases its memory."""

    @abstractmethod
    def take_blocks(self, blocks: KVBlocks) -> None:
        """Take the KV cache, which was allocated again after `release_blocks`."""


class WorkerCalls(Protocol):
    """Answers calls of the engine's half, `EngineHalfContext.call_workers`."""

    @abstractmethod
    def call(self, message: bytes) -> bytes:
        """Answer a call of the engine's half; between steps.

        Raises:
            HardpointError: gets to the engine's half, as other exceptions do as faults.
        """


WorkerHooks: TypeAlias = (
    WorkerStep
    | HiddenStates
    | ModelLogits
    | DraftVerifier
    | InputEmbeddings
    | LinearProducts
    | ResidualStream
    | LayerWrapper
    | ForwardWrapper
    | WorkerMemory
    | CacheObserver
    | BlockAccess
    | WorkerCalls
)
"""The half of a step part in a worker, which has the members of at least one protocol."""
