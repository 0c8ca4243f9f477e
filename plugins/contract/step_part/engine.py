"""Engine hooks of step parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hardpoint.errors import RequestError
from hardpoint.plugins.component.base import Source
from hardpoint.plugins.kv_cache.events import KVEvent
from hardpoint.plugins.kv_cache.eviction import RetainedBlocks
from hardpoint.plugins.requests.outputs import EngineCoreOutputs, PartArray
from hardpoint.plugins.requests.params import EngineCoreRequest
from hardpoint.plugins.requests.plan import (
    BlockIds,
    GrammarBitmask,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
)
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.requests.stats import SchedulerStats
from hardpoint.plugins.scheduling.step_cost import StepCost
from hardpoint.plugins.scheduling.step_record import WaitReason
from hardpoint.plugins.text.vocabulary import Vocabulary

from .border import StepBorder
from .components import ComponentFactory, FaultCounter

__all__ = ["EngineHalf", "EngineHalfContext"]


REQUEST_FIELDS = {
    "pooling_params": "no model of this engine pools",
    "second_type_start": "expected none, no model here reads pairs",
    "prompt_embeds": "expected token ids, this engine takes no embeddings",
    "features": "expected none, no part of this engine encodes any, got {count}",
    "lora": "expected none, no worker of this engine holds adapters, got {value.name!r}",
    "retention": "expected none, no part of this engine keeps blocks",
    "prompt_is_token_ids": "expected none, this engine has no use for it, got {value!r}",
}
"""Optional fields of `EngineCoreRequest` that only step parts make use of.

