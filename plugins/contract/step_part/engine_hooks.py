"""Engine hooks of step parts: one protocol per task.

The half of a part in the engine is an object of any class with the members of the protocols that it
needs. One thread calls it. The engine collects the hooks when it starts: undefined hooks are
never called, and no hook is called in a step without a request that uses the part.

A class that names a protocol as its base is checked by type checkers against it, and has to define
the abstract members; the others are optional. Any half may also have `close()`, which releases its
resources and is called once, after the workers are closed.
"""

# ruff: noqa: ARG002

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

from hardpoint.plugins.component.base import Source
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
from hardpoint.plugins.scheduling.step_record import WaitReason

__all__ = [
    "AdmissionGate",
    "BlockKey",
    "BlockTransfer",
    "DraftTokens",
    "EncoderBudget",
    "OutputFigures",
    "PlanData",
    "ProgramCalls",
    "RequestFilter",
    "RequestLifecycle",
    "ResourceCost",
    "StepObserver",
    "TokenMask",
    "WorkerSetup",
]


class RequestFilter(Protocol):
    """Selects the requests that use the part. Without it, all do.

    A half declares `for_fields` or `for_parameters`, or has `uses`, and not both: the engine
    compares declared fields with their defaults, and calls nothing of the part for other requests.

    Attributes:
        for_fields: fields of `EngineCoreRequest`, such as "features". A request uses the part if
            one of them, or of `for_parameters`, has another value than its default; read once.
        for_parameters: fields of `SamplingParams`, such as "structured"; read once.
        only_included: whether requests use the part only if their `include` names it; read once.
            `uses` is asked for these alone.
        tasks: tasks of requests, as `PoolingParams.task`, that the part lets the engine do; read
            once.
    """

    for_fields: Collection[str] = ()
    for_parameters: Collection[str] = ()
    only_included: bool = False
    tasks: Collection[str] = ()

    def uses(self, request: EngineCoreRequest) -> bool:
        """Return whether a new request uses the part. Called once per request."""
        return True

    def check(self, request: EngineCoreRequest) -> None:
        """Check a new request; its features alone have their data here, see `MultiModalFeature`.

        Raises:
            RequestError: it is rejected.
        """
        return None

    def refused(self, request_id: str) -> None:
        """Notify the part that a request was not added, be it by its own `check`."""
        return None


class AdmissionGate(Protocol):
    """Holds requests back before they are scheduled for the first time."""

    @abstractmethod
    def gate(self, request: Request) -> WaitReason | str | None:
        """Return why a request has to wait before it is scheduled for the first time.

        Called once per step until it returns None, and never again: not after a preemption. The
        request may be kept until `ended`; its `output_token_ids` grow. If every request waits,
        steps follow one another at once: see `wait`.

        Raises:
            RequestError: it can never run; it ends with this message.
        """

    def wait(self) -> None:
        """Wait a moment for the gate's condition, after a step that computed nothing.

        A part that holds requests back sleeps here, or the engine takes all of a CPU. The next step
        looks for aborts, so that a few milliseconds are right.
        """
        return None


class ResourceCost(Protocol):
    """Counts resources that requests hold while they run.

    Attributes:
        capacity: amount of each resource that `cost` counts, by name; read once, when the engine
            starts. There is nothing of a resource that is not named here.
    """

    capacity: Mapping[str, int]

    @abstractmethod
    def cost(self, request: Request) -> Mapping[str, int]:
        """Return the amounts of resources that a request holds while it runs, by name.

        Called once, after the gates. A request is admitted when all amounts are available; they
        are released when it is preempted and when it ends. A request with a cost above the
        capacity ends with an error.
        """


class RequestLifecycle(Protocol):
    """Follows requests that use the part to their end."""

    @abstractmethod
    def ended(self, request_id: str) -> None:
        """Notify the part of the end of a request, with the plan that reports it.

        Also called for a request that never passed the gate.
        """

    def preempted(self, request_id: str) -> None:
        """Notify the part of a request that left the batch and may resume."""
        return None


