"""Step parts: features that take part in the step of the engine and of its workers.

A part gates requests, counts resources, puts data on the plan, masks logits, reads results, and is
notified of plans that are lost; in a worker it may run the model in another way. The engine binds
the methods that a half overrides to lists when it starts; a method that no half overrides is never
called, and none of the engine's half is called in a step without a request that uses the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from .component import Component, Context
from .config import EngineConfig
from .grammars import Vocabulary
from .kv_cache import BlockIds, KVCacheGroup, KVEvent
from .kv_connector import BlockIdentity
from .manifest import Source
from .plan import GrammarBitmask, ModelRunnerOutput, RequestFault, SchedulerOutput
from .request import Request
from .requests import EngineCoreRequest
from .stats import SchedulerStats
from .step_record import WaitReason

if TYPE_CHECKING:
    import torch

    from .attention import AttentionStep
    from .model import Attend, ForwardBatch
    from .ops import Ops

__all__ = [
    "AllocatedCache",
    "ComponentCalls",
    "ComponentFactory",
    "EngineHalf",
    "EngineHalfContext",
    "FaultCounter",
    "Forward",
    "ForwardStep",
    "KVBlocks",
    "LoadedModel",
    "PackedInputs",
    "StepAttention",
    "StepModel",
    "StepPart",
    "StepPartContext",
    "StepRows",
    "WorkerHalf",
    "WorkerHalfContext",
]


R = TypeVar("R")


class ComponentCalls(Protocol):
    """Calls the methods of one component, which are timed and named while they run.

    Attributes:
        source: names the component in messages.
    """

    source: Source

    def run(self, method: str, function: Callable[..., R], *args: Any) -> R:
        """Call a method of the component; return what it returns."""


class FaultCounter(Protocol):
    """Counts the faults of the components that a part drives, for `LLM.health()`."""

    def reporter(
        self, source: Source, consequence: str
    ) -> Callable[[str, BaseException | None], None]:
        """Return what counts a fault of a component, given a message and its cause.

        It raises PluginFaultError if the component's faults end the engine (`plugins.on_error`).

        Args:
            source: of the component.
            consequence: logged with its first fault.
        """

    def note(
        self, name: str, message: str, cause: BaseException | None = None, consequence: str = ...
    ) -> None:
        """Count a fault under a name; the first one of each name is logged."""

    def record(self, name: str, message: str, consequence: str = ...) -> None:
        """Count a fault that a worker half has reported.

        Raises:
            PluginFaultError: the component's faults end the engine.
        """


class ComponentFactory(Protocol):
    """Builds the components of other kinds that a part drives, and names them in messages."""

    def enabled(self, kind: str) -> Sequence[str]:
        """Return the names of the enabled components of a kind, in their order."""

    def calls(self, kind: str, name: str) -> ComponentCalls:
        """Return the caller of the methods of a component.

        Raises:
            PluginNotFoundError: it is not enabled.
        """

    def create(self, kind: str, name: str, context: type[Context[Any]], **fields: Any) -> Any:
        """Build an enabled component, which the caller owns and closes.

        Args:
            kind: such as "grammars".
            name: of the component.
            context: class of its context.
            fields: of the context, besides name and options.

        Raises:
            PluginError: it is not enabled, or cannot be built.
        """

    def source(self, kind: str, name: str) -> str:
        """Return how messages name a component.

        Raises:
            PluginNotFoundError: it is not enabled.
        """


@dataclass(frozen=True, kw_only=True)
class StepPartContext(Context["StepPart"]):
    """Context of a step part, in the engine and in each worker.

    Attributes:
        config: of the engine.
    """

    config: EngineConfig


@dataclass(frozen=True, kw_only=True)
class EngineHalfContext:
    """Context of the half in the engine.

    Attributes:
        components: builds components of other kinds.
        describe_fault: returns class and text of an exception that a component raised; raises it
            again if it is not the component's fault but the user's interrupt.
        faults: counts those of components.
        clock: seconds.
        scheduler: names the scheduler in messages.
        vocab_size: of the model.
        vocabulary: of the tokenizer; None for an engine without one.
        block_size: tokens of a block of the KV cache.
        world_size: number of workers.
        block_hashes: `block_hashes(request, n)` returns the hashes of at least the first n blocks
            of a request, which its known tokens must fill. They are chained, and include its salt.
        publish: publishes events of the KV cache.
    """

    components: ComponentFactory
    describe_fault: Callable[[BaseException], str]
    faults: FaultCounter
    clock: Callable[[], float]
    scheduler: str
    vocab_size: int
    vocabulary: Vocabulary | None
    block_size: int
    world_size: int
    block_hashes: Callable[[Request, int], Sequence[bytes]]
    publish: Callable[[Sequence[KVEvent]], None]


class StepModel(Protocol):
    """A worker's model, whose results are checked.

    Attributes:
        source: names it in messages.
        is_replayable: whether its operations may be recorded, see `Model.replayable`.
    """

    source: Source
    is_replayable: bool

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states, as `Model.forward`.

        Raises:
            PluginFaultError: the model returned something else.
        """