With the error of a request that sets one which no enabled part uses: `value` is what it is set to,
`count` the number of its items.
"""


def _without_workers(message: bytes) -> Sequence[bytes]:  # noqa: ARG001
    raise RuntimeError("no workers run")


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
        vocab_size: vocabulary size of the model.
        vocabulary: vocabulary of the tokenizer; None if no frontend half has asked for it, or the
            tokenizer has none.
        block_size: tokens of a block of the KV cache.
        world_size: number of workers.
        block_hashes: `block_hashes(request, n)` returns the hashes of at least the first n blocks
            of a request, which its known tokens must fill. They are chained, and include its salt.
        publish: publishes events of the KV cache.
        retained: the cached blocks that eviction policies are to keep, if they can.
        step_cost: returns what a step takes, as far as is known by now; it is measured if
            `scheduler.step_milliseconds` is set or a part drafts.
        why_waiting: returns why a live request got no tokens in the last plan; None if it got some,
            or the scheduler gives no reasons.
        call_workers: returns what `WorkerHalf.call` answers in each rank, in rank order, after the
            steps that were planned before; raises what one of them raised. Once workers run.
        border: runs actions between two steps, once workers run; None if the context was made by
            hand.
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
    retained: RetainedBlocks = field(default_factory=RetainedBlocks)
    step_cost: Callable[[], StepCost] = StepCost
    call_workers: Callable[[bytes], Sequence[bytes]] = _without_workers
    why_waiting: Callable[[str], WaitReason | None] = lambda _request_id: None
    border: StepBorder | None = None


class EngineHalf:
    """The half of a step part in the engine; called by one thread.

    Every method is optional. `uses` is called once per request; the others only for requests that
    use the part, and for all plans while one of these requests is live.

    Attributes:
        capacity: amount of each resource that `cost` counts, by name; read once, when the engine
            starts. There is nothing of a resource that is not named here.
        every_plan: whether methods are called for every plan, also without a request that uses the
            part; read once. The worker halves of such a part get the rows of all requests.
        only_included: whether requests use the part only if their `include` names it; read once.
            `uses` is asked for these alone.
        is_active: whether new requests may use the part, and `publish` is called; read for each. A
            part that has nothing to do yet costs nothing with False, and sets it later.
        num_draft_tokens: most drafts of a request and a step; read once, when the engine starts.
            0: `drafts` is never called.
        encoder_cache: an `EncoderCache`, which the scheduler asks for room for features in workers;
            read once. None: the part encodes none.
        max_encoder_tokens: tokens of features that a step may encode; read once.
        tasks: tasks of requests, as `PoolingParams.task`, that the part lets the engine do; read
            once.
    """

    capacity: Mapping[str, int] = {}
    every_plan: bool = False
    only_included: bool = False
    is_active: bool = True
    num_draft_tokens: int = 0
    tasks: Collection[str] = ()
    encoder_cache: Any = None
    max_encoder_tokens: int = 0

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

    def workers_started(self) -> Mapping[str, RequestFault]:
        """Give the worker halves what they need, before the next step; none has any of it.

        Called when the engine starts, and again when the worker halves were built again, after a
        sleep that released the model. `EngineHalfContext.call_workers` reaches them.

        Returns:
            Requests that end with an error, of those that use the part.
        """
        return {}

    def uses(self, request: EngineCoreRequest) -> bool:  # noqa: ARG002
        """Return whether a new request uses the part; by default each one does."""
        return True

    def check(self, request: EngineCoreRequest) -> None:
        """Check a new request; its features alone have their data here, see `MultiModalFeature`.

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
        """Return all that the KV of a span of tokens depends on besides tokens; None is nothing.

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

    def masked(self, plan: SchedulerOutput, masks: Mapping[Source, GrammarBitmask]) -> None:
        """Notify the part of the masks of a step, by the identity of the part that made each.

        Called after `mask` of all parts, if there is a mask.
        """

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
            request: request that `get_num_new_matched_tokens` was called with.
            block_ids: its whole block table.
            num_external_tokens: number of matched tokens that are to be loaded.
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

    def figures(
        self,
        request_id: str,  # noqa: ARG002
    ) -> Mapping[str, float | str | Sequence[float]]:
        """Return figures of a request so far, by name.

        Called with each output of a request whose `SamplingParams.include` names the part, after
        `result`. They become `CompletionOutput.part_figures[name]`.
        """
        return {}

    def arrays(self, request_id: str) -> Mapping[str, PartArray]:  # noqa: ARG002
        """Return numbers of positions of a request since the last call, by name.

        Called after `figures`, for the same outputs. They become
        `CompletionOutput.part_arrays[name]`; of a position that was given before, they are left
        out.

        Positions count from 0, the first token of the prompt. Only those that are computed have
        numbers: the token that a step has sampled last is the input of the next step, which
        computes its position. A request with a prompt of p tokens and n output tokens has the
        positions 0 to p + n - 2. Another position is a fault of the part.
        """
        return {}

    def publish(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Complete the outputs of a step before their clients get them.

        Called for the outputs of all requests, also of those that do not use the part.

        Args:
            outputs: one message per client.
        """

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

    def limit_drafts(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, int]:  # noqa: ARG002
        """Return how many of the first drafts of requests may be accepted; of others, all may.

        Called after `drafts` of all parts, with those of requests that use the part. The next step
        computes no rows for the rest, which this part would not let be sampled.
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

    def weights_changed(self) -> None:
        """Notify the half that the workers have other weights, or have loaded the model again.

        Called between steps, after the worker halves have lost what depends on weights.
        """

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any | Future[Any]:  # noqa: ARG002
        """Answer a call of a program, `LLM.plugins.call_part`; called between steps.

        Args:
            method: name of what is asked for.
            arguments: plain data, unchecked.

        Returns:
            Plain data; or a future of it, which other calls and steps do not wait for.

        Raises:
            RequestError: there is no such method, or its arguments are wrong.
        """
        raise RequestError(f"method: the part answers no calls, got {method!r}")

    def wait(self) -> None:
        """Wait a moment for what a gate waits for, after a step that computed nothing.

        A part that holds requests back sleeps here, or the engine takes all of a CPU. The next step
        looks for aborts, so that a few milliseconds are right.
        """

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add totals of the part to the statistics of the scheduler."""

    def close(self) -> None:
        """Release resources; called once, after the workers are closed."""
