"""A rig for schedulers: everything around one, without a model, on a clock that stands still.

It plays engine, executor and workers. What a request is to generate is a pure function of its
token history, so that whatever happens around it, its tokens are known; and every slot of the KV
cache is modelled, so that a token computed on keys and values of something else is noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.core.engine.encoder_cache import EncoderCacheManager
from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    PauseState,
    SamplingParams,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    StepRecord,
    typed,
)
from hardpoint.testing.scheduling.checks.names import (
    FINISHED,
    GRAMMAR,
    LIMITS,
    PLAN,
    PROGRESS,
    RECORD,
    TRANSFER,
)
from hardpoint.testing.scheduling.checks.plan import check_plan, check_record
from hardpoint.testing.scheduling.checks.state import (
    check_end,
    check_idle,
    check_paused_plan,
    check_standing,
    never_idle,
)
from hardpoint.testing.scheduling.fakes.connector import ScriptedConnector, ScriptedGrammars
from hardpoint.testing.scheduling.fakes.kv_cache import WatchedKVCache
from hardpoint.testing.scheduling.fakes.policy import watched
from hardpoint.testing.scheduling.fakes.requests import Life, Roll, Script, expected_reply
from hardpoint.testing.scheduling.fakes.worker import ScriptedWorker
from hardpoint.testing.scripted import ScriptedClock, history_hash

from .settings import PolicySource, RigSettings, make_policy

_STEP_SECONDS = 1e-6
_SCRIPT = {field.name for field in dataclasses.fields(Script)}


class SchedulerRig:
    """Drives a scheduler and checks it after every step.

    Every method that drives it raises BrokenRule, a Violation, when a rule is broken.

    Attributes:
        scheduler: the one under test.
        settings: how it was set up.
        limits: its limits.
        clock: moves by a microsecond per step, and when it is told to.
        kv_cache: under watch.
        connector, encoder_cache, grammars: None where the settings have none.
        worker: plays executor and workers.
        policy, ledger: the scheduling policy, under watch, and what it was told.
        policy_faults: what the scheduler said of the policy.
        paused: what `pause` was given last.
        roll: of all requests.
        plans: all of them, in order.
        records: one per plan.
        in_flight: plans that were carried out and whose results the scheduler does not have.
    """

    def __init__(
        self,
        scheduler: type[Scheduler],
        settings: RigSettings | None = None,
        **changes: Any,
    ) -> None:
        """Build the scheduler; `changes` are fields of RigSettings.

        Raises:
            HardpointError: the scheduler refuses to work like this.
        """
        self.settings = settings = dataclasses.replace(settings or RigSettings(), **changes)
        self.clock = ScriptedClock(now=100.0)
        self.kv_cache = WatchedKVCache(settings.manager())
        self.limits = settings.limits(self.kv_cache)
        self.connector = ScriptedConnector() if settings.connector else None
        self.grammars = ScriptedGrammars() if settings.grammars else None
        room = settings.encoder_cache_tokens
        self.encoder_cache = EncoderCacheManager(room) if room else None
        self.worker = ScriptedWorker(settings.windows, settings.block_size, self.next_token)
        self.policy, self.ledger = watched(make_policy(settings.policy))
        self.policy_faults: list[str] = []
        self.paused = PauseState.UNPAUSED
        self.roll = Roll(report_finished=settings.report_finished)
        self.plans: list[SchedulerOutput] = []
        self.records: list[StepRecord] = []
        self.in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self._proposed: dict[str, list[int]] = {}
        self._work = 0
        self.scheduler = self._build(scheduler)

    def _build(self, scheduler: type[Scheduler]) -> Scheduler:
        name = scheduler.__name__
        options = typed.convert(
            dict(self.settings.options), scheduler.Options, path=f"plugin.{name}"
        )
        return scheduler(
            SchedulerContext(
                name=name,
                options=options,
                limits=self.limits,
                kv_cache=self.kv_cache,
                policy=self.policy,
                clock=self.clock,
                watermark=self.settings.watermark,
                policy_fault=self.policy_faults.append,
                connector=self.connector,
                encoder_cache=self.encoder_cache,
                grammars=self.grammars,
                record=self.records.append,
                log_stats=self.settings.log_stats,
                report_finished=self.settings.report_finished,
            )
        )

    # What the model says

    def next_token(self, tokens: Sequence[int]) -> int:
        """Return the token that continues a history."""
        return history_hash(tokens) * 48_271 % (2**31 - 1) % self.settings.vocab_size

    def reply(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` tokens that continue a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    # Requests

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int | None = 4, **fields: Any
    ) -> Life:
        """Hand in a request.

        Args:
            request_id: of none that lives.
            prompt: token ids.
            max_tokens: most output tokens.
            **fields: of EngineCoreRequest, of SamplingParams, and of Script.

        Raises:
            RequestError: the scheduler refuses it.
        """
        of_params = {k: fields.pop(k) for k in list(fields) if k in _PARAMS}
        script = Script(**{k: fields.pop(k) for k in list(fields) if k in _SCRIPT})
        source = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, **of_params),
            arrival_time=fields.pop("arrival_time", self.clock.now),
            **fields,
        )
        return self.add_request(source, script)

    def add_request(self, source: EngineCoreRequest, script: Script | None = None) -> Life:
        """Hand in a request that is made already."""
        script = script or Script()
        request_id = source.request_id
        if self.grammars is not None:
            self.grammars.expect(request_id, script.compile)
        if self.connector is not None:
            self.connector.expect(request_id, script.transfer)
        self.scheduler.add_request(source)
        life = Life(
            source, script, expected_reply(source, self.next_token, self.limits.max_model_len)
        )
        if not self._has_room(life):
            life.may_outgrow = True
            life.excuses.add(FinishReason.ERROR)
        if script.compile is not None and script.compile.fails:
            life.excuses.add(FinishReason.ERROR)
        self.worker.faults.pop(request_id, None)
        if script.fails_after is not None:
            self.worker.faults[request_id] = script.fails_after
            if script.fails_after < len(life.expected[0]):
                life.excuses.add(FinishReason.ERROR)
        self.lives[request_id] = life
        self._proposed.pop(request_id, None)
        self._work += self._cost(life)
        return life

    def abort(self, *request_ids: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests from outside; without ids, all of them."""
        live = self.live
        ids = list(request_ids) if request_ids else None
        concerned = set(live) if ids is None else set(ids) & set(live)
        for request_id in concerned:
            live[request_id].excuses.add(reason)
        self._take(self.scheduler.finish_requests(ids, reason))
        for request_id in sorted(concerned):
            if not live[request_id].ended and not live[request_id].may_have_ended:
                raise FINISHED.broken(
                    f"finish_requests gave no last output of {request_id!r}, which was live"
                )
        check_standing(self)

    # Steps

    def step(self) -> SchedulerOutput:
        """Make a plan, carry it out, and hand in what results are due."""
        plan = self.start()
        while len(self.in_flight) > self.settings.asynchronous:
            self.deliver()
        return plan

    def start(self) -> SchedulerOutput:
        """Make a plan and carry it out, and keep the result for `deliver`."""
        plan = self._plan()
        result = self.worker.execute(plan)
        self.in_flight.append((plan, result))
        if len(self.worker.rows) > self.limits.max_num_seqs:
            raise LIMITS.broken(
                f"{len(self.worker.rows)} requests run, max_num_seqs is {self.limits.max_num_seqs}"
            )
        check_standing(self, plan)
        return plan

    def deliver(self) -> None:
        """Hand in the oldest result that the scheduler does not have."""
        plan, result = self.in_flight.pop(0)
        outputs = self.scheduler.update(plan, result)
        self.worker.memory.delivered = plan.step
        for request_id in result.faults:
            if (life := self.live.get(request_id)) is not None:
                life.excuses.add(FinishReason.ERROR)
        for request_id in result.kv_loaded & set(self.live):
            self.live[request_id].loaded = True
        self._take(outputs)
        check_standing(self)
        if self.settings.num_draft_tokens:
            self._propose(result)

    def lose(self, *, executed: bool = True) -> None:
        """Make a plan, and let it and everything in flight be lost.

        Args:
            executed: whether the workers carried it out nevertheless.
        """
        plan = self._plan()
        if executed:
            self.worker.execute(plan)
        lost = [*(plan for plan, _ in self.in_flight), plan]
        self.in_flight.clear()
        for plan in lost:
            self.worker.lose(plan)
            self.scheduler.plan_lost(plan)
            self.roll.lose_plan(plan)
        check_standing(self)

    def reset(self, *, recompute_running: bool = False) -> None:
        """Forget cached content; with `recompute_running`, what there is is worth nothing."""
        self.scheduler.reset_prefix_cache(recompute_running=recompute_running)
        if recompute_running:
            self.worker.memory.clear()
        check_standing(self)

    def swap(self, policy: PolicySource) -> None:
        """Put another policy in the place of the one there is, handing over its books."""
        new, ledger = watched(make_policy(policy))
        if new.state_format and new.state_format == self.policy.state_format:
            new.import_state(self.policy.export_state())
        self.scheduler.set_policy(new)
        self.policy, self.ledger = new, ledger
        check_standing(self)

    def pause(self, state: PauseState) -> None:
        """Let only some requests have tokens from the next plan on, or all of them again."""
        self.scheduler.set_pause(state)
        self.paused = state
        check_standing(self)

    def run(self, max_steps: int | None = None) -> dict[str, list[int]]:
        """Take steps until nothing is left to do, then check that nothing is left over.

        Returns:
            The tokens of each request.

        Raises:
            BrokenRule: it takes more than `max_steps` steps, by default `bound`; or a pause holds
                requests yet.
        """
        self.settle(max_steps)
        self.check()
        return self.outputs

    def settle(self, max_steps: int | None = None) -> None:
        """Take steps until nothing is left to do; whom a pause holds stays.

        Raises:
            BrokenRule: it takes more than `max_steps` steps, by default `bound`.
        """
        most = self.bound if max_steps is None else max_steps
        taken = 0
        while self.scheduler.has_requests() or self.worker.transfers.busy or self.in_flight:
            if not (self.scheduler.has_requests() or self.worker.transfers.busy):
                self.deliver()
                continue
            if taken >= most and self.paused is not PauseState.UNPAUSED:
                raise never_idle(self, taken)
            if taken >= most:
                raise PROGRESS.broken(
                    f"after {taken} steps {sorted(self.live)} have not ended, of which "
                    f"{sorted(self.worker.rows)} run"
                    if self.live
                    else f"nothing is live, but has_requests() is True after {taken} steps"
                )
            self.step()
            taken += 1
        check_idle(self)

    @property
    def bound(self) -> int:
        """Return the most steps until all requests end, once nothing new arrives.

        A request of p prompt tokens and o outputs that always gets a token when it runs needs
        p + o steps, and those that its connector and its grammar take. In the worst case it is
        thrown back by each of the others once: that is the sum over the requests, times their
        number plus one.
        """
        return (len(self.lives) + 1) * self._work + 8

    # What came of it

    @property
    def lives(self) -> dict[str, Life]:
        """Return the newest request of each id."""
        return self.roll.lives

    @property
    def live(self) -> dict[str, Life]:
        """Return the requests that did not end."""
        return self.roll.live

    def is_free(self, request_id: str) -> bool:
        """Whether an id was used and may be used again.

        It may not while a connector still works for it: results would be taken for the new one's.
        """
        life = self.lives.get(request_id)
        busy = self.connector is not None and self.connector.concerns(request_id)
        busy = busy or self.worker.transfers.concerns(request_id)
        moved = (result.kv_loaded | result.kv_saved for _, result in self.in_flight)
        busy = busy or any(request_id in names for names in moved)
        return life is not None and life.ended and not busy

    @property
    def outputs(self) -> dict[str, list[int]]:
        """Return the tokens of each request so far."""
        return {name: life.tokens for name, life in self.lives.items()}

    @property
    def finish_reasons(self) -> dict[str, FinishReason | None]:
        """Return why each request ended; None where it lives."""
        return {name: life.finish_reason for name, life in self.lives.items()}

    def check(self) -> None:
        """Check that nothing is left over, when every request has ended."""
        check_end(self)

    # Inside

    def _plan(self) -> SchedulerOutput:
        self.clock.advance(_STEP_SECONDS)
        self.ledger.begin_step()
        live = self.roll.expire(self.clock.now)
        plan = self.scheduler.schedule()
        if late := sorted((set(self.live) - set(live)) & set(plan.num_scheduled_tokens)):
            raise FINISHED.broken(f"{late} are scheduled, but their deadline has passed")
        if self.ledger.first is not None:
            raise self.ledger.first
        if self.plans and plan.step != self.plans[-1].step + 1:
            raise PLAN.broken(f"step {plan.step} follows step {self.plans[-1].step}")
        self.plans.append(plan)
        check_plan(plan, self.limits, live, self._proposed)
        check_paused_plan(self, plan)
        for request_id in (*plan.num_scheduled_tokens, *plan.preempted_request_ids):
            self._proposed.pop(request_id, None)
        self.roll.take_plan(plan)
        self._check_collaborators(plan)
        if len(self.records) < len(self.plans):
            raise RECORD.broken(f"step {plan.step} was not recorded, but somebody listens")
        check_record(self.records[-1], plan, self.limits.max_num_batched_tokens)
        for new in plan.new_requests:
            life = live[new.source.request_id]
            life.cached = new.num_computed_tokens if life.cached is None else life.cached
            life.ran = True
        return plan

    def _check_collaborators(self, plan: SchedulerOutput) -> None:
        places = {name: place for place, name in enumerate(plan.num_scheduled_tokens)}
        if self.grammars is not None:
            users = [name for name in places if self.grammars.constrains(name)]
            wanted = {name: places[name] for name in users}
            if dict(plan.structured_request_ids) != wanted:
                raise GRAMMAR.broken(
                    f"structured_request_ids is {dict(plan.structured_request_ids)}, expected "
                    f"{wanted}"
                )
            if early := [name for name in users if not self.grammars.is_ready(name)]:
                raise GRAMMAR.broken(f"{early} run, but their grammars are not ready")
        if self.connector is not None:
            if plan.kv_connector_metadata is not self.connector.last:
                raise TRANSFER.broken("the plan does not carry what build_connector_meta returned")
            self.connector.check_admitted(n.source.request_id for n in plan.new_requests)

    def _take(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        if self.ledger.first is not None:
            raise self.ledger.first
        self.roll.take(outputs)
        for name in [name for name in self._proposed if name not in self.live]:
            del self._proposed[name]

    def _propose(self, result: ModelRunnerOutput) -> None:
        """Hand in drafts for those who got tokens."""
        drafts: dict[str, list[int]] = {}
        for request_id in result.sampled_token_ids:
            life = self.live.get(request_id)
            if life is not None and life.tokens and life.script.drafts:
                drafts[request_id] = self._drafts(life)
        self.scheduler.update_drafts({**drafts, "nobody": [1]})
        self._proposed |= drafts

    def _drafts(self, life: Life) -> list[int]:
        known = [*life.source.prompt_token_ids, *life.tokens]
        guesses = self.reply(known, self.settings.num_draft_tokens)
        for place in range(len(guesses)):
            mixed = life.script.drafts == "mixed" and (history_hash(known) >> place) % 2
            if life.script.drafts == "wrong" or mixed:
                guesses[place] += 1
        return guesses

    def _has_room(self, life: Life) -> bool:
        """Whether the whole cache has room for all that a request may become."""
        most = len(life.source.prompt_token_ids) + len(life.expected[0])
        most += self.limits.num_lookahead_tokens + self.limits.num_draft_tokens
        return self.kv_cache.blocks_needed(most) <= self.kv_cache.num_usable_blocks

    def _cost(self, life: Life) -> int:
        script, tokens = life.script, len(life.source.prompt_token_ids) + len(life.expected[0])
        transfer = script.transfer
        waits = transfer.asks + (transfer.steps or 0) + transfer.keeps
        return tokens + waits + (script.compile.asks if script.compile else 0) + 4


_PARAMS = set(SamplingParams.__struct_fields__)
