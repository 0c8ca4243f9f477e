"""Schedulers: which request gets how many tokens in a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from .component import Component, Context
from .errors import ConfigError
from .kv_cache import BlockIds, KVCacheManager
from .plan import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from .request import Request
from .requests import EngineCoreOutputs, EngineCoreRequest, FinishReason
from .scheduling_policy import SchedulingPolicy
from .stats import SchedulerStats
from .step_record import StepRecord, WaitReason

__all__ = [
    "EncoderCache",
    "Grammars",
    "KVConnectorScheduler",
    "PauseState",
    "Scheduler",
    "SchedulerContext",
    "SchedulerLimits",
]


class PauseState(Enum):
    """Who may be given tokens."""

    UNPAUSED = "unpaused"
    """Everybody."""
    PAUSED_NEW = "paused_new"
    """Who has begun: was in a plan, or has blocks that a connector loaded. Others are held."""
    PAUSED_ALL = "paused_all"
    """Nobody: all are held."""


class KVConnectorScheduler(Protocol):
    """The half of a KV connector that lives beside the scheduler."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say what can be loaded beyond what is computed.

        Args:
            request: about to be admitted.
            num_computed_tokens: leading tokens that the local cache has.

        Returns:
            How many tokens after those can be loaded (None: not known yet, ask again), and
            whether loading goes on beside the steps. Then the request waits until
            `ModelRunnerOutput.kv_loaded` names it.
        """

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Note that a request has its blocks, also where nothing is to be loaded."""

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """Return what the workers' half has to do in this step; forget what was said."""

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Note that a request ended.

        Returns:
            Whether its blocks must be kept until `ModelRunnerOutput.kv_saved` names it, and what
            its last output shall carry as `kv_transfer_params`.
        """


class EncoderCache(Protocol):
    """Embeddings of images and the like, by identifier; each is encoded once while it is held."""

    def holds(self, request: Request, index: int) -> bool:
        """Whether a feature is there; if so, the request holds it from now on."""

    def can_allocate(self, request: Request, index: int, reserved: int) -> bool:
        """Whether a feature finds room beside `reserved` tokens that are promised already."""

    def allocate(self, request: Request, index: int) -> None:
        """Reserve room for a feature; the request holds it."""

    def cancel(self, request: Request, index: int) -> None:
        """Undo `allocate`: nobody will encode it in this step. Whoever held it holds it no more."""

    def free_input(self, request: Request, index: int) -> None:
        """Note that a request needs a feature no more."""

    def free(self, request: Request) -> None:
        """Note that a request needs no feature any more."""

    def take_freed(self) -> Sequence[str]:
        """Return the identifiers that were dropped since the last call."""


class Grammars(Protocol):
    """The grammars of structured output: who is in one, and what it allows."""

    def uses(self, request: Request) -> bool:
        """Whether a grammar constrains a request."""

    def ready(self, request: Request) -> bool:
        """Whether its grammar is compiled.

        Raises:
            RequestError: it cannot be compiled; the request ends with these words.
        """

    def bitmask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return which tokens may be sampled in a step; None if every one may.

        It is asked while the model runs, and only where `plan.structured_request_ids` has some.
        """


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
class SchedulerContext(Context["Scheduler"]):
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
