"""A continuous-batching loop without a model, with its own account of served tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hardpoint.plugins import Request, RequestStatus
from support.plugins.policies import LOAD, request


@dataclass(frozen=True)
class Job:
    """A request to come; the cache has `cached` tokens of its prompt whenever it is admitted."""

    tenant: str
    prompt: int
    max_tokens: int
    cached: int = 0


@dataclass
class Service:
    """Prompt tokens first computed and tokens sampled, by tenant.

    `history` has an entry for each change: who was backlogged, and what each had so far.
    """

    totals: dict[str, tuple[int, int]] = field(default_factory=dict)
    history: list[tuple[set[str], dict[str, tuple[int, int]]]] = field(default_factory=list)

    @staticmethod
    def cost(total, input_cost, output_cost):
        return total[0] * input_cost + total[1] * output_cost

    def of(self, tenant, input_cost, output_cost):
        return self.cost(self.totals.get(tenant, (0, 0)), input_cost, output_cost)

    def add(self, tenant, inputs, outputs):
        before = self.totals.get(tenant, (0, 0))
        self.totals[tenant] = (before[0] + inputs, before[1] + outputs)

    def note(self, backlogged):
        for tenant in backlogged:
            self.totals.setdefault(tenant, (0, 0))
        self.history.append((backlogged, dict(self.totals)))


class Loop:
    """Running first, then whom the policy puts first; one token budget per step.

    A request is admitted when it fits with all it may become, as in the paper, so none has to
    be preempted; `preempt` does it all the same.
    """

    def __init__(self, policy, *, budget: int, capacity: int) -> None:
        self.policy = policy
        self.budget = budget
        self.capacity = capacity
        self.now = 0.0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.service = Service()
        self._cached: dict[str, int] = {}
        self._seen: Counter[str] = Counter()
        self._number = 0

    @property
    def live(self):
        return self.running + self.waiting

    def num_waiting(self, tenant):
        return sum(it.tags["tenant"] == tenant for it in self.waiting)

    def add(self, job: Job) -> None:
        self._number += 1
        it = request(
            str(self._number),
            prompt=job.prompt,
            max_tokens=job.max_tokens,
            arrival=self.now,
            tenant=job.tenant,
            order=self._number,
        )
        self._cached[it.request_id] = job.cached
        self.policy.added(it)
        self.waiting.append(it)
        self._note()

    def preempt(self) -> None:
        it = self.policy.victim(self.running, LOAD)
        self.running.remove(it)
        it.status = RequestStatus.PREEMPTED
        it.num_computed_tokens = 0
        self.policy.preempted(it)
        self.waiting.insert(0, it)
        self._note()

    def abort(self, it: Request) -> None:
        (self.running if it in self.running else self.waiting).remove(it)
        self.policy.finished(it)
        self._note()

    def step(self) -> None:
        self.now += 1.0
        plan: list[tuple[Request, int]] = []
        left = self.budget
        for it in self.running:
            left -= self._give(plan, it, left)
        while left and self.waiting:
            it = self._first()
            if sum(map(self._full, self.running)) + self._full(it) > self.capacity:
                break
            self.waiting.remove(it)
            self.running.append(it)
            it.status = RequestStatus.RUNNING
            it.num_computed_tokens = self._cached[it.request_id]
            left -= self._give(plan, it, left)
            self._note()
        for it, tokens in plan:
            it.num_computed_tokens += tokens
            if it.num_computed_tokens == it.num_tokens:
                it.append(1)
                if len(it.output_token_ids) == it.params.max_tokens:
                    self.running.remove(it)
                    self.policy.finished(it)
        self._note()

    def _first(self) -> Request:
        groups = {self.policy.group(it) for it in self.waiting}
        group = min(groups, key=lambda group: (self.policy.group_key(group, self.now), str(group)))
        mine = [it for it in self.waiting if self.policy.group(it) == group]
        return min(mine, key=lambda it: (self.policy.key(it), it.order))

    def _give(self, plan, it: Request, left: int) -> int:
        tokens = min(it.num_tokens - it.num_computed_tokens, left)
        if tokens > 0:
            self.policy.scheduled(it, tokens)
            plan.append((it, tokens))
            self._serve(it, tokens)
        return tokens

    def _serve(self, it: Request, tokens: int) -> None:
        """Count the positions that were never computed before, one by one."""
        end = it.num_computed_tokens + tokens
        for position in range(max(self._seen[it.request_id], it.num_computed_tokens), end):
            samples = position >= it.num_prompt_tokens - 1
            self.service.add(it.tags["tenant"], int(position < it.num_prompt_tokens), int(samples))
        self._seen[it.request_id] = max(self._seen[it.request_id], end)

    def _full(self, it: Request) -> int:
        return it.num_prompt_tokens + (it.params.max_tokens or 0)

    def _note(self) -> None:
        self.service.note({it.tags["tenant"] for it in self.waiting})