class PlanData(Protocol):
    """Adds data for the workers to the plan of each step.

    Attributes:
        every_plan: whether hooks are called for every plan, also without a request that uses the
            part; read once. The worker halves of such a part get the rows of all requests.
    """

    every_plan: bool = False

    @abstractmethod
    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return the data for the worker halves that rides on a plan; None if there is none.

        Called once per plan, in order, before the plan is executed, and after `preempted` and
        `ended` of its requests. The plan may be empty, while all requests wait.
        """


class StepObserver(Protocol):
    """Reads the outputs of each step.

    Attributes:
        is_active: whether new requests may use the part, and `publish` is called; read for each. A
            part that has nothing to do yet costs nothing with False, and sets it later.
    """

    is_active: bool = True

    @abstractmethod
    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        """Read the result of a plan before the scheduler does.

        The reports of the worker halves are `result.part_reports[name]`, by rank.

        Returns:
            Requests that end with an error, among the ones that use the part.
        """

    def masked(self, plan: SchedulerOutput, masks: Mapping[Source, GrammarBitmask]) -> None:
        """Notify the part of the masks of a step, by the identity of the part that made each.

        Called after `mask` of all parts, if there is a mask.
        """
        return None

    def publish(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Complete the outputs of all requests, including requests that do not use the part.

        Called before clients get them.

        Args:
            outputs: one message per client.
        """
        return None

    def updated(self, plan: SchedulerOutput) -> None:
        """Notify the part that the scheduler has taken the result of a plan."""
        return None

    def lost(self, plan: SchedulerOutput) -> None:
        """Notify the part of a plan that was not executed, or not to its end."""
        return None

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add totals of the part to the statistics of the scheduler."""
        return None


class TokenMask(Protocol):
    """Forbids tokens."""

    @abstractmethod
    def mask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return the tokens that may be sampled in a step; None if all may.

        Called while the model runs, if the executor runs elsewhere. The masks of several parts are
        combined: a token needs to be allowed by each.
        """

    def needs_results(self, plan: SchedulerOutput) -> Collection[str]:
        """Return the requests of a plan for which `mask` needs the earlier tokens.

        If several steps are under way, `mask` is called when these are known.
        """
        return ()

    def limit_drafts(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
        """Return how many of the first drafts of requests may be accepted; of others, all may.

        Called after `drafts` of all parts, with the drafts of requests that use the part. The next
        step computes no rows for the drafts beyond these numbers.
        """
        return {}


class DraftTokens(Protocol):
    """Drafts tokens that may follow the output of requests.

    Attributes:
        num_draft_tokens: most drafts of a request and a step; read once, when the engine starts.
            0: `drafts` is never called.
        num_lookahead_tokens: tokens after the known ones that get blocks too; read once. Above 0,
            the last block of a cached prefix is computed again: its last keys and values of a
            drafting head depend on the token that follows.
    """

    num_draft_tokens: int
    num_lookahead_tokens: int = 0

    @abstractmethod
    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Return token ids that may follow the output of requests, by request id.

        Called after each step that computed tokens, when the requests have the tokens of its
        result. The next step verifies drafts of requests that decode; others are dropped. A draft
        is accepted if it is the token that is sampled at its position, so that drafts change no
        output. Of several parts that draft for a request, the first one's drafts are used.
        """


class OutputFigures(Protocol):
    """Adds figures to the outputs of requests with the part in `SamplingParams.include`."""

    @abstractmethod
    def figures(self, request_id: str) -> Mapping[str, float | str | Sequence[float]]:
        """Return figures of a request so far, by name.

        Called with each output of a request that includes the part, after `result`. They become
        `CompletionOutput.part_figures[name]`.
        """

    def arrays(self, request_id: str) -> Mapping[str, PartArray]:
        """Return numbers of positions of a request since the last call, by name.

        Called after `figures`, for the same outputs. They become
        `CompletionOutput.part_arrays[name]`; of a position that was given before, they are left
        out.

        Positions count from 0, the first token of the prompt. Only computed positions have
        numbers: the token that a step has sampled last is the input of the next step, which
        computes its position. A request with a prompt of p tokens and n output tokens has the
        positions 0 to p + n - 2. Another position is a fault of the part.
        """
        return {}


class BlockKey(Protocol):
    """Extends the keys of cached blocks by the inputs that their KV depends on besides tokens."""

    @abstractmethod
    def block_key(self, request: EngineCoreRequest, span: range) -> bytes | None:
        """Return all that the KV of a span of tokens depends on besides tokens; None is nothing.

        Blocks of the KV cache are shared, and stored, by a hash of it. A block depends on all
        blocks before it, so that a span needs a key of its own only where something begins.

        Called for the spans of full blocks of every request, in any thread: it depends on the
        request alone. A request for which it fails shares no blocks, and ends with an error.

        Args:
            request: also before `uses` and `check`.
            span: positions of the tokens of a block.
        """


class BlockTransfer(Protocol):
    """Loads and saves blocks of the KV cache. At most one part does."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a request the part can load after the computed ones.

        Asked for every request that is about to be admitted.

        Args:
            request: about to be admitted.
            num_computed_tokens: leading tokens that the local cache has, whole blocks.

        Returns:
            The number of tokens (None: not known yet, ask again), and whether they are loaded
            between steps: the request waits until `result` adds it to
            `ModelRunnerOutput.kv_loaded`. If not, they are loaded in the step in which it is
            scheduled.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Record the blocks allocated for a request that is admitted, or about to wait for a load.

        Args:
            request: request that `get_num_new_matched_tokens` was called with.
            block_ids: its whole block table.
            num_external_tokens: number of matched tokens that are to be loaded.
        """

    @abstractmethod
    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Record that a request has ended and that its blocks are about to be freed.

        Returns:
            Whether they are kept until `result` adds the request to `ModelRunnerOutput.kv_saved`,
            and the `kv_transfer_params` of its last output.
        """

    def started(self, handshakes: Sequence[bytes | None]) -> None:
        """Receive the result of `BlockAccess.start` in each rank, before the first step.

        Called again when the worker halves were started again, after a sleep that released the
        model, possibly with other weights.
        """
        return None

    def start_failed(self, cause: BaseException) -> None:
        """Go on without the worker halves, which could not be started again after a sleep.

        Raises:
            BaseException: the engine cannot go on without them; by default `cause`.
        """
        raise cause


class EncoderBudget(Protocol):
    """Limits the features of media that steps encode and workers keep.

    Attributes:
        encoder_cache: an `EncoderCache`, which the scheduler asks for room for features in workers;
            read once. None: the part encodes none.
        max_encoder_tokens: tokens of features that a step may encode; read once.
    """

    encoder_cache: Any
    max_encoder_tokens: int


class WorkerSetup(Protocol):
    """Sends the worker hooks their data when the workers start."""

    @abstractmethod
    def workers_started(self) -> Mapping[str, RequestFault]:
        """Send the worker hooks their data before the next step; new workers have no data.

        Called when the engine starts, and again when the worker halves were built again, after a
        sleep that released the model. `EngineHalfContext.call_workers` reaches them.

        Returns:
            Requests that end with an error, among the ones that use the part.
        """

    def weights_changed(self) -> None:
        """Notify the half that the workers have other weights, or have loaded the model again.

        Called between steps, after the worker halves have dropped data that depends on weights.
        """
        return None


class ProgramCalls(Protocol):
    """Answers calls of programs, `LLM.plugins.call_part`."""

    @abstractmethod
    def call(self, method: str, arguments: Mapping[str, Any]) -> Any | Future[Any]:
        """Answer a call of a program; called between steps.

        Args:
            method: name of the call.
            arguments: plain data, unchecked.

        Returns:
            Plain data; or a future of it, which other calls and steps do not wait for.

        Raises:
            RequestError: there is no such method, or its arguments are wrong.
        """


EngineHooks: TypeAlias = (
    RequestFilter
    | AdmissionGate
    | ResourceCost
    | RequestLifecycle
    | PlanData
    | StepObserver
    | TokenMask
    | DraftTokens
    | OutputFigures
    | BlockKey
    | BlockTransfer
    | EncoderBudget
    | WorkerSetup
    | ProgramCalls
)
"""The half of a step part in the engine, which has the members of at least one protocol."""
