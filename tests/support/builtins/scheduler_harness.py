"""The default scheduler with a scripted context, and an executor without a model.

The executor is the kit's worker. Its next token is a function of the whole history; it writes into
each cache slot what a model would, and checks whatever it reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hardpoint.builtin_plugins.policies import FirstComeFirstServed, Priority
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins import (
    EngineCoreRequest,
    PolicyContext,
    RequestError,
    SamplingParams,
    SchedulerContext,
    WaitingFor,
    WaitReason,
)
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits
from hardpoint.testing import ScriptedClock
from hardpoint.testing.scheduling.checks.plan import check_record
from hardpoint.testing.scheduling.fakes.worker import SimulatedWorker, WorkerRow
from hardpoint.toolkit.encoder_cache import EncoderCacheManager
from hardpoint.typed import convert
from support.core.engine_harness import next_token

__all__ = [
    "Connector",
    "Executor",
    "FirstComeFirstServed",
    "Grammars",
    "HoldsBack",
    "Priority",
    "Simulator",
    "adapter",
    "admitted",
    "feature",
    "make_policy",
    "next_token",
    "reference",
]


def make_policy(cls):
    return cls(PolicyContext(name="it", options=convert({}, cls.Options, path="plugin.it")))


def admitted(plan):
    return [entry.source.request_id for entry in plan.new_requests]


def adapter(number):
    return LoRARequest(name=f"lora{number}", id=number)


def feature(identifier, offset, length, *, whole=False):
    return MultiModalFeature(identifier, offset, length, sees_itself=whole)


class HoldsBack(FirstComeFirstServed):
    """Holds back the requests with a tag "hold", which is the reason."""

    def admit(self, request, load):
        return request.tags.get("hold")


class Connector:
    """Loads and saves of a step part.

    Attributes:
        found: by request id, tokens to load (None: not known), and whether asynchronously.
        keep: ids whose blocks must be kept when they end.
        allocated: what `update_state_after_alloc` was given: (id, number of blocks, tokens).
        ended: ids with the number of their blocks.
    """

    def __init__(self, **found):
        self.found = found
        self.keep = set()
        self.asked, self.allocated, self.ended = [], [], []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.asked.append((request.request_id, num_computed_tokens))
        return self.found.get(request.request_id, (0, False))

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.allocated.append((request.request_id, len(block_ids[0]), num_external_tokens))

    def request_finished(self, request, block_ids):
        self.ended.append((request.request_id, sum(map(len, block_ids))))
        return request.request_id in self.keep, {"from": request.request_id}


@dataclass
class Grammars:
    """Constrains requests with an id that begins with "g"; `compiling` wait, `wrong` fail."""

    compiling: set = field(default_factory=set)
    wrong: set = field(default_factory=set)

    def holds(self, request):
        return request.request_id.startswith("g")

    def wait_reason(self, request):
        if request.request_id in self.wrong:
            raise RequestError(f"grammar of {request.request_id}: unexpected ']'")
        if request.request_id in self.compiling:
            return WaitReason(WaitingFor.GRAMMAR, "its grammar is being compiled")
        return None

    def lacks(self, request):
        return None

    def acquire(self, request):
        pass

    release = acquire


class Executor(SimulatedWorker):
    """Carries out plans without a model, and whatever transfers they ask for."""

    def __init__(self, windows, block_size):
        super().__init__(windows, block_size, next_token)

    def fill(self, request, block_ids, num_tokens):
        """Write blocks like a load of a connector."""
        row = WorkerRow(request.source, request.token_ids(0, num_tokens), block_ids, num_tokens)
        for table, contents in zip(block_ids, row.contents(row.token_ids), strict=True):
            for content in contents:
                self.memory.write(table, content, row.request_id)


class Simulator:
    """A scheduler and its context. Every plan and record is checked for consistency."""

    def __init__(  # noqa: PLR0913  all have names and defaults
        self,
        *,
        blocks=64,
        block_size=4,
        groups=None,
        policy=FirstComeFirstServed,
        caching=True,
        events=False,
        options=None,
        context=None,
        encoder_tokens=0,
        **limits,
    ):
        defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 200}
        self.limits = SchedulerLimits(
            **(defaults | {"max_encoder_tokens": encoder_tokens} | limits)
        )
        more = {} if groups is None else {"groups": groups}
        self.cache = BlockManager(blocks, block_size, prefix_caching=caching, events=events, **more)
        self.clock = ScriptedClock()
        self.records = []
        self.faults = []
        self.policy = make_policy(policy) if isinstance(policy, type) else policy
        fields = {"record": self.records.append} | (context or {})
        if encoder_tokens:
            fields.setdefault("encoder_cache", EncoderCacheManager(encoder_tokens))
        self.context_fields = fields
        self.scheduler = DefaultScheduler(
            SchedulerContext(
                name="default",
                options=DefaultScheduler.Options(**(options or {})),
                limits=self.limits,
                kv_cache=self.cache,
                policy=self.policy,
                clock=self.clock,
                policy_fault=self.faults.append,
                **fields,
            )
        )
        windows = [group.window for group in groups or [KVCacheGroup()]]
        self.executor = Executor(windows, block_size)
        self.tokens = {}
        self.ends = {}
        self._arrived = 0

    def add(self, name, prompt=4, max_tokens=50, params=None, **fields):
        """Add a request; a number is a prompt of so many tokens that no other one has."""
        self._arrived += 1
        if isinstance(prompt, int):
            prompt = [1000 * self._arrived + i for i in range(prompt)]
        fields.setdefault("arrival_time", float(self._arrived))
        self.tokens[name] = []
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, **(params or {})),
            **fields,
        )
        self.scheduler.add_request(request)

    def live(self, name):
        return self.scheduler.live_request(name)

    def why(self, name):
        return self.scheduler.why_waiting(name)

    def plan(self):
        plan = self.scheduler.schedule()
        self._check(plan)
        return plan

    def update(self, plan, result=None, **changes):
        """Hand in a result, by default the executor's; return outputs by request id."""
        result = self.executor.execute(plan) if result is None else result
        for name, value in changes.items():
            setattr(result, name, value)
        return self.record_outputs(self.scheduler.update(plan, result))

    def lose(self, plan):
        self.executor.record_lost_plan(plan)
        self.scheduler.plan_lost(plan)

    def record_outputs(self, by_client):
        outputs = {}
        for client in by_client.values():
            for output in client.outputs:
                assert output.request_id not in outputs
                outputs[output.request_id] = output
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    assert output.request_id not in self.ends, "ended twice"
                    self.ends[output.request_id] = output
        return outputs

    def step(self, **changes):
        """Plan a step and carry it out; return the plan."""
        plan = self.plan()
        self.update(plan, **changes)
        return plan

    def abort(self, *names, reason):
        return self.record_outputs(self.scheduler.finish_requests(names, reason))

    def run(self, max_steps=300, depth=0):
        """Run to the end, with results that come `depth` steps late; return all tokens."""
        late = deque()
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not late:
                self._check_empty()
                return self.tokens
            plan = self.plan()
            late.append((plan, self.executor.execute(plan)))
            while len(late) > depth or (late and not self.scheduler.has_requests()):
                self.update(*late.popleft())
        raise AssertionError(f"after {max_steps} steps some are not done: {self.scheduler.stats()}")

    def _check(self, plan):
        limits, scheduled = self.limits, plan.num_scheduled_tokens
        assert plan.total_num_scheduled_tokens == sum(scheduled.values())
        assert plan.total_num_scheduled_tokens <= limits.max_num_batched_tokens
        assert all(tokens >= 1 for tokens in scheduled.values())
        new = [entry.source.request_id for entry in plan.new_requests]
        assert [*plan.cached_requests.request_ids, *new] == list(scheduled)
        assert self.scheduler.stats().num_running <= limits.max_num_seqs
        assert len(scheduled) <= self.scheduler.stats().num_running
        for name in scheduled:
            assert self.live(name).num_computed_tokens < limits.max_model_len
        if self.records:
            self._check_record(plan, self.records[-1])

    def _check_empty(self):
        """Check that ended requests left nothing behind."""
        tracker = self.scheduler._tracker
        queues = (
            "requests",
            "running",
            "waiting",
            "blocked",
            "loaded",
            "pending_free",
        )
        for name in (
            *queues,
            "finished_outputs",
            "unreported_finished",
            "unreported_preempted",
            "unreported_freed_inputs",
            "finished_ids",
        ):
            assert not len(getattr(tracker, name)), name
        assert self.cache.num_free_blocks == self.cache.num_usable_blocks

    def _check_record(self, plan, record):
        check_record(record, plan, self.limits.max_num_batched_tokens)
        stats = self.scheduler.stats()
        assert all(self.live(name) is not None for name in record.waiting)
        assert (record.num_running, record.num_waiting) == (stats.num_running, stats.num_waiting)
        assert record.num_free_blocks == self.cache.num_free_blocks
        assert record.timestamp == self.clock.now


def reference(*adds, **settings):
    """Return the tokens of requests that are alone in a scheduler with room for everything."""
    tokens = {}
    for name, fields in adds:
        sim = Simulator(blocks=500, **settings)
        sim.add(name, **fields)
        tokens |= sim.run(500)
    return tokens
