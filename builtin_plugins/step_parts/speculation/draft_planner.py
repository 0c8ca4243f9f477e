"""The engine half of speculation: draft lengths of requests, and acceptance statistics."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint.errors import RequestError
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    ModelRunnerOutput,
    Request,
    RequestFault,
    SchedulerOutput,
    StepCost,
)
from hardpoint.plugins.step_part import (
    AdmissionGate,
    DraftTokens,
    EngineHalfContext,
    OutputFigures,
    PlanData,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
    WorkerSetup,
)

from .messages import DraftData, DraftReport
from .requests import KIND, NONE

Count = Annotated[int, Meta(ge=0)]

_CONSEQUENCE = "its requests go on without drafts"


_PROBE_EVERY = 64
"""Steps after which requests without a gain from drafts get one again: 1.6 % more rows.

All at once, because a step with a single draft takes longer than a step without. Requests with a
quick speculator need none: the planner compares their drafts with the next tokens in every step.
"""

_MEMORY = 20.0
"""Drafts of a request that count; earlier ones are forgotten."""
_COMMON_MEMORY = 200.0
"""The same of all requests together."""
_PRIOR = 4.0
"""Drafts that the rate of all requests counts as, for a request with few of its own."""
_RESTART = 0.003
"""Probability of a run of equal outcomes below which the rate of a request has changed."""
_RESTART_PRIOR = 1.0
"""Accepted and rejected drafts that are added to the outcomes since such a change."""
_ROUNDS = 3
"""The threshold depends on the drafts, and these on it."""


@dataclass
class AcceptanceRate:
    """The share of accepted drafts among drafts with accepted predecessors."""

    accepted: float = 0.0
    tried: float = 0.0
    memory: float = _COMMON_MEMORY

    @property
    def mean(self) -> float:
        """The share, as after one draft more of each outcome."""
        return (self.accepted + 1.0) / (self.tried + 2.0)

    def add(self, verified: int, accepted: int) -> None:
        """Add the outcome of a step; drafts after the first wrong one do not count."""
        tried = min(accepted + 1, verified)
        keep = max(0.0, 1.0 - tried / self.memory)
        self.accepted = keep * self.accepted + accepted
        self.tried = keep * self.tried + tried


@dataclass
class RequestRate(AcceptanceRate):
    """The acceptance rate of a request, which starts again after an abrupt change of the text.

    Attributes:
        run: latest outcomes that are equal: positive if accepted, negative if rejected.
        before_run: mean before these.
        is_own: whether the rate has started again, so that the rate of all requests does not count.
    """

    memory: float = _MEMORY
    run: int = 0
    before_run: float = 0.5
    is_own: bool = False

    def add(self, verified: int, accepted: int) -> None:
        """Add the outcome of a step; start again if the latest outcomes are unlikely."""
        before, earlier = self.mean, self.run
        super().add(verified, accepted)
        if accepted:
            self.run = max(self.run, 0) + accepted
        if accepted < verified:
            self.run = min(self.run, 0) - 1
        count = abs(self.run)
        if self.run * earlier <= 0 or count <= abs(earlier):
            self.before_run = before
        probability = self.before_run if self.run > 0 else 1.0 - self.before_run
        if 1 < count < self.tried and probability**count < _RESTART:
            self.accepted, self.tried, self.is_own = float(max(self.run, 0)), float(count), True

    def estimate(self, all_requests: AcceptanceRate) -> float:
        """Return the probability that the next draft is accepted, between 0 and 1."""
        if self.is_own:
            return (self.accepted + _RESTART_PRIOR) / (self.tried + 2 * _RESTART_PRIOR)
        return (self.accepted + _PRIOR * all_requests.mean) / (self.tried + _PRIOR)


class _DraftFigures(msgspec.Struct):
    """Counts of a request, named as in `SchedulerStats`, including counts of another engine."""

    num_drafts: Count = 0
    num_verified_drafts: Count = 0
    num_accepted_by_position: Annotated[list[Count], Meta(max_length=1000)] = []


@dataclass
class _SpeculatingRequest:
    """A request that has a speculator.

    Attributes:
        num_known: tokens of its output that the worker has; None if it does not know the request.
        is_off: whether its speculator has failed for it.
        rate: share of its drafts that were accepted.
        num_verified: its drafts that were verified, each of several tokens.
        num_tokens: their tokens.
        by_position: tokens that were accepted, by position in their draft.
    """

    request: Request
    speculator: str
    num_known: int | None = None
    is_off: bool = False
    rate: RequestRate = field(default_factory=RequestRate)
    num_verified: int = 0
    num_tokens: int = 0
    by_position: list[int] = field(default_factory=list)

    def add(self, verified: int, accepted: int) -> None:
        self.rate.add(verified, accepted)
        self.num_verified += 1
        self.num_tokens += verified
        self.by_position += [0] * (accepted - len(self.by_position))
        for position in range(accepted):
            self.by_position[position] += 1

    def figures(self) -> dict[str, float | Sequence[float]]:
        return {
            "num_drafts": self.num_tokens,
            "num_accepted_drafts": sum(self.by_position),
            "num_verified_drafts": self.num_verified,
            "num_accepted_by_position": list(self.by_position),
        }

    def add_figures(self, figures: Mapping[str, Any], field: str) -> None:
        """Add the counts of another engine.

        Raises:
            RequestError: they are not counts.
        """
        try:
            counted = msgspec.convert(figures, _DraftFigures)
        except msgspec.ValidationError as cause:
            raise RequestError(f"resumed.{field}: {cause}") from cause
        self.num_tokens, self.num_verified = counted.num_drafts, counted.num_verified_drafts
        self.by_position = counted.num_accepted_by_position


class DraftPlanner(
    RequestFilter,
    AdmissionGate,
    RequestLifecycle,
    PlanData,
    StepObserver,
    DraftTokens,
    OutputFigures,
    WorkerSetup,
):
    """Chooses limits of drafts, and passes on the worker's drafts."""

    def __init__(self, name: str, config: EngineConfig, context: EngineHalfContext) -> None:
        self._name = name
        self._default = context.components.enabled(KIND)[0]
        self._faults, self._step_cost = context.faults, context.step_cost
        self._rates = {name: AcceptanceRate() for name in context.components.enabled(KIND)}
        self._quick: set[str] = set()  # speculators with drafts that were not verified
        self.num_draft_tokens = config.speculation.num_draft_tokens
        classes = {n: context.components.find(KIND, n) for n in context.components.enabled(KIND)}
        self._heads = {n for n, cls in classes.items() if getattr(cls, "has_kv_cache", False)}
        self.num_lookahead_tokens = self.num_draft_tokens if self._heads else 0
        self._adaptive = config.speculation.adaptive
        self._most_tokens = config.scheduler.max_num_batched_tokens
        self._live: dict[str, _SpeculatingRequest] = {}
        self._drafts: dict[str, list[int]] = {}
        self._observed: dict[str, int] = {}  # drafts that are compared with the next token

    def uses(self, request: EngineCoreRequest) -> bool:
        """Return whether a request may have drafts."""
        if request.pooling_params is not None or request.leader is not None:
            return False
        return request.params.speculator != NONE

    def gate(self, request: Request) -> None:
        """Keep the request, because its output grows."""
        speculator = request.source.params.speculator or self._default
        live = _SpeculatingRequest(request, speculator)
        resumed = request.source.resumed
        if resumed is not None and resumed.part_figures:
            live.add_figures(resumed.part_figures.get(self._name, {}), f"part_figures.{self._name}")
        self._live[request.request_id] = live

    def workers_started(self) -> Mapping[str, RequestFault]:
        """Begin again with all requests, which halves of workers do not know after a sleep."""
        for live in self._live.values():
            live.num_known = None
        return {}

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return the limits of drafts after this step; None if the worker has nothing to do."""
        started: dict[str, str] = {}
        for new in plan.new_requests:
            live = self._live.get(new.source.request_id)
            if live is not None and live.num_known is None:  # else it was preempted
                started[new.source.request_id] = live.speculator
        limits, observed = self._limits(plan, started)
        is_idle = not (limits or observed or started or self._heads)
        if is_idle and self._live.keys().isdisjoint(plan.draft_token_ids):
            return None
        for name in started:  # last: after a fault they start when they are new again
            self._live[name].num_known = len(self._live[name].request.output_token_ids)
        missed: dict[str, list[int]] = {}
        for name in plan.num_scheduled_tokens:  # they may get tokens
            live = self._live.get(name)
            if live is not None and live.num_known is not None:
                output = live.request.output_token_ids
                if live.num_known < len(output):
                    missed[name] = list(output[live.num_known :])
                    live.num_known = len(output)
        budget = max(0, self._most_tokens - len(plan.num_scheduled_tokens))
        return msgspec.msgpack.encode(DraftData(limits, missed, started, budget, observed))

    def _limits(
        self, plan: SchedulerOutput, started: Collection[str]
    ) -> tuple[dict[str, int], list[str]]:
        """Return the limits of drafts, and the requests without a gain from drafts."""
        longest: dict[str, int] = {}
        rates: dict[str, float] = {}
        context = 0
        for name in plan.num_scheduled_tokens:
            live = self._live.get(name)
            if live is None or live.is_off or (live.num_known is None and name not in started):
                continue
            request = live.request
            context += request.num_tokens
            # This step gives a token, and the next one a token more than its drafts.
            left = (request.source.params.max_tokens or 1) - len(request.output_token_ids) - 2
            if left > 0:
                longest[name] = min(self.num_draft_tokens, left)
                rates[name] = live.rate.estimate(self._rates[live.speculator])
        if not longest or not self._adaptive:
            return longest, []
        count = len(plan.num_scheduled_tokens)
        lengths = draft_lengths(longest, rates, self._step_cost(), count, context)
        if plan.step % _PROBE_EVERY == 0:
            for name, length in lengths.items():
                lengths[name] = length or int(self._live[name].speculator not in self._quick)
        observed = [name for name, length in lengths.items() if not length]
        return {name: length for name, length in lengths.items() if length}, observed

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        """Count accepted drafts, and read the worker's new drafts."""
        for name, drafts in plan.draft_token_ids.items():
            tokens, live = result.sampled_token_ids.get(name), self._live.get(name)
            if live is not None and tokens:
                live.add(len(drafts), len(tokens) - 1)
                self._rates[live.speculator].add(len(drafts), len(tokens) - 1)
        self._compare_observed(result.sampled_token_ids)
        for data in result.part_reports.get(self._name, {}).values():  # of the rank that samples
            report = msgspec.msgpack.decode(data, type=DraftReport)
            for name, tokens in result.sampled_token_ids.items():
                live = self._live.get(name)
                if live is not None and live.num_known is not None:
                    live.num_known += len(tokens)
            self._drafts = report.drafts
            self._observed |= report.observed
            for name in report.failed:
                if name in self._live:
                    self._live[name].is_off = True
            for speculator, message in report.faults:
                self._faults.record(speculator, message, _CONSEQUENCE)
        return {}

    def _compare_observed(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """Count drafts that were not verified as if they had been."""
        for name, tokens in sampled.items():
            draft, live = self._observed.pop(name, None), self._live.get(name)
            if draft is not None and live is not None and tokens:
                self._quick.add(live.speculator)
                is_accepted = int(tokens[0] == draft)
                live.rate.add(1, is_accepted)
                self._rates[live.speculator].add(1, is_accepted)

    def figures(self, request_id: str) -> Mapping[str, float | Sequence[float]]:
        """Return the drafts of a request, with the names of `SchedulerStats`."""
        return self._live[request_id].figures()

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Return the drafts of the worker after the last step."""
        drafts, self._drafts = self._drafts, {}
        return {name: tokens for name, tokens in drafts.items() if name in self._live}

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._live.pop(request_id, None)
        self._drafts.pop(request_id, None)
        self._observed.pop(request_id, None)


def draft_lengths(
    limits: Mapping[str, int],
    rates: Mapping[str, float],
    cost: StepCost,
    num_requests: int,
    context: int,
) -> dict[str, int]:
    """Return how many drafts of each request make the step give most tokens per second.

    A draft is worth its row if it adds more tokens per millisecond than the step gives without it.
    Position i is accepted with the probability `rate ** i`.

    Args:
        limits: most drafts of each request.
        rates: probability that a draft of each is accepted.
        cost: fitted cost of steps.
        num_requests: requests of the step.
        context: tokens that these attend to, together.
    """
    base = cost.milliseconds(single_queries=num_requests, context=context)
    if not cost.is_trained or cost.draft <= 0 or base <= 0:  # not all work was measured yet
        return dict(limits)
    lengths = dict.fromkeys(limits, 0)
    for _ in range(_ROUNDS):
        tokens = num_requests + sum(_expected(rates[name], n) for name, n in lengths.items())
        threshold = cost.draft * tokens / (base + cost.draft * sum(lengths.values()))
        lengths = {
            name: min(limit, _longest(rates[name], threshold)) for name, limit in limits.items()
        }
    return lengths


def _expected(rate: float, length: int) -> float:
    return length if rate >= 1 else rate * (1 - rate**length) / (1 - rate)


def _longest(rate: float, threshold: float) -> int:
    if threshold >= 1 or rate <= threshold:
        return 0
    if rate >= 1:
        return 1 << 16
    return math.ceil(math.log(threshold) / math.log(rate)) - 1