class StepAttention(Protocol):
    """A worker's attention backend, whose results are checked.

    Attributes:
        source: names it in messages.
        is_replayable: whether its operations may be recorded, see `AttentionBackend.replayable`.
        pads: see `AttentionBackend.pads`.
        groups: KV cache groups of the model's layers.
    """

    source: Source
    is_replayable: bool
    pads: bool
    groups: tuple[KVCacheGroup, ...]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model of a worker, with what computes it.

    Attributes:
        model: whose weights are loaded.
        ops: operations of its layers.
        ops_source: names them in messages.
        attention: of its layers.
        max_model_len: tokens of a request, at most.
        decode_bytes: returns the bytes that a step of so many sequences with one token each needs
            at once, of the maximum length; measured on a GPU, 0 elsewhere.
    """

    model: StepModel
    ops: Ops
    ops_source: Source
    attention: StepAttention
    max_model_len: int
    decode_bytes: Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class WorkerHalfContext:
    """Context of the half in a worker.

    Attributes:
        device: of the model, a `torch.device`.
        rank: of the worker.
        world_size: number of workers.
        vocab_size: of the model.
        hidden_size: of the model.
        components: builds components of other kinds.
        describe_fault: as in `EngineHalfContext`.
        host_memory: returns the bytes that the process may still allocate in CPU memory.
        loaded: the model itself; None if the context was made by hand.
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


@dataclass(frozen=True)
class KVBlocks:
    """The KV cache of a rank, as a step part sees it that moves blocks.

    Attributes:
        identity: what the bytes of its blocks depend on, besides tokens.
        layers: per layer of this rank, views of its memory, uint8 [num_blocks, bytes], which
            together are all bytes of each block.
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
    """

    attend: Callable[[Sequence[AttentionStep]], Attend]
    max_model_len: int
    block_size: int
    num_groups: int


