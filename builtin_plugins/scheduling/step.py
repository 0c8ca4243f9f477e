"""A step while it is being planned, and the plan that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardpoint.plugins import (
    BlockIds,
    CachedRequests,
    NewRequest,
    RequestStatus,
    SchedulerOutput,
    WaitReason,
)

from .live import LiveRequest


@dataclass(slots=True)
class Step:
    """What a step gives to whom so far.

    Attributes:
        number: serial number.
        now: seconds on the engine's clock; the one reading of this step.
        budget: tokens that are left.
        encoder_budget: encoder tokens that are left.
        tokens: by request id, running requests first.
        running, admitted: the requests that get them.
        new_blocks: by request id, where a running one got some.
        encoding: by identifier, the ids of those for whom it is encoded in this step.
        preempted: by request id, why.
        waiting: who was looked at and left, and why.
        stopped: why nobody further was admitted.
    """

    number: int
    now: float
    budget: int
    encoder_budget: int
    tokens: dict[str, int] = field(default_factory=dict)
    running: dict[str, LiveRequest] = field(default_factory=dict)
    admitted: dict[str, LiveRequest] = field(default_factory=dict)
    entries: list[NewRequest] = field(default_factory=list)
    new_blocks: dict[str, BlockIds] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    encoding: dict[str, set[str]] = field(default_factory=dict)
    preempted: dict[str, str] = field(default_factory=dict)
    timed_out: list[str] = field(default_factory=list)
    waiting: dict[str, WaitReason] = field(default_factory=dict)
    stopped: WaitReason | None = None

    def withdraw(self, request: LiveRequest) -> list[int]:
        """Take back everything that a running request got in this step.

        Returns:
            The features that nobody will encode now.
        """
        request_id = request.request_id
        if request_id not in self.running:
            return []
        del self.running[request_id]
        self.budget += self.tokens.pop(request_id)
        self.new_blocks.pop(request_id, None)
        self.drafts.pop(request_id, None)
        orphans = []
        for index in self.encoder_inputs.pop(request_id, ()):
            feature = request.features[index]
            users = self.encoding.get(feature.identifier, set())
            users.discard(request_id)
            if not users and self.encoding.pop(feature.identifier, None) is not None:
                self.encoder_budget += feature.length
                orphans.append(index)
        return orphans

    def cached_requests(self) -> CachedRequests:
        """Return the running requests of the step, as differences."""
        running = self.running.values()
        return CachedRequests(
            list(self.running), [r.num_computed_tokens for r in running], self.new_blocks
        )


@dataclass(slots=True)
class PlannedStep:
    """A plan whose results are not in.

    Attributes:
        requests: that get tokens, in the plan's order.
        preemptions: how often each had been preempted when it was planned; results of a request
            that was preempted since are void.
    """

    plan: SchedulerOutput
    requests: list[LiveRequest]
    preemptions: list[int]

    def computed_before(self) -> dict[str, int]:
        """Return by request id how many tokens were surely there before it.

        Of a new request it is not known how many its plan was to load.
        """
        plan = self.plan
        cached = plan.cached_requests
        computed = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        loads = plan.kv_connector_metadata is not None
        return computed | {
            new.source.request_id: 0 if loads else new.num_computed_tokens
            for new in plan.new_requests
        }

    def still_running(self) -> list[LiveRequest]:
        """Return those that were neither ended nor preempted since it was planned."""
        return [
            request
            for request, count in zip(self.requests, self.preemptions, strict=True)
            if request.status is RequestStatus.RUNNING and request.num_preemptions == count
        ]

    def is_intact(self) -> bool:
        """Whether that is all of them."""
        return len(self.still_running()) == len(self.requests)
