"""A live request, as schedulers, policies and the KV cache see it."""

from __future__ import annotations

from enum import Enum
from typing import Generic

from hardpoint.plugins.component.type_variables import ArgumentsT_co
from hardpoint.typed import ReadOnlyList

from .params import EngineCoreRequest, SamplingParams
from .releases import BlockReleases
from .stats import EngineCoreEvent

__all__ = ["Request", "RequestStatus"]


class RequestStatus(Enum):
    """Status of a live request.

    The two reasons to wait are of schedulers of contract 1; step parts give a `WaitReason`.
    """

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting for its grammar"
    WAITING_FOR_REMOTE_KV = "waiting for remote KV"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request(Generic[ArgumentsT_co]):
    """A live request. Only the scheduler modifies it; policies get a view of it.

    `Request[Arguments]` in an annotation states the type of a policy's arguments.

    Attributes:
        source: the request as received.
        request_id: unique among live requests.
        arrival_time: when it arrived at the engine, in seconds on the engine's clock.
        priority: smaller is more important.
        order: serial number in order of arrival.
        output_token_ids: output so far; a read-only list that `append` extends.
        num_prompt_tokens: length of the prompt.
        num_tokens: length of prompt and output together.
        num_computed_tokens: leading tokens with keys and values in the cache, now or after
            the planned steps.
        num_output_placeholders: tokens that planned steps will sample and that are not known yet.
        draft_token_ids: drafts to be verified by the next step.
        num_cached_tokens: tokens that needed no computing when it was first scheduled; -1 before.
        num_prompt_logprobs: prompt positions with log-probabilities that were sent.
        num_routed_positions: positions with experts that were sent.
        num_preemptions: number of preemptions.
        num_overtaken: steps that admitted another request first while it was set aside.
        events: events not sent yet.
        releases: KV blocks that step parts release, by `EngineHalfContext.release_blocks`; None if
            they release none.
        arguments: for the policy: result of its `prepare` for the request's arguments, the
            defaults if it gives none. The engine sets it before a policy gets the request.
        view: view of it for policies, made for the first one that is called. A scheduler sets it
            to None when the request ends.
    """

    __slots__ = (
        "arguments",
        "arrival_time",
        "draft_token_ids",
        "events",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_routed_positions",
        "num_tokens",
        "order",
        "output_token_ids",
        "priority",
        "releases",
        "request_id",
        "source",
        "status",
        "view",
    )

    def __init__(self, source: EngineCoreRequest, order: int = 0) -> None:
        """Create a request with no computed tokens; a resumed request has its outputs."""
        self.source = source
        self.request_id = source.request_id
        self.arrival_time = source.arrival_time
        self.priority = source.priority
        self.order = order
        self.status: RequestStatus = RequestStatus.WAITING
        resumed = source.resumed
        self.output_token_ids: list[int] = ReadOnlyList(
            () if resumed is None else resumed.output_token_ids
        )
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.draft_token_ids: list[int] = []
        self.num_cached_tokens = -1
        self.num_prompt_logprobs = 0 if resumed is None else resumed.num_prompt_logprobs
        self.num_routed_positions = 0 if resumed is None else resumed.num_routed_positions
        self.num_preemptions = 0
        self.num_overtaken = 0
        self.events: list[EngineCoreEvent] = []
        self.releases: BlockReleases | None = None
        self.arguments: ArgumentsT_co = None  # type: ignore[assignment]
        self.view: Request | None = None

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        return self.source.params

    @property
    def num_plain_tokens(self) -> int:
        """Number of known leading tokens with keys and values that no release changes."""
        first = self.num_tokens if self.releases is None else self.releases.all[0].at
        return min(first, self.num_tokens)

    @property
    def tags(self) -> dict[str, str]:
        """User-defined labels, such as {"tenant": "acme"}."""
        return self.source.tags

    @property
    def deadline(self) -> float | None:
        """Time on the engine's clock at which it ends unfinished; None is never."""
        timeout = self.source.timeout
        return None if timeout is None else self.arrival_time + timeout

    def append(self, token: int) -> None:
        """Add a generated token."""
        list.append(self.output_token_ids, token)
        self.num_tokens += 1

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the known tokens from position `start` up to `end`, of prompt and output."""
        prompt = self.source.prompt_token_ids
        split = self.num_prompt_tokens
        if end <= split:
            return prompt[start:end]
        outputs = self.output_token_ids[max(start - split, 0) : end - split]
        return prompt[start:] + outputs if start < split else outputs

    def __repr__(self) -> str:
        """Return id, status and progress."""
        return (
            f"<Request {self.request_id!r} {self.status.value}: "
            f"{self.num_computed_tokens} of {self.num_tokens} tokens computed>"
        )
