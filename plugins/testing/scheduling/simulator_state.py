"""The state of a scheduler simulation: the scheduler, its collaborators and its requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hardpoint import typed
from hardpoint.plugins import (
    FinishReason,
    ModelRunnerOutput,
    PauseState,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    StepRecord,
)
from hardpoint.simulation import SteppedScheduler
from hardpoint.testing.engine_access import complete_context, create_encoder_cache
from hardpoint.testing.scheduling.fakes.connector import ScriptedConnector, ScriptedGrammars
from hardpoint.testing.scheduling.fakes.kv_cache import MonitoredKVCacheManager
from hardpoint.testing.scheduling.fakes.policy import monitor_policy
from hardpoint.testing.scheduling.fakes.requests import ExpectedRequest, RequestLedger
from hardpoint.testing.scheduling.fakes.worker import SimulatedWorker
from hardpoint.testing.scripted import ScriptedClock, history_hash

from .settings import SimulatorSettings, make_policy


class SimulatorState:
    """A scheduler with scripted collaborators, and everything observed of it.

    Attributes:
        settings: settings of the simulation.
        limits: the scheduler's limits.
        clock: advances by a microsecond per step, and when a test advances it.
        kv_cache: the KV cache manager, monitored.
        connector, encoder_cache, grammars: None where the settings have none.
        worker: plays executor and workers.
        policy, policy_monitor: the scheduling policy, and the monitor of its calls.
        policy_faults: the policy faults that the scheduler reported.
        paused: the current pause state.
        ledger: all requests.
        plans: all plans, in order.
        records: one step record per plan.
        stepped: the scheduler, and its plans under way.
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
        self.settings = settings = dataclasses.replace(settings or SimulatorSettings(), **changes)
        self.clock = ScriptedClock(now=100.0)
        self.kv_cache = MonitoredKVCacheManager(settings.manager(self.clock))
        self.limits = settings.limits(self.kv_cache)
        self.connector = ScriptedConnector() if settings.connector else None
        self.grammars = ScriptedGrammars() if settings.grammars else None
        size = settings.encoder_cache_tokens
        self.encoder_cache = create_encoder_cache(size) if size else None
        self.worker = SimulatedWorker(settings.windows, settings.block_size, self.next_token)
        self.policy, self.policy_monitor = monitor_policy(make_policy(settings.policy))
        self.policy_faults: list[str] = []
        self.paused = PauseState.UNPAUSED
        self.ledger = RequestLedger(report_finished=settings.report_finished)
        self.plans: list[SchedulerOutput] = []
        self.records: list[StepRecord] = []
        self.stepped = SteppedScheduler(self._build(scheduler))

    def _build(self, scheduler: type[Scheduler]) -> Scheduler:
        name = scheduler.__name__
        values, path = dict(self.settings.options), f"plugin.{name}"
        options = typed.convert(values, scheduler.Options, path=path, str_keys=True)
        context = SchedulerContext(
            name=name,
            options=options,
            limits=self.limits,
            kv_cache=self.kv_cache,
            policy=self.policy,
            clock=self.clock,
            watermark=self.settings.watermark,
            step_cost=lambda: self.settings.step_cost,
            policy_fault=self.policy_faults.append,
            transfers=self.connector,
            encoder_cache=self.encoder_cache,
            gates=self.grammars,
            record=self.records.append,
            log_stats=self.settings.log_stats,
            report_finished=self.settings.report_finished,
        )
        return scheduler(complete_context(context, "schedulers", scheduler))

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler under test."""
        return self.stepped.scheduler

    @property
    def in_flight(self) -> Sequence[tuple[SchedulerOutput, ModelRunnerOutput]]:
        """Return the executed plans with results that the scheduler has not received."""
        return self.stepped.in_flight

    def next_token(self, tokens: Sequence[int]) -> int:
        """Return the token that continues a history."""
        return history_hash(tokens) * 48_271 % (2**31 - 1) % self.settings.vocab_size

    def reply(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` tokens that continue a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    @property
    def requests(self) -> dict[str, ExpectedRequest]:
        """Return the newest request of each id."""
        return self.ledger.requests

    @property
    def unfinished(self) -> dict[str, ExpectedRequest]:
        """Return the unfinished requests by id."""
        return self.ledger.unfinished

    @property
    def outputs(self) -> dict[str, list[int]]:
        """Return the tokens that each request got so far."""
        return {name: request.tokens for name, request in self.requests.items()}

    @property
    def finish_reasons(self) -> dict[str, FinishReason | None]:
        """Return the finish reason of each request; None for unfinished ones."""
        return {name: request.finish_reason for name, request in self.requests.items()}

    def can_reuse_id(self, request_id: str) -> bool:
        """Return whether an id belongs to a finished request and may be used again.

        It may not while a connector still works for it: the results would count for the new one.
        """
        request = self.requests.get(request_id)
        in_use = self.connector is not None and self.connector.has_jobs_for(request_id)
        in_use = in_use or self.worker.transfers.has_jobs_for(request_id)
        transferred = (result.kv_loaded | result.kv_saved for _, result in self.in_flight)
        in_use = in_use or any(request_id in names for names in transferred)
        return request is not None and request.finished and not in_use
