"""Plans the steps of a journal again, with another scheduling policy and without workers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from hardpoint.plugins import (
    EngineConfig,
    Executor,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)

from .frames import JournalError
from .playing import NOT_CONSIDERED, Player
from .records import Event
from .run import Journal, ReplayReport, Run, open_played, replay_config


class NoWorkers(Executor):
    """An executor without workers, with the results of a journal."""

    contract = 2

    @property
    def max_concurrent_batches(self) -> int:
        """As many as the engine asks for."""
        return self.context.num_batches

    def start(self) -> list[WorkerInfo]:
        """Return infos of workers with room for any cache."""
        info = WorkerInfo(bytes_per_block=1, available_bytes=1 << 50)
        return [info] * self.context.parallel.world_size

    def initialize_cache(self, num_blocks: int) -> None:
        """Do nothing: no blocks have content."""

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Return nothing for a plan with tokens, so that the sampling gives its result."""
        future: Future[ModelRunnerOutput | None] = Future()
        future.set_result(None if plan.total_num_scheduled_tokens else ModelRunnerOutput())
        return future

    def sample_tokens(
        self,
        plan: SchedulerOutput,  # noqa: ARG002
        bitmask: GrammarBitmask | None = None,  # noqa: ARG002
    ) -> Future[ModelRunnerOutput]:
        """Return a result without tokens, which get their place from the journal."""
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(ModelRunnerOutput())
        return future

    def collective_rpc(
        self,
        method: str,  # noqa: ARG002
        args: Sequence[Any] = (),  # noqa: ARG002
        timeout: float | None = None,  # noqa: ARG002
    ) -> list[Any]:
        """Return no answers."""
        return []

    def close(self) -> None:
        """Do nothing."""


def replan(
    journal: Journal, policy: str, *, until: int | None = None, anyway: bool = False
) -> ReplayReport:
    """Return the first step that another policy plans otherwise, and why either one does so.

    Everything else is as it was recorded: arrivals, the clock, results up to that step.

    Args:
        journal: the journal.
        policy: name or FQCN of the policy.
        until: the last step; None is all.
        anyway: whether to go on where control calls cannot be made.

    Raises:
        JournalError: the journal is damaged, begins in the middle, is of another Hardpoint, or its
            engine had windows or a KV connector.
        HardpointError: the policy cannot be built.
    """
    _check(journal)
    report, number = _planned(journal, policy, until)
    if report.difference is None or number is None:
        return report
    difference = report.difference
    before, _ = _planned(journal, None, difference.step, request_id=difference.request_id)
    if before.difference is not None and not anyway:
        raise JournalError(
            f"journal {str(journal.path)!r}: its own policy plans otherwise here, too:\n"
            f"{before.difference}"
        )
    why = f"{policy}: {difference.why or NOT_CONSIDERED}; as recorded: {before.notes[-1]}"
    report.difference = msgspec.structs.replace(difference, why=why)
    return report


def _check(journal: Journal) -> None:
    connector = replay_config(journal.header).kv_connector
    reasons = {
        "it begins at a keyframe": not isinstance(next(journal.records(), None), Event),
        "its engine moved blocks (kv_connector)": connector.use or connector.stores,
        "its model has windows": journal.header.windows,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise JournalError(
                f"journal {str(journal.path)!r}: its steps cannot be planned without workers: "
                f"{reason}"
            )


def _planned(
    journal: Journal, policy: str | None, until: int | None, request_id: str | None = None
) -> tuple[ReplayReport, int | None]:
    """Plan the steps with a policy; return the report, and the number of the last event.

    Without a policy, it is the one that was recorded, changes included; the last note is then why
    the request `request_id` ran in the last step, or did not.
    """
    player = Player(journal.header.clock)
    player.has_workers = False
    core, close = open_played(journal, player, lambda _inputs: None, _config(journal, policy))
    report = ReplayReport()
    number = None
    try:
        run = Run(core, player, report)
        for number, record in enumerate(journal.records()):
            is_change = isinstance(record, Event) and record.method == "live_change"
            if is_change and policy is not None:
                report.notes.append(f"the live change in event {number} is left out")
                continue
            if not run.play(number, record, until):
                break
    finally:
        close()
    if policy is None:
        report.notes.append(player.why(request_id))
    return report, number


def _config(journal: Journal, policy: str | None) -> EngineConfig:
    replace = msgspec.structs.replace
    config = replay_config(journal.header)
    return replace(
        config,
        scheduler=replace(config.scheduler, policy=policy or config.scheduler.policy),
        executor=replace(config.executor, use=f"{__name__}:{NoWorkers.__qualname__}"),
    )
