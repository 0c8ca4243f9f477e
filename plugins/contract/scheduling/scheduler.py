"""Schedulers: assign the token budget of each step to requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

from hardpoint.errors import ConfigError
from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import instance, returns
from hardpoint.plugins.kv_cache.manager import KVCacheManager
from hardpoint.plugins.requests.outputs import EngineCoreOutputs, FinishReason
from hardpoint.plugins.requests.params import EngineCoreRequest
from hardpoint.plugins.requests.plan import BlockIds, ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.requests.stats import SchedulerStats

from .policy import SchedulingPolicy
from .step_cost import StepCost
from .step_record import StepRecord, WaitReason

__all__ = ["PauseState", "Scheduler", "SchedulerContext"]


class PauseState(Enum):
    """Which requests may be scheduled."""

    UNPAUSED = "unpaused"
    """All requests."""
    PAUSED_NEW = "paused_new"
    """Requests that were in a plan or have blocks loaded by a connector; others are held."""
    PAUSED_ALL = "paused_all"
    """None; all are held."""


class EncoderCache(Protocol):
    """Encoder outputs by identifier; each is encoded once while a request references it."""

    def holds(self, request: Request, index: int) -> bool:
        """Return whether a feature is cached; if so, the request references it."""

    def can_allocate(self, request: Request, index: int, reserved: int) -> bool:
        """Return whether there is room for a feature and `reserved` other tokens."""

    def allocate(self, request: Request, index: int) -> None:
        """Reserve room for a feature, referenced by the request."""

    def cancel(self, request: Request, index: int) -> None:
        """Undo `allocate`; the feature is not encoded, and no request references it."""

    def free_input(self, request: Request, index: int) -> None:
        """Release a feature of a request."""

    def free(self, request: Request) -> None:
        """Release all features of a request."""

    def take_freed(self) -> Sequence[str]:
        """Return the identifiers dropped since the last call."""


class Gates(Protocol):
    """Decisions of step parts about requests, for a scheduler.

    A new request that a part `holds` waits outside of the queue until `wait_reason`, asked in each
    step, returns None. One from the queue may run if `lacks` returns None; the scheduler calls
    `acquire` when it starts to run, and `release` when it no longer does.
    """

    def holds(self, request: Request) -> bool:
        """Return whether a part has a gate for a request."""

    def wait_reason(self, request: Request) -> WaitReason | None:
        """Return why a request that has not run is not ready; None if it is.

        Raises:
            RequestError: it can never run; it ends with this message.
        """

    def lacks(self, request: Request) -> WaitReason | None:
        """Return which resource of a part has no room for a request; None if all have."""

    def acquire(self, request: Request) -> None:
        """Count the resources of a request that starts to run."""

    def release(self, request: Request) -> None:
        """Release the resources of a request that no longer runs."""


class BlockTransfers(Protocol):
    """Loads and saves of blocks by a step part, for a scheduler; see `BlockTransfer`.

    Ended transfers are in the result of a step: `ModelRunnerOutput.kv_loaded`, `kv_saved` and
    `invalid_block_ids`.
    """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded after the computed ones, and whether between steps.

        The number is None while it is not known: the request waits and is asked for again.
        """

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Record the blocks allocated for a request that was asked for."""

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Record the end of a request; called before its blocks are freed.

        Returns:
            Whether they are kept until a result names it in `kv_saved`, and the
            `kv_transfer_params` of its last output.
        """


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step, and how steps are planned.

    Raises ConfigError for limits that conflict.

    Attributes:
        max_num_seqs: maximum number of running requests.
        max_num_batched_tokens: maximum tokens of a step.
        max_model_len: maximum length of prompt plus output.
        chunked_prefill: whether a prompt may be computed over several steps.
        long_prefill_token_threshold: maximum tokens of one request in a step; 0 is no limit.
        max_waiting: maximum number of waiting requests; further ones are rejected, except requests
            that another engine has admitted (`is_admitted`). None is no limit.
        max_waiting_tokens: maximum tokens of prompts that are not computed yet; a further prompt is
            rejected with QueueFullError, unless none waits or `is_admitted`. None is no limit.
        num_draft_tokens: maximum drafts of a request in a step.
        num_lookahead_tokens: further tokens that get blocks too, in which drafting heads write
            keys and values of drafts; 0 without such heads.
        max_loras: 0: nothing limits adapters. Schedulers of contract 1 read it.
        max_encoder_tokens: maximum tokens to encode in a step.
        asynchronous: whether a step may be planned before the results of the last one are in. It
            is not while a request may get drafts, because drafts follow the results.
        num_batches: steps in flight at once; no step computes a token that follows another step's
            token, as in the stages of a pipeline; the requests are to be divided among them.
        step_milliseconds: time that prompts may extend a step to while other requests generate; 0
            is no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0
    max_loras: int = 0
    max_encoder_tokens: int = 0
    asynchronous: bool = False
    num_batches: int = 1
    step_milliseconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse limits that conflict."""
        if self.chunked_prefill:
            return
        if self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "scheduler.max_num_batched_tokens: expected at least max_model_len "
                f"({self.max_model_len}) without scheduler.chunked_prefill, got "
                f"{self.max_num_batched_tokens}"
            )
        for name in ("long_prefill_token_threshold", "step_milliseconds"):
            if value := getattr(self, name):
                raise ConfigError(
                    f"scheduler.{name}: expected 0 without scheduler.chunked_prefill, got {value}"
                )


@dataclass(frozen=True, kw_only=True)
class SchedulerContext(Context["Scheduler"]):
    """Context of a scheduler: everything outside that it may use.

    Attributes:
        policy: the configured scheduling policy, with its faults caught: its methods always return
            a valid value.
        clock: seconds; the only clock that a scheduler may read.
        watermark: share of the blocks that stays free when a request is admitted while others
            run, so that these can grow.
        step_cost: returns the cost of a step, as far as is known by now; it is measured if
            `limits.step_milliseconds` is set.
        policy_fault: called with a message when a decision of the policy could not be followed.
        transfers: loads and saves of blocks outside of the cache; None if no step part moves any.
        encoder_cache: cache of encoder outputs, of multimodal models.
        gates: gates of step parts; None if no part gates requests or counts resources.
        record: called with the record of each step; None if no record is needed.
        log_stats: whether outputs carry events.
        report_finished: whether to fill in `EngineCoreOutputs.finished_requests`.
    """

    limits: SchedulerLimits
    kv_cache: KVCacheManager
    policy: SchedulingPolicy
    clock: Callable[[], float]
    watermark: float = 0.0
    step_cost: Callable[[], StepCost] = StepCost
    policy_fault: Callable[[str], None] = lambda _message: None
    transfers: BlockTransfers | None = None
    encoder_cache: EncoderCache | None = None
    gates: Gates | None = None
    record: Callable[[StepRecord], None] | None = None
    log_stats: bool = False
    report_finished: bool = False


class Scheduler(Component):
    """Assigns each step's token budget to requests, by tokens computed and tokens wanted.

    The engine calls it from one thread. It returns each plan of `schedule` once, in order, to
    `update` or to `plan_lost`; if `update` raises or is interrupted, `plan_lost` follows. With
    `limits.asynchronous` further plans may be made before.
    """

    context: SchedulerContext
    limits_waiting_tokens: ClassVar[bool] = False
    """Whether it obeys `limits.max_waiting_tokens`; others reject the start with that limit."""
    keeps_groups: ClassVar[bool] = False
    """Whether it runs requests with members, which the engine rejects otherwise.

    The last known tokens of a request and of all its members are in the same step, or in none; so
    are their drafts, which are those of the request. Members get the tokens of their request, and
    end, and are preempted, with it. They have no output, and only `live_request` returns them.
    """
    releases_blocks: ClassVar[bool] = False
    """Whether its plans obey `Request.releases`; others reject a step part that releases blocks.

    A plan has no more tokens of a request than `BlockReleases.num_before_next`, and the columns of
    `BlockReleases.starting_at` for its first token.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Create a scheduler without requests.

        Raises:
            ConfigError: there is a limit that it does not obey.
        """
        super().__init__(context)
        limit = context.limits.max_waiting_tokens
        if limit is not None and not self.limits_waiting_tokens:
            raise ConfigError(
                f"scheduler.max_waiting_tokens: expected none, because the scheduler "
                f"{context.name!r} does not limit the tokens that wait, got {limit}"
            )

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request; no live request has its id.

        Raises:
            RequestError: it can never run; other requests are not affected.
            OverloadedError: too many requests wait.
        """

    @returns(instance(SchedulerOutput))
    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Return the plan of the next step; it may be empty."""

    @returns(instance(dict))
    @abstractmethod
    def update(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the result of a plan; return the new outputs, by client index.

        A request ends at a stop token only after `min_tokens` others, which matters where a plugin
        forces one, and by `repetition_detection` only with so many.
        """

    @abstractmethod
    def plan_lost(self, plan: SchedulerOutput) -> None:
        """Handle a plan that an error or interrupt may have kept from running.

        Its finished requests are sent again; requests in it, or in a later plan, are recomputed. A
        plan with results that were all processed changes nothing.
        """

    @abstractmethod
    def finish_requests(
        self, request_ids: Iterable[str] | None, reason: FinishReason
    ) -> dict[int, EngineCoreOutputs]:
        """End live requests on behalf of a caller; unknown ids are ignored, None is all requests.

        Returns:
            The last output of each request that was live, by client index.
        """

    @abstractmethod
    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Return whether a step has work: live requests, or finished ones to report to workers.

        Requests held by a pause are not work until their deadline passes. During a pause, transfers
        of a connector are work, since they use memory.
        """

    @returns(instance(SchedulerStats))
    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Return current statistics."""

    def live_request(self, request_id: str) -> Request | None:  # noqa: ARG002
        """Return a live request, not to be modified; None if the id is unknown."""
        raise self._lacks("shows no live requests")

    def live_requests(self) -> Iterable[Request]:
        """Return all live requests; only `arguments` and `source` may be modified."""
        raise self._lacks("shows no live requests")

    def why_waiting(self, request_id: str) -> WaitReason | None:  # noqa: ARG002
        """Return why a live request got no tokens in the last step; None if it got some.

        A request that a pause holds has a reason even if no step is planned.

        Raises:
            RequestError: no live request has that id.
        """
        raise self._lacks("does not report why a request waits")

    def update_drafts(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:  # noqa: ARG002
        """Set the drafts of the next step, by request id; unknown ids are skipped."""
        raise self._lacks("takes no drafts")

    def set_policy(self, policy: SchedulingPolicy) -> None:  # noqa: ARG002
        """Replace `context.policy` between two steps.

        No request is lost; waiting ones are reordered.
        """
        raise self._lacks("cannot change its policy while it runs")

    def set_limits(self, limits: SchedulerLimits) -> None:  # noqa: ARG002
        """Replace `context.limits` between two steps.

        `max_waiting`, `max_waiting_tokens` and `long_prefill_token_threshold` alone differ.
        Requests that wait already keep their places.
        """
        raise self._lacks("cannot change its limits while it runs")

    def set_pause(self, state: PauseState) -> None:  # noqa: ARG002
        """Set which requests may be scheduled from the next plan on.

        Held requests stay live: they can be aborted, they end when their deadline passes, and after
        the pause they get the tokens that they would have had. Results of earlier plans are
        processed and loads continue. Requests that are not held run to their end, after which
        `has_requests` returns False.
        """
        raise self._lacks("cannot be paused")

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:  # noqa: ARG002
        """Drop cached content.

        Args:
            recompute_running: also preempt running requests, for example after a weight update.
        """
        raise self._lacks("has no prefix cache to reset")

    def _lacks(self, message: str) -> NotImplementedError:
        return NotImplementedError(f"the scheduler {self.name!r} {message}")
