"""Groups of requests in a simulation: members run in the steps of their request, on its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RequestError,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
)
from hardpoint.testing.scripted import history_hash

from .rules import GROUPS
from .settings import SimulatorSettings
from .simulator_state import SimulatorState

_MAX_STEPS = 2000


@dataclass(frozen=True)
class GroupRequest:
    """A request with members; lengths in tokens.

    Attributes:
        prompt: length of its prompt.
        members: length of the prompt of each member.
        max_tokens: its output tokens.
        aborted_in: the step before which it is aborted; None if it is not.
        by_member: whether the id of its first member aborts it.
        texts: number of the text that each prompt begins, so that prompts may have a common
            prefix; of prompts without a number, it depends on their place.
    """

    prompt: int
    members: tuple[int, ...]
    max_tokens: int
    aborted_in: int | None = None
    by_member: bool = False
    texts: tuple[int, ...] = ()


@dataclass
class _Row:
    """A request in the worker.

    Attributes:
        tokens: known tokens.
        computed: how many of them have keys and values.
        tables: block table of each KV cache group.
    """

    tokens: list[int]
    computed: int
    tables: list[list[int]]


@dataclass
class _Group:
    """A request with its members.

    Attributes:
        sources: the request, then its members.
        expected: the tokens that it gets alone.
        tokens: the tokens that were delivered.
    """

    sources: list[EngineCoreRequest]
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_aborted: bool = False

    @property
    def names(self) -> list[str]:
        return [source.request_id for source in self.sources]


def group_scenarios() -> st.SearchStrategy[tuple[list[GroupRequest], dict[str, Any]]]:
    """Return requests with members, and fields of SimulatorSettings."""
    lengths = st.integers(1, 9)
    requests = st.builds(
        GroupRequest,
        prompt=lengths,
        members=st.lists(lengths, max_size=2).map(tuple),
        max_tokens=st.integers(1, 6),
        aborted_in=st.none() | st.integers(0, 6),
        by_member=st.booleans(),
        texts=st.lists(st.integers(0, 2), max_size=3).map(tuple),
    )
    settings = st.fixed_dictionaries(
        {
            "blocks": st.integers(8, 24),
            "block_size": st.sampled_from([2, 4]),
            "max_num_seqs": st.integers(3, 6),
            "max_num_batched_tokens": st.integers(6, 20),
            "long_prefill_token_threshold": st.sampled_from([0, 1, 3]),
            "prefix_caching": st.booleans(),
        }
    )
    modes = st.sampled_from([{}, {"asynchronous": True}, {"num_draft_tokens": 2}])
    both = st.builds(lambda fixed, mode: {**fixed, **mode}, settings, modes)
    return st.tuples(st.lists(requests, min_size=1, max_size=5), both) | _evictions()


def _evictions() -> st.SearchStrategy[tuple[list[GroupRequest], dict[str, Any]]]:
    """Return groups with a cached prefix of members, in a cache that evicts blocks for the group.

    The first two requests run one after the other; together, they fill the cache.
    """
    before = [GroupRequest(9, (), 1, texts=(0,)), GroupRequest(24, (), 1, texts=(1,))]
    group = st.builds(
        GroupRequest,
        prompt=st.integers(1, 5),
        members=st.sampled_from([(8, 9), (9, 8), (5, 9), (9, 9)]),
        max_tokens=st.integers(1, 3),
        texts=st.just((2, 0, 0)),
    )
    settings = st.fixed_dictionaries(
        {
            "blocks": st.just(8),
            "block_size": st.just(4),
            "max_num_seqs": st.just(3),
            "max_num_batched_tokens": st.integers(8, 32),
        }
    )
    return st.tuples(group.map(lambda last: [*before, last]), settings)


class GroupSimulator(SimulatorState):
    """Drives a scheduler with groups of requests, and checks each plan.

    Args:
        scheduler: the class under test.
        loses: number of the step whose plan is lost; None if none is.
        settings: fields of SimulatorSettings.
    """

    def __init__(
        self, scheduler: type[Scheduler], loses: int | None = None, **settings: Any
    ) -> None:
        super().__init__(scheduler, SimulatorSettings(**settings))
        self._loses = loses
        self._groups: dict[str, _Group] = {}
        self._aborts: dict[int, list[str]] = {}
        self._rows: dict[str, _Row] = {}
        self._memory: dict[tuple[int, int, int], int] = {}

    def add(self, request: GroupRequest) -> None:
        """Add a request with its members, unless the scheduler rejects it."""
        name, place = f"r{len(self._groups)}", len(self._groups)
        lengths = (request.prompt, *request.members)
        texts = (*request.texts, *range(place + len(request.texts), place + len(lengths)))
        prompts = [
            [(text + token) % 5 for token in range(length)]
            for text, length in zip(texts, lengths, strict=False)
        ]
        params = SamplingParams(max_tokens=request.max_tokens)
        members = [
            EngineCoreRequest(
                request_id=f"{name}/m/{index}",
                prompt_token_ids=prompt,
                params=SamplingParams(),
                leader=name,
            )
            for index, prompt in enumerate(prompts[1:])
        ]
        source = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompts[0],
            params=params,
            arrival_time=self.clock.now,
            members={"m": members} if members else {},
        )
        try:
            self.scheduler.add_request(source)
        except RequestError:
            return
        group = self._groups[name] = _Group([source, *members], [])
        longest = max(len(prompt) for prompt in prompts)
        for _ in range(min(request.max_tokens, self.limits.max_model_len - longest)):
            group.expected.append(self._next(group, group.expected))
        if request.aborted_in is not None:
            aborted = members[0].request_id if request.by_member and members else name
            self._aborts.setdefault(request.aborted_in, []).append(aborted)

    def run(self) -> None:
        """Take steps until all requests have finished.

        Raises:
            Violation: a plan, an output or the end of a request is wrong.
        """
        for step in range(_MAX_STEPS):
            self._abort(step)
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            self.clock.advance(1e-6)
            if step == self._loses:
                self._process_plan(self.scheduler.schedule(), executes=False)
                self.scheduler.plan_lost(self.plans[-1])
                continue
            self.stepped.start(self._execute)
            while len(self.in_flight) > self.settings.asynchronous:
                self._deliver()
            while self.in_flight and not self.scheduler.has_requests():
                self._deliver()
        self._check_end()

    def _check_end(self) -> None:
        for name, group in self._groups.items():
            failed = group.finish_reason is FinishReason.ERROR
            if not (group.is_aborted or failed) and group.tokens != group.expected:
                raise GROUPS.violation(
                    f"{name!r} with {len(group.sources) - 1} members got {group.tokens}, alone it "
                    f"would get {group.expected}"
                )
        free, usable = self.kv_cache.num_free_blocks, self.kv_cache.num_usable_blocks
        if self._rows or free != usable:
            raise GROUPS.violation(
                f"at the end workers have {sorted(self._rows)}, and {free} of {usable} blocks are "
                "free",
                "report the ends of members with that of their request, and free their blocks",
            )

    def _abort(self, step: int) -> None:
        for name in self._aborts.pop(step, ()):
            group = self._groups[name.partition("/")[0]]
            group.is_aborted = True
            self._record(self.scheduler.finish_requests([name], FinishReason.ABORT))

    def _deliver(self) -> None:
        self._record(self.stepped.deliver().outputs)
        if not self.settings.num_draft_tokens:
            return
        drafts = {}
        for name, group in self._groups.items():
            if group.tokens and group.finish_reason is None:
                following = self._next(group, group.tokens)
                later = self._next(group, [*group.tokens, following])
                is_right = history_hash(group.tokens) % 2
                drafts[name] = [following, later if is_right else later + 1]
        self.scheduler.update_drafts(drafts)

    def _record(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        for output in (output for message in outputs.values() for output in message.outputs):
            if (group := self._groups.get(output.request_id)) is None:
                raise GROUPS.violation(f"the member {output.request_id!r} has an output")
            group.tokens += output.new_token_ids
            group.finish_reason = output.finish_reason

    def _next(self, group: _Group, tokens: Sequence[int]) -> int:
        """Return the token after outputs, which depends on the history of each of the group."""
        histories = [[*source.prompt_token_ids, *tokens] for source in group.sources]
        return sum(map(history_hash, histories)) % self.settings.vocab_size

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._process_plan(plan)
        result = ModelRunnerOutput()
        for group in self._groups.values():
            self._sample(group, plan, result)
        return result

    def _process_plan(self, plan: SchedulerOutput, *, executes: bool = True) -> None:
        """Apply a plan to the rows of the worker, and write the keys and values."""
        self.plans.append(plan)
        for name in plan.finished_request_ids | plan.preempted_request_ids:
            self._rows.pop(name, None)
        for name, blocks in plan.cached_requests.new_block_ids.items():
            for table, new in zip(self._rows[name].tables, blocks, strict=True):
                table += new
        cached = plan.cached_requests
        for name, computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            self._rows[name].computed = computed
        for added in plan.new_requests:
            tokens = [*added.source.prompt_token_ids, *added.output_token_ids]
            tables = [list(table) for table in added.block_ids]
            self._rows[added.source.request_id] = _Row(tokens, added.num_computed_tokens, tables)
        if len(self._rows) > self.limits.max_num_seqs:
            raise GROUPS.violation(
                f"workers have {len(self._rows)} requests and members, max_num_seqs is "
                f"{self.limits.max_num_seqs}",
                "count the members of running requests",
            )
        total = sum(plan.num_scheduled_tokens.values())
        if total > self.limits.max_num_batched_tokens:
            raise GROUPS.violation(
                f"{total} tokens are scheduled, max_num_batched_tokens is "
                f"{self.limits.max_num_batched_tokens}"
            )
        for name, count in plan.num_scheduled_tokens.items() if executes else ():
            self._compute(name, count, plan.draft_token_ids.get(name, ()))

    def _compute(self, name: str, count: int, drafts: Sequence[int]) -> None:
        row = self._rows[name]
        tokens, size = [*row.tokens, *drafts], self.settings.block_size
        start, end = row.computed, row.computed + count
        if end > len(tokens):
            raise GROUPS.violation(f"{name!r} computes {end} tokens, and has {len(tokens)}")
        for position in range(end):
            block = row.tables[0][position // size]
            slot, history = (0, block, position % size), history_hash(tokens[: position + 1])
            if position >= start:
                self._memory[slot] = history
            elif self._memory.get(slot) != history:
                raise GROUPS.violation(
                    f"{name!r} reads position {position} from a block of another history"
                )
        row.computed = end

    def _sample(self, group: _Group, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        names, drafts = group.names, plan.draft_token_ids
        samples = {
            name: name in plan.num_scheduled_tokens
            and self._rows[name].computed >= len(self._rows[name].tokens)
            for name in names
        }
        if len({*samples.values()}) > 1:
            lacking = next(name for name, has_all in samples.items() if not has_all)
            raise GROUPS.violation(
                f"step {plan.step} has the last known token of some of {names}, and not of "
                f"{lacking!r}",
                "leave a token of each for the step that has room for the last tokens of all",
            )
        if not samples[names[0]]:
            return
        if any(list(drafts.get(name, ())) != list(drafts.get(names[0], ())) for name in names):
            raise GROUPS.violation(f"the requests {names} of a group have different drafts")
        before = len(self._rows[names[0]].tokens) - len(group.sources[0].prompt_token_ids)
        outputs = self._rows[names[0]].tokens[len(group.sources[0].prompt_token_ids) :]
        for draft in (*drafts.get(names[0], ()), None):
            outputs.append(self._next(group, outputs))
            if outputs[-1] != draft:
                break
        for name in names:
            result.sampled_token_ids[name] = outputs[before:]
            self._rows[name].tokens += outputs[before:]
            known = len(self._rows[name].tokens) - 1
            self._rows[name].computed = min(self._rows[name].computed, known)


def check_groups(
    scheduler: type[Scheduler],
    scenario: tuple[Sequence[GroupRequest], Mapping[str, Any]],
    **fields: Any,
) -> None:
    """Run requests with members.

    Args:
        scheduler: the class under test.
        scenario: requests, and fields of SimulatorSettings.
        fields: further fields.

    Raises:
        Violation: the scheduler does not keep groups.
    """
    requests, settings = scenario
    loses = requests[0].prompt if requests[0].max_tokens == 2 else None
    is_late = settings.get("asynchronous", False)
    simulator = GroupSimulator(scheduler, None if is_late else loses, **settings, **fields)
    for request in requests:
        simulator.add(request)
    simulator.run()
