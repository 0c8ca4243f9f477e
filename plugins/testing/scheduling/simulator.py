"""A simulator for schedulers: it plays engine, executor and workers, on a scripted clock.

A request's tokens are a pure function of its token history, so the expected tokens are always
known. Every slot of the KV cache is modeled, so a token that is computed on the keys and values
of another history is noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    PauseState,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
)
from hardpoint.simulation.stepping import Execute
from hardpoint.testing.scheduling.checks.plan import check_plan, check_record, check_releases
from hardpoint.testing.scheduling.checks.state import (
    check_all_finished,
    check_idle,
    check_invariants,
    check_paused_plan,
    pause_never_idle,
)
from hardpoint.testing.scheduling.fakes.policy import monitor_policy
from hardpoint.testing.scheduling.fakes.requests import ExpectedRequest, Script, expected_reply
from hardpoint.testing.scripted import history_hash

from .rules import (
    FINISH,
    GRAMMAR,
    LIMITS,
    PLAN,
    PROGRESS,
    STEP_RECORD,
)
from .settings import PolicySource, SimulatorSettings, make_policy
from .simulator_state import SimulatorState

_STEP_SECONDS = 1e-6
_SCRIPT = {field.name for field in dataclasses.fields(Script)}
_PARAMS = {*SamplingParams.__struct_fields__} - {"plugin_args"}  # those are the request's


def _execute_nothing(plan: SchedulerOutput) -> ModelRunnerOutput:  # noqa: ARG001
    return ModelRunnerOutput()


class SchedulerSimulator(SimulatorState):
    """Drives a scheduler, and checks every rule after each call.

    Every method that drives the scheduler raises Violation when a rule is broken. The attributes
    are the attributes of SimulatorState.
    """

    def __init__(
        self,
        scheduler: type[Scheduler],
        settings: SimulatorSettings | None = None,
        **changes: Any,
    ) -> None:
        """Build the scheduler; `changes` are fields of SimulatorSettings.

        Raises:
            HardpointError: the scheduler rejects these settings.
        """
        super().__init__(scheduler, settings, **changes)
        self._proposed: dict[str, list[int]] = {}
        self._total_cost = 0

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int | None = 4, **fields: Any
    ) -> ExpectedRequest:
        """Add a request.

        Args:
            request_id: not in use by an unfinished request.
            prompt: token ids.
            max_tokens: maximum number of output tokens.
            **fields: of EngineCoreRequest, of SamplingParams, and of Script.

        Raises:
            RequestError: the scheduler rejects it.
        """
        params = {k: fields.pop(k) for k in list(fields) if k in _PARAMS}
        script = Script(**{k: fields.pop(k) for k in list(fields) if k in _SCRIPT})
        source = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            arrival_time=fields.pop("arrival_time", self.clock.now),
            **fields,
        )
        return self.add_request(source, script)

    def add_request(
        self, source: EngineCoreRequest, script: Script | None = None
    ) -> ExpectedRequest:
        """Add a complete request."""
        script = script or Script()
        request_id = source.request_id
        if self.grammars is not None:
            self.grammars.expect(request_id, script.compile)
        if self.connector is not None:
            self.connector.expect(request_id, script.transfer)
        self.scheduler.add_request(source)
        reply = expected_reply(source, self.next_token, self.limits.max_model_len)
        begun = () if source.resumed is None else source.resumed.output_token_ids
        request = ExpectedRequest(source, script, reply, list(begun))
        if not self._fits_cache(request):
            request.may_exceed_cache = True
            request.allowed_reasons.add(FinishReason.ERROR)
        if script.compile is not None and script.compile.fails:
            request.allowed_reasons.add(FinishReason.ERROR)
        self.worker.faults.pop(request_id, None)
        if script.fails_after is not None:
            self.worker.faults[request_id] = script.fails_after
            if script.fails_after < len(request.reply.tokens):
                request.allowed_reasons.add(FinishReason.ERROR)
        self.requests[request_id] = request
        self._proposed.pop(request_id, None)
        self._total_cost += self._cost(request)
        return request

    def abort(self, *request_ids: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Finish requests through `finish_requests`; all of them if no ids are given."""
        unfinished = self.unfinished
        ids = list(request_ids) if request_ids else None
        aborted = set(unfinished) if ids is None else set(ids) & set(unfinished)
        for request_id in aborted:
            unfinished[request_id].allowed_reasons.add(reason)
        self._process_outputs(self.scheduler.finish_requests(ids, reason))
        for request_id in sorted(aborted):
            if not unfinished[request_id].finished and not unfinished[request_id].may_have_finished:
                raise FINISH.violation(
                    f"finish_requests returned no last output of the unfinished {request_id!r}"
                )
        check_invariants(self)

    def step(self) -> SchedulerOutput:
        """Start a step, and deliver the results that are due."""
        plan = self.start()
        while len(self.in_flight) > self.settings.asynchronous:
            self.deliver()
        return plan

    def start(self) -> SchedulerOutput:
        """Schedule and execute a plan, and keep its result for `deliver`.

        Where a request may get drafts, results that are due are delivered before.
        """
        may_draft = any(request.script.drafts for request in self.unfinished.values())
        while self.in_flight and self.settings.num_draft_tokens and may_draft:
            self.deliver()
        plan = self._start(self._execute)
        if len(self.worker.rows) > self.limits.max_num_seqs:
            raise LIMITS.violation(
                f"{len(self.worker.rows)} requests are running, max_num_seqs is "
                f"{self.limits.max_num_seqs}"
            )
        check_invariants(self, plan)
        return plan

    def deliver(self) -> None:
        """Pass the oldest undelivered result to the scheduler."""
        plan, result, outputs = self.stepped.deliver()
        self.worker.memory.last_delivered_step = plan.step
        for request_id in result.faults:
            if (request := self.unfinished.get(request_id)) is not None:
                request.allowed_reasons.add(FinishReason.ERROR)
        for request_id in result.kv_loaded & set(self.unfinished):
            self.unfinished[request_id].loaded = True
        self._process_outputs(outputs)
        check_invariants(self)
        if self.settings.num_draft_tokens:
            self._propose_drafts(result)

    def lose(self, *, executed: bool = True) -> None:
        """Schedule a plan, and lose it and all plans in flight.

        Args:
            executed: whether the workers execute the plan all the same.
        """
        self._start(self._execute if executed else _execute_nothing)
        for plan in self.stepped.lose():
            self.worker.record_lost_plan(plan)
            self.ledger.record_lost_plan(plan)
        check_invariants(self)

    def reset(self, *, recompute_running: bool = False) -> None:
        """Reset the prefix cache; `recompute_running` also invalidates all KV content."""
        self.scheduler.reset_prefix_cache(recompute_running=recompute_running)
        if recompute_running:
            self.worker.memory.clear()
        check_invariants(self)

    def swap(self, policy: PolicySource) -> None:
        """Replace the scheduling policy, passing on the old one's state."""
        new, policy_monitor = monitor_policy(make_policy(policy))
        if new.state_format and new.state_format == self.policy.state_format:
            new.import_state(self.policy.export_state())
        self.scheduler.set_policy(new)
        self.policy, self.policy_monitor = new, policy_monitor
        check_invariants(self)

    def pause(self, state: PauseState) -> None:
        """Set the pause state, which applies from the next plan on."""
        self.scheduler.set_pause(state)
        self.paused = state
        check_invariants(self)

    def run(self, max_steps: int | None = None) -> dict[str, list[int]]:
        """Take steps until the scheduler is idle, then check that all requests have finished.

        Returns:
            The tokens of each request.

        Raises:
            Violation: it takes more than `max_steps` steps, by default `step_bound`, or a pause
                still holds requests.
        """
        self.run_until_idle(max_steps)
        self.check()
        return self.outputs

    def run_until_idle(self, max_steps: int | None = None) -> None:
        """Take steps until the scheduler is idle; requests held by a pause stay unfinished.

        Raises:
            Violation: it takes more than `max_steps` steps, by default `step_bound`.
        """
        limit = self.step_bound if max_steps is None else max_steps
        taken = 0
        while self.scheduler.has_requests() or self.worker.transfers.has_jobs or self.in_flight:
            if not (self.scheduler.has_requests() or self.worker.transfers.has_jobs):
                self.deliver()
                continue
            if taken >= limit and self.paused is not PauseState.UNPAUSED:
                raise pause_never_idle(self, taken)
            if taken >= limit:
                raise PROGRESS.violation(
                    f"after {taken} steps {sorted(self.unfinished)} have not finished, among them "
                    f"{sorted(self.worker.rows)} are running"
                    if self.unfinished
                    else f"no request is unfinished, but has_requests() is True after {taken} steps"
                )
            self.step()
            taken += 1
        check_idle(self)

    @property
    def step_bound(self) -> int:
        """Return the maximum number of steps until all requests finish, if no new one arrives.

        A request of p prompt tokens and o output tokens needs at most p + o steps, and the steps of
        its connector and its grammar. In the worst case it is preempted once by each other
        one: the bound is the sum over the requests, times their number plus one.
        """
        return (len(self.requests) + 1) * self._total_cost + 8

    def check(self) -> None:
        """Check that every request has finished and all blocks are free."""
        check_all_finished(self)

    def _start(self, execute: Execute) -> SchedulerOutput:
        """Start a step; `execute` gets its plan once it was checked."""
        self.clock.advance(_STEP_SECONDS)
        self.policy_monitor.begin_step()
        unfinished = self.ledger.expire(self.clock.now)

        def checked(plan: SchedulerOutput) -> ModelRunnerOutput:
            self._check(plan, unfinished)
            return execute(plan)

        return self.stepped.start(checked)

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute(self._sent(plan))

    def _check(self, plan: SchedulerOutput, unfinished: Mapping[str, ExpectedRequest]) -> None:
        """Check a plan, and note it.

        Args:
            unfinished: the requests that had not finished when it was made.
        """
        late = set(self.unfinished) - set(unfinished)
        if late := late & set(plan.num_scheduled_tokens):
            raise FINISH.violation(f"{sorted(late)} are scheduled past their deadline")
        if self.policy_monitor.first_violation is not None:
            raise self.policy_monitor.first_violation
        if self.plans and plan.step != self.plans[-1].step + 1:
            raise PLAN.violation(f"step {plan.step} follows step {self.plans[-1].step}")
        self.plans.append(plan)
        check_plan(plan, self.limits, unfinished, self._proposed)
        check_releases(plan, self.kv_cache.holders)
        check_paused_plan(self, plan)
        for request_id in (*plan.num_scheduled_tokens, *plan.preempted_request_ids):
            self._proposed.pop(request_id, None)
        self.ledger.record_plan(plan)
        self._check_collaborators(plan)
        if len(self.records) < len(self.plans):
            raise STEP_RECORD.violation(f"step {plan.step} was not recorded")
        check_record(self.records[-1], plan, self.limits.max_num_batched_tokens)
        for new in plan.new_requests:
            request = unfinished[new.source.request_id]
            request.cached = new.num_computed_tokens if request.cached is None else request.cached
            request.was_scheduled = True

    def _check_collaborators(self, plan: SchedulerOutput) -> None:
        indices = {name: index for index, name in enumerate(plan.num_scheduled_tokens)}
        if self.grammars is not None:
            users = [name for name in indices if self.grammars.constrains(name)]
            expected = {name: indices[name] for name in users}
            if plan.structured_request_ids and dict(plan.structured_request_ids) != expected:
                raise GRAMMAR.violation(
                    f"structured_request_ids is {dict(plan.structured_request_ids)}, expected "
                    f"{expected}"
                )
            if early := [name for name in users if not self.grammars.is_ready(name)]:
                raise GRAMMAR.violation(f"{early} are running, but their grammars are not ready")
        if self.connector is not None:
            self.connector.take_jobs(plan)
            self.connector.check_admitted(n.source.request_id for n in plan.new_requests)

    def _sent(self, plan: SchedulerOutput) -> SchedulerOutput:
        if self.connector is None:
            return plan
        return msgspec.structs.replace(plan, kv_connector_metadata=self.connector.jobs_of(plan))

    def _process_outputs(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        if self.policy_monitor.first_violation is not None:
            raise self.policy_monitor.first_violation
        self.ledger.record_outputs(outputs)
        for name in [name for name in self._proposed if name not in self.unfinished]:
            del self._proposed[name]

    def _propose_drafts(self, result: ModelRunnerOutput) -> None:
        drafts: dict[str, list[int]] = {}
        for request_id in result.sampled_token_ids:
            request = self.unfinished.get(request_id)
            if request is not None and request.tokens and request.script.drafts:
                drafts[request_id] = self._drafts(request)
        self.scheduler.update_drafts({**drafts, "unknown": [1]})
        self._proposed |= drafts

    def _drafts(self, request: ExpectedRequest) -> list[int]:
        history = [*request.source.prompt_token_ids, *request.tokens]
        guesses = self.reply(history, self.settings.num_draft_tokens)
        for index in range(len(guesses)):
            mixed = request.script.drafts == "mixed" and (history_hash(history) >> index) % 2
            if request.script.drafts == "wrong" or mixed:
                guesses[index] += 1
        return guesses

    def _fits_cache(self, request: ExpectedRequest) -> bool:
        length = len(request.source.prompt_token_ids) + len(request.reply.tokens)
        length += self.limits.num_lookahead_tokens + self.limits.num_draft_tokens
        return self.kv_cache.blocks_needed(length) <= self.kv_cache.num_usable_blocks

    def _cost(self, request: ExpectedRequest) -> int:
        """Return the maximum number of steps that a request takes alone."""
        script, transfer = request.script, request.script.transfer
        tokens = len(request.source.prompt_token_ids) + len(request.reply.tokens)
        waits = transfer.pending_lookups + (transfer.load_steps or 0) + transfer.save_steps
        return tokens + waits + (script.compile.pending_polls if script.compile else 0) + 4