class PackedInputs(Protocol):
    """The integers of a step on the device, int64, as views of one tensor.

    Attributes:
        token_ids: [tokens].
        positions: [tokens].
        slots: of each group, [tokens].
        lens: length of each sequence, the tokens of the step included, [seqs].
        starts: first token of each sequence, and the number of all tokens, [seqs + 1].
        tables: block tables of each group, [seqs, blocks].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    lens: torch.Tensor
    starts: torch.Tensor
    tables: list[torch.Tensor]

    @property
    def rows(self) -> torch.Tensor:
        """Token ids, positions, slots of each group, and lens: [3 + groups, tokens].

        For a step with one token per sequence.
        """


class ForwardStep:
    """What the model computes in a step.

    Attributes:
        packed: the inputs in one tensor; None unless a half packs, or on a GPU.
        needs_model: whether the model itself has to run: its layers are followed, or the experts of
            tokens are reported.
    """

    __slots__ = ("_batch", "_plan", "needs_model", "packed")

    def __init__(
        self,
        plan: Callable[[], ForwardBatch],
        packed: PackedInputs | None = None,
        *,
        needs_model: bool = False,
    ) -> None:
        """Plan nothing yet; `plan` plans the attention of the step and returns its inputs."""
        self._plan = plan
        self._batch: ForwardBatch | None = None
        self.packed, self.needs_model = packed, needs_model

    @property
    def batch(self) -> ForwardBatch:
        """The inputs of the model; the attention is planned by the first access."""
        if self._batch is None:
            self._batch = self._plan()
        return self._batch


Forward = Callable[[ForwardStep], "torch.Tensor"]
"""Returns the hidden states of a step, [tokens, hidden]; they may be overwritten by the next."""


@dataclass(frozen=True)
class StepRows:
    """The requests of a worker's step that use a part, in the order of their tokens.

    Attributes:
        request_ids: ids of these requests.
        starts: index of the first token of each request, and at the end the number of all tokens.
    """

    request_ids: Sequence[str]
    starts: Sequence[int]


class EngineHalf:
    """The half of a step part in the engine; called by one thread.

    Every method is optional. `uses` is called once per request; the others only for requests that
    use the part, and for all plans while one of these requests is live.

    Attributes:
        capacity: amount of each resource that `cost` counts, by name; read once, when the engine
            starts. There is nothing of a resource that is not named here.
        every_plan: whether methods are called for every plan, also without a request that uses the
            part; read once. The worker halves of such a part get the rows of all requests.
        num_draft_tokens: most drafts of a request and a step; read once, when the engine starts.
            0: `drafts` is never called.
    """

    capacity: Mapping[str, int] = {}
    every_plan: bool = False
    num_draft_tokens: int = 0

    def started(self, handshakes: Sequence[bytes | None]) -> None:
        """Take what `WorkerHalf.start` returned in each rank, before the first step.

        Called again when the worker halves were started again, after a sleep that released the
        model, whose weights may be others now. Of a part that moves blocks alone.
        """

    def start_failed(self, cause: BaseException) -> None:
        """Go on without the worker halves, which could not be started again after a sleep.

        Raises:
            BaseException: the engine cannot go on without them; by default `cause`.
        """
        raise cause

    def uses(self, request: EngineCoreRequest) -> bool:  # noqa: ARG002
        """Return whether a new request uses the part; by default each one does."""
        return True

    def check(self, request: EngineCoreRequest) -> None:
        """Check a new request.

        Raises:
            RequestError: it is refused.
        """

    def refused(self, request_id: str) -> None:
        """Notify the part that a request was not added, be it by its own `check`."""

    def gate(self, request: Request) -> WaitReason | str | None:  # noqa: ARG002
        """Return why a request has to wait before it is scheduled for the first time.

        Called once per step until it returns None, and never again: not after a preemption. The
        request may be kept until `ended`; its `output_token_ids` grow. Where every request waits,
        steps follow one another at once: see `wait`.

        Raises:
            RequestError: it can never run; it ends with this message.
        """
        return None

    def block_key(self, request: EngineCoreRequest, span: range) -> bytes | None:  # noqa: ARG002
        """Return what the KV of a span of tokens depends on besides tokens; None is nothing.

        Blocks of the KV cache are shared, and stored, by a hash of it. A block depends on all
        blocks before it, so that a span needs a key of its own only where something begins.

        Called for the spans of full blocks of every request, in any thread: it depends on the
        request alone. A request for which it fails shares no blocks, and ends with an error.

        Args:
            request: also before `uses` and `check`.
            span: positions of the tokens of a block.
        """
        return None

    def cost(self, request: Request) -> Mapping[str, int]:  # noqa: ARG002
        """Return the amounts of resources that a request holds while it runs, by name.

        Called once, after the gates. A request is admitted when all amounts are available; they
        are released when it is preempted and when it ends. One that costs more than the capacity
        ends with an error.
        """
        return {}

    def begin(self, plan: SchedulerOutput) -> bytes | None:  # noqa: ARG002
        """Return the data for the worker halves that rides on a plan; None if there is none.

        Called once per plan, in order, before the plan is executed, and after `preempted` and
        `ended` of its requests. The plan may be empty, while all requests wait.
        """
        return None

    def needs_results(self, plan: SchedulerOutput) -> Collection[str]:  # noqa: ARG002
        """Return the requests of a plan whose earlier tokens `mask` needs.

        Where several steps are under way, `mask` is called when these are known.
        """
        return ()

    def mask(self, plan: SchedulerOutput) -> GrammarBitmask | None:  # noqa: ARG002
        """Return the tokens that may be sampled in a step; None if all may.

        Called while the model runs, where the executor runs elsewhere. The masks of several parts
        are combined: a token needs to be allowed by each.
        """
        return None

    def get_num_new_matched_tokens(
        self,
        request: Request,  # noqa: ARG002
        num_computed_tokens: int,  # noqa: ARG002
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a request the part can load after the computed ones.

        Asked for every request that is about to be admitted. At most one part overrides it.

        Args:
            request: about to be admitted.
            num_computed_tokens: leading tokens that the local cache has, whole blocks.

        Returns:
            The number of tokens (None: not known yet, ask again), and whether they are loaded
            between steps: the request waits until `result` adds it to
            `ModelRunnerOutput.kv_loaded`. If not, they are loaded in the step in which it is
            scheduled.
        """
        return 0, False

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Record the blocks allocated for a request that is admitted, or about to wait for a load.

        Args:
            request: of which `get_num_new_matched_tokens` was asked.
            block_ids: its whole block table.
            num_external_tokens: of those that were matched, how many are to be loaded.
        """

    def request_finished(
        self,
        request: Request,  # noqa: ARG002
        block_ids: BlockIds,  # noqa: ARG002
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Record that a request has ended and that its blocks are about to be freed.

        Returns:
            Whether they are kept until `result` adds the request to `ModelRunnerOutput.kv_saved`,
            and the `kv_transfer_params` of its last output.
        """
        return False, None

    def result(
        self,
        plan: SchedulerOutput,  # noqa: ARG002
        result: ModelRunnerOutput,  # noqa: ARG002
    ) -> Mapping[str, RequestFault]:
        """Read the result of a plan before the scheduler does.

        The reports of the worker halves are `result.part_reports[name]`, by rank.

        Returns:
            Requests that end with an error, of those that use the part.
        """
        return {}

    def updated(self, plan: SchedulerOutput) -> None:
        """Notify the part that the scheduler has taken the result of a plan."""

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Return token ids that may follow the output of requests, by request id.

        Called after each step that computed tokens, when the requests have those of its result. The
        next step verifies drafts of requests that decode; others are dropped. A draft is accepted
        if it is the token that is sampled at its position, so that drafts change no output. Of
        several parts that draft for a request, the first one's drafts are used.
        """
        return {}

    def lost(self, plan: SchedulerOutput) -> None:
        """Notify the part of a plan that was not executed, or not to its end."""

    def preempted(self, request_id: str) -> None:
        """Notify the part of a request that left the batch and may resume."""

    def ended(self, request_id: str) -> None:
        """Notify the part of the end of a request, with the plan that reports it.

        Also of one that never passed the gate.
        """

    def wait(self) -> None:
        """Wait a moment for what a gate waits for, after a step that computed nothing.

        A part that holds requests back sleeps here, or the engine takes all of a CPU. The next step
        looks for aborts, so that a few milliseconds are right.
        """

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add totals of the part to the statistics of the scheduler."""

    def close(self) -> None:
        """Release resources; called once, after the workers are closed."""


