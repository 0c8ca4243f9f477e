"""Schedulers: which request gets how many tokens in a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from .collaborators import EncoderCache, Grammars, KVConnectorScheduler
from .component import Component, Context
from .errors import ConfigError
from .executor import ModelRunnerOutput
from .kv_cache import BlockIds, KVCacheManager
from .request import Request
from .requests import EngineCoreOutputs, EngineCoreRequest, FinishReason
from .scheduling_policy import SchedulingPolicy
from .stats import SchedulerStats
from .step_record import StepRecord, WaitReason

__all__ = [
    "CachedRequests",
    "NewRequest",
    "PauseState",
    "Scheduler",
    "SchedulerContext",
    "SchedulerLimits",
    "SchedulerOutput",
    "SchedulerStats",
]


class PauseState(Enum):
    """Who may be given tokens."""

    UNPAUSED = "unpaused"
    """Everybody."""
    PAUSED_NEW = "paused_new"
    """Who has begun: was in a plan, or has blocks that a connector loaded. Others are held."""
    PAUSED_ALL = "paused_all"
    """Nobody: all are held."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request that a worker has not seen, or has forgotten when it was preempted.

    Attributes:
        output_token_ids: outputs so far; empty unless it was preempted.
        block_ids: its whole block table, one list per group.
        num_computed_tokens: leading tokens whose keys and values are in those blocks.
        resumed: whether it was preempted before.
    """

    source: EngineCoreRequest
    output_token_ids: Sequence[int]
    block_ids: BlockIds
    num_computed_tokens: int
    resumed: bool = False


class CachedRequests(msgspec.Struct, frozen=True):
    """The requests of a step that the worker has in its batch: only what is new.

    Attributes:
        request_ids: in the scheduler's order.
        num_computed_tokens: one per request id, before this step.
        new_block_ids: by request id, blocks to append per group; few requests need some.
    """

    request_ids: Sequence[str] = ()
    num_computed_tokens: Sequence[int] = ()
    new_block_ids: Mapping[str, BlockIds] = {}


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step.

    Attributes:
        step: serial number of the plan, from 1.
        new_requests: in full, also those that come back after preemption.
        cached_requests: as differences.
        num_scheduled_tokens: per request id, at least 1.
        total_num_scheduled_tokens: their sum.
        draft_token_ids: per request id, drafts to verify; part of its scheduled tokens. Where they
            are not known yet, NO_DRAFT keeps their places: the engine puts them in once the step
            before is done, so that the plan comes back with them.
        encoder_inputs: per request id, indices of the features to encode in this step.
        freed_encoder_inputs: identifiers whose embeddings a worker forgets, before it encodes;
            each is told once, and a worker may never have had it.
        structured_request_ids: request id to its place among the scheduled ones, of those that a
            grammar constrains.
        preempted_request_ids: leave the batch and may come back.
        finished_request_ids: ended since the last plan; each is told once.
        kv_connector_metadata: what the KV connector's scheduler half tells its worker half.
    """

    step: int = 0
    new_requests: Sequence[NewRequest] = ()
    cached_requests: CachedRequests = msgspec.field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = {}
    total_num_scheduled_tokens: int = 0
    draft_token_ids: Mapping[str, Sequence[int]] = {}
    encoder_inputs: Mapping[str, Sequence[int]] = {}
    freed_encoder_inputs: Sequence[str] = ()
    structured_request_ids: Mapping[str, int] = {}
    preempted_request_ids: frozenset[str] = frozenset()
    finished_request_ids: frozenset[str] = frozenset()
    kv_connector_metadata: Any = None


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What no step may exceed, and how steps are made.

    Raises ConfigError for limits that cannot work together.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of one step.
        max_model_len: longest prompt plus output.
        chunked_prefill: whether a prompt may be computed over several steps.
        long_prefill_token_threshold: most tokens that one request gets in a step; 0 is no limit.
        max_waiting: most requests that wait; one more is refused. None is no limit.
        num_draft_tokens: most drafts of a request in a step.
        num_lookahead_tokens: blocks are had for so many tokens beyond those of the step.
        max_loras: most adapters in one step; 0 is no limit.
        max_encoder_tokens: most tokens that encoders work on in one step.
        asynchronous: whether a step may be planned before the results of the last one are in.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_waiting: int | None = None
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0
    max_loras: int = 0
    max_encoder_tokens: int = 0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        """Refuse limits that cannot work together."""
        if self.asynchronous and self.num_draft_tokens:
            raise ConfigError(
                "scheduler.asynchronous: steps cannot be planned ahead together with a speculator, "
                "which has to see the results first"
            )
        if self.chunked_prefill:
            return
        if self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "scheduler.max_num_batched_tokens: expected at least max_model_len "
                f"({self.max_model_len}) without scheduler.chunked_prefill, got "
                f"{self.max_num_batched_tokens}"
            )
        if self.long_prefill_token_threshold:
            raise ConfigError(
                f"scheduler.long_prefill_token_threshold: expected 0 without "
                f"scheduler.chunked_prefill, got {self.long_prefill_token_threshold}"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerContext(Context):
    """What a scheduler is built with: everything that it may know of the outside.

    Attributes:
        policy: the configured scheduling policy. Its faults are caught: whatever the plugin does,
            these calls return something of the right type.
        clock: seconds; the only time a scheduler may read.
        watermark: share of the blocks that must stay free when a request is admitted beside
            others, so that running ones can grow.
        policy_fault: to be told in words when a decision of the policy could not be followed.
        connector: loads and stores KV blocks elsewhere.
        encoder_cache: of models that see or hear.
        grammars: of structured output.
        record: takes what each step decided. None: nobody listens, so make no record.
        log_stats: whether outputs carry events.
        report_finished: whether `EngineCoreOutputs.finished_requests` is to be filled in.
    """

    limits: SchedulerLimits
    kv_cache: KVCacheManager
    policy: SchedulingPolicy
    clock: Callable[[], float]
    watermark: float = 0.0
    policy_fault: Callable[[str], None] = lambda _words: None
    connector: KVConnectorScheduler | None = None
    encoder_cache: EncoderCache | None = None
    grammars: Grammars | None = None
    record: Callable[[StepRecord], None] | None = None
    log_stats: bool = False
    report_finished: bool = False


class Scheduler(Component):
    """Hands out each step's token budget. Knows no phases: tokens computed and tokens wanted.

    The engine calls it from one thread. Each plan of `schedule` comes back once, in the order in
    which they were made, to `update` or to `plan_lost`; where `update` raised or was interrupted,
    to `plan_lost` after it. Under `limits.asynchronous` further plans may be made in between.
    """

    context: SchedulerContext

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a new request; its id is not among the live ones.

        Raises:
            RequestError: it could never run; nothing else is disturbed.
            OverloadedError: too many wait.
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Return the plan of the next step; it may be empty."""

    @abstractmethod
    def update(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the outcome of a plan; return what is new, by client index."""

    @abstractmethod
    def plan_lost(self, plan: SchedulerOutput) -> None:
        """Take it that a plan may not have been carried out: an error or interrupt came between.

        What it told of finished requests is told again; requests that were in it, or in a later
        plan, are computed anew. One whose results were all taken is no loss.
        """

    @abstractmethod
    def finish_requests(
        self, request_ids: Iterable[str] | None, reason: FinishReason
    ) -> dict[int, EngineCoreOutputs]:
        """End live requests from outside; unknown ids are ignored, None is all of them.

        Returns:
            The last output of each request that was live, by client index.
        """

    @abstractmethod
    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether a step has anything to do: live requests, or finished ones to tell workers.

        Requests that a pause holds are nothing to do, until their deadline has passed. During a
        pause, what a connector still loads or keeps is something to do: its memory is in use.
        """

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Return how it stands."""

    def live_request(self, request_id: str) -> Request | None:  # noqa: ARG002
        """Return a live request, for reading; None if there is none of that id."""
        raise self._lacks("shows no live requests")

    def why_waiting(self, request_id: str) -> WaitReason | None:  # noqa: ARG002
        """Return why a live request got no tokens in the last step; None if it got some.

        While a pause holds it and no step is planned, there is a reason too.

        Raises:
            RequestError: no live request has that id.
        """
        raise self._lacks("does not say why a request waits")

    def update_drafts(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:  # noqa: ARG002
        """Take drafts for the next step, by request id; ids that are not live are skipped."""
        raise self._lacks("takes no drafts")

    def set_policy(self, policy: SchedulingPolicy) -> None:  # noqa: ARG002
        """Put another policy in the place of `context.policy`, between two steps.

        No request is lost; those that wait are put in the new order.
        """
        raise self._lacks("cannot change its policy while it runs")

    def set_pause(self, state: PauseState) -> None:  # noqa: ARG002
        """Let only some requests have tokens from the next plan on, or all of them again.

        Requests that are held stay live: they can be aborted, they end when their deadline has
        passed, and after the pause they get the tokens that they would have had. Results of
        earlier plans are taken and loads go on as ever. Who is not held runs to its end, so that
        `has_requests` becomes False.
        """
        raise self._lacks("cannot be paused")

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:  # noqa: ARG002
        """Forget cached content.

        Args:
            recompute_running: also preempt what runs, for example after the weights changed.
        """
        raise self._lacks("has no prefix cache to reset")

    def _lacks(self, words: str) -> NotImplementedError:
        return NotImplementedError(f"the scheduler {self.name!r} {words}")
