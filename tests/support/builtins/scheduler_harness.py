"""The default scheduler with a scripted context, and an executor without a model.

The executor's next token is a function of the whole history. It writes into each cache slot what a
model would, and checks whatever it reads.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from hardpoint.builtin_plugins.policies import FirstComeFirstServed, Priority
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.core.engine.encoder_cache import EncoderCacheManager
from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins import (
    EngineCoreRequest,
    ModelRunnerOutput,
    PolicyContext,
    RequestError,
    SamplingParams,
    SchedulerContext,
    WaitingFor,
    WaitReason,
)
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.plugins.scheduler import SchedulerLimits
from hardpoint.testing import ScriptedClock
from hardpoint.typed import convert

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


def feature(identifier, offset, length):
    return MultiModalFeature(identifier=identifier, offset=offset, length=length)


def next_token(history):
    digest = hashlib.blake2b(repr(tuple(history)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big")


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
    """Constrains those whose id begins with "g"; `compiling` are not ready, `wrong` never are."""

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


@dataclass
class _Row:
    tokens: list
    table: list
    computed: int


class Executor:
    """Carries out plans without a model."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.rows = {}
        self.memory = {}

    def execute(self, plan):
        self._follow(plan)
        spans = {name: self._write(plan, name) for name in plan.num_scheduled_tokens}
        sampled = {name: self._sample(plan, name, end) for name, end in spans.items()}
        return ModelRunnerOutput(sampled_token_ids={n: s for n, s in sampled.items() if s})

    def fill(self, request, block_ids, num_tokens):
        """Write what a connector would load."""
        for position in range(num_tokens):
            self._put(block_ids[0], position, request.token_ids(0, position + 1))

    def _follow(self, plan):
        for name in plan.preempted_request_ids | plan.finished_request_ids:
            self.rows.pop(name, None)
        cached = plan.cached_requests
        for name, computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            self.rows[name].computed = computed
            for new in cached.new_block_ids.get(name, ()):
                self.rows[name].table += new
        for new in plan.new_requests:
            known = [*new.source.prompt_token_ids, *new.output_token_ids]
            row = _Row(known, list(new.block_ids[0]), new.num_computed_tokens)
            self.rows[new.source.request_id] = row

    def _write(self, plan, name):
        row = self.rows[name]
        end = row.computed + plan.num_scheduled_tokens[name]
        tokens = [*row.tokens, *plan.draft_token_ids.get(name, ())]
        assert end <= len(tokens), f"{name} has no token at position {end - 1}"
        for position in range(row.computed, end):
            self._put(row.table, position, tokens[: position + 1])
        return end

    def _sample(self, plan, name, end):
        row = self.rows[name]
        drafts = plan.draft_token_ids.get(name, ())
        for position in range(min(end, len(row.tokens))):
            found = self.memory.get(self._slot(row.table, position))
            assert found == tuple(row.tokens[: position + 1]), f"{name} reads rubbish"
        if end < len(row.tokens):
            return []
        sampled = [next_token(row.tokens)]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            sampled.append(next_token([*row.tokens, *sampled]))
        row.tokens += sampled
        return sampled

    def _slot(self, table, position):
        return table[position // self.block_size], position % self.block_size

    def _put(self, table, position, history):
        self.memory[self._slot(table, position)] = tuple(history)


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
        self.executor = Executor(block_size)
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
        limits, given = self.limits, plan.num_scheduled_tokens
        assert plan.total_num_scheduled_tokens == sum(given.values())
        assert plan.total_num_scheduled_tokens <= limits.max_num_batched_tokens
        assert all(tokens >= 1 for tokens in given.values())
        new = [entry.source.request_id for entry in plan.new_requests]
        assert [*plan.cached_requests.request_ids, *new] == list(given)
        assert self.scheduler.stats().num_running <= limits.max_num_seqs
        assert len(given) <= self.scheduler.stats().num_running
        for name in given:
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
        stats = self.scheduler.stats()
        assert record.step == plan.step
        assert record.scheduled == plan.num_scheduled_tokens
        assert set(record.new) | set(record.resumed) == {
            entry.source.request_id for entry in plan.new_requests
        }
        assert set(record.preempted) <= plan.preempted_request_ids
        assert set(record.finished) == plan.finished_request_ids
        assert not set(record.waiting) & set(record.scheduled)
        assert all(self.live(name) is not None for name in record.waiting)
        assert (record.num_running, record.num_waiting) == (stats.num_running, stats.num_waiting)
        assert record.num_free_blocks == self.cache.num_free_blocks
        assert record.token_budget == self.limits.max_num_batched_tokens
        assert record.timestamp == self.clock.now


def reference(*adds, **settings):
    """Return the tokens of requests that are alone in a scheduler with room for everything."""
    tokens = {}
    for name, fields in adds:
        sim = Simulator(blocks=500, **settings)
        sim.add(name, **fields)
        tokens |= sim.run(500)
    return tokens