class WorkerHalf:
    """The half of a step part in a worker.

    Every method is optional. `begin`, `around_layers`, `embedded`, `linear`, `after_layers`,
    `hidden`, `logits` and `report` are called in steps for which the engine's half gave data;
    `embedded`, `linear`, `hidden` and `logits` get the rows of the requests that use the part, and
    no others. The other methods need no half in the engine.

    Attributes:
        packs: whether `ForwardStep.packed` is needed.
        wants_layers: whether `around_layers`, `embedded` and `linear` are called in this step; read
            after `begin`. If not, a step of few tokens may be repeated without running Python.
    """

    packs: ClassVar[bool] = False
    wants_layers: bool = True

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

    def finished(self, request_ids: Collection[str]) -> None:
        """Notify the half of requests that have ended, of all that the worker had."""

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
            request_ids: of each row; a request with drafts has one more row for each.
        """
        return None

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


class StepPart(Component):
    """A feature of the engine's step, with a half in the engine, one in each worker, or both.

    Attributes:
        fault_scope: what a fault of a half ends: the requests of the plan that use the part, its
            work in this step, or the engine.
        before, after: names of parts whose methods are called after, and before, those of this one.
    """

    context: StepPartContext
    fault_scope: ClassVar[Literal["request", "step", "engine"]] = "request"
    before: ClassVar[Sequence[str]] = ()
    after: ClassVar[Sequence[str]] = ()

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes worker halves read and write blocks of the KV cache, for messages.

        The halves are started with the cache, its blocks get an identity, and each rank reports.
        None, the default, is a part that touches no blocks.
        """
        return None

    def engine_half(self, context: EngineHalfContext) -> EngineHalf | None:  # noqa: ARG002
        """Return the half in the engine; None, the default, if there is none. Called once."""
        return None

    def worker_half(self, context: WorkerHalfContext) -> WorkerHalf | None:  # noqa: ARG002
        """Return the half in a worker; None if there is none. Called once per worker."""
        return None
