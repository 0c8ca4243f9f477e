"""Schedulers and their policies: which request gets how many tokens in a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from .component import Component, Context
from .execution import ModelRunnerOutput
from .params import SamplingParams
from .requests import EngineCoreOutput, EngineCoreRequest, FinishReason

__all__ = [
    "CachedRequest",
    "KVCacheManager",
    "NewRequest",
    "PolicyContext",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerContext",
    "SchedulerLimits",
    "SchedulerOutput",
    "SchedulingPolicy",
]


class RequestStatus(Enum):
    """Where a live request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A live request, as the scheduler and its policy see it.

    Attributes:
        source: the request as it came in.
        num_computed_tokens: leading tokens whose keys and values are in the cache, or will be
            when the step that was planned last has run.
        num_prompt_logprobs: prompt positions whose log-probabilities were delivered.
    """

    source: EngineCoreRequest
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_prompt_logprobs: int = 0

    @property
    def request_id(self) -> str:
        """Unique among live requests."""
        return self.source.request_id

    @property
    def params(self) -> SamplingParams:
        """What was asked for."""
        return self.source.params

    @property
    def priority(self) -> int:
        """Smaller is more important."""
        return self.source.priority

    @property
    def arrival_time(self) -> float:
        """Seconds on the engine's clock."""
        return self.source.arrival_time

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.source.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Length of prompt and output together."""
        return len(self.source.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that a worker has not seen, or has forgotten when it was preempted.

    Attributes:
        output_token_ids: outputs so far; empty unless it was preempted.
        block_ids: its whole block table.
    """

    source: EngineCoreRequest
    output_token_ids: Sequence[int]
    block_ids: Sequence[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request that the worker has in its batch: only what is new."""

    request_id: str
    new_block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step.

    Attributes:
        new_requests: in full, also those that come back after preemption.
        cached_requests: as differences.
        num_scheduled_tokens: per request id, at least 1.
        total_num_scheduled_tokens: their sum.
        preempted_request_ids: leave the batch and may come back.
        finished_request_ids: ended since the last plan; each is told once.
    """

    new_requests: Sequence[NewRequest] = ()
    cached_requests: Sequence[CachedRequest] = ()
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    preempted_request_ids: frozenset[str] = frozenset()
    finished_request_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What no step may exceed."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class KVCacheManager(Protocol):
    """Hands out cache blocks."""

    block_size: int
    num_blocks: int

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""

    def allocate(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Extend a request's blocks to hold `num_new_tokens` more than are computed.

        Returns:
            The ids of the new blocks, or None if there are not enough; then nothing changed.
        """

    def free(self, request: Request) -> None:
        """Give back all of a request's blocks."""

    def block_ids(self, request: Request) -> list[int]:
        """Return a request's blocks in order."""


class PolicyContext(Context):
    """What a scheduling policy is built with."""


class SchedulingPolicy(Component):
    """Decides who goes first and who gives way. An error that it raises ends the engine."""

    context: PolicyContext

    @abstractmethod
    def key(self, request: Request) -> Any:
        """Return what orders waiting requests, smallest first.

        Read when a request enters the queue: once when it comes, and at each preemption.

        Keys of one policy compare with each other; equal keys keep their order of arrival. A
        preempted request re-enters ahead of waiting ones with an equal key.
        """

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the request to preempt when blocks run out.

        Args:
            running: in order of admission, never empty.
        """
        return running[-1]


@dataclass(frozen=True, kw_only=True)
class SchedulerContext(Context):
    """What a scheduler is built with.

    Attributes:
        policy: the configured scheduling policy.
        clock: seconds; the only time a scheduler may read.
    """

    limits: SchedulerLimits
    kv_cache: KVCacheManager
    policy: SchedulingPolicy
    clock: Callable[[], float]


class Scheduler(Component):
    """Hands out each step's token budget. Knows no phases: tokens computed and tokens wanted."""

    context: SchedulerContext

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a new request; its id is not among the live ones."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Return the plan of the next step; it may be empty."""

    @abstractmethod
    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take the outcome of a plan; return what is new of each request."""

    @abstractmethod
    def finish_requests(
        self, request_ids: Iterable[str], reason: FinishReason
    ) -> list[EngineCoreOutput]:
        """End live requests from outside; unknown ids are ignored.

        Returns:
            The last output of each request that was live.
        """

    @abstractmethod
    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether a step has anything to do: live requests, or finished ones to tell workers."""
