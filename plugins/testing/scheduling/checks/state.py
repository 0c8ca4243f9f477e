"""Checks of a simulation's state between steps: pauses, counts, blocks, reasons and stats."""

from __future__ import annotations

from hardpoint.plugins import (
    BlockIds,
    PauseState,
    Request,
    RequestError,
    Scheduler,
    SchedulerOutput,
    WaitingFor,
    WaitReason,
)
from hardpoint.testing.scheduling.fakes.requests import ExpectedRequest
from hardpoint.testing.scheduling.fakes.worker import RELEASED, WorkerRow
from hardpoint.testing.scheduling.rules import (
    BLOCKS,
    COUNTS,
    FINISH,
    PAUSE,
    POLICY_CALLS,
    RELEASES,
    STEP_RECORD,
    WAIT_REASON,
)
from hardpoint.testing.scheduling.simulator_state import SimulatorState
from hardpoint.testing.suite import Violation


def check_paused_plan(state: SimulatorState, plan: SchedulerOutput) -> None:
    """Check that a plan has no tokens for requests that the pause holds."""
    if early := sorted(_held_requests(state) & set(plan.num_scheduled_tokens)):
        raise PAUSE.violation(
            f"{early} are scheduled in step {plan.step} under {state.paused.name}"
            + (", and never ran before" if state.paused is PauseState.PAUSED_NEW else "")
        )


def check_pause(state: SimulatorState) -> None:
    """Check that has_requests() is True while there is work that the pause does not hold."""
    if state.paused is PauseState.UNPAUSED:
        return
    if not state.scheduler.has_requests() and (work := _pending_work(state)) is not None:
        raise PAUSE.violation(
            f"has_requests() is False under {state.paused.name}, but {work}",
            "let has_requests count only requests that a pause does not hold: requests that ran "
            "under PAUSED_NEW, passed deadlines, ends to report, transfers of a connector",
        )


def check_idle(state: SimulatorState) -> None:
    """Check that every request held by a pause has a wait reason, and no other work is left."""
    check_pause(state)
    if type(state.scheduler).why_waiting is Scheduler.why_waiting:
        return
    for name in sorted(_held_requests(state)):
        if state.unfinished[name].may_have_finished:
            continue
        reason = state.scheduler.why_waiting(name)
        if reason is None or not reason.message:
            raise WAIT_REASON.violation(
                f"{state.paused.name} holds {name!r}, but it has no reason: {reason!r}"
            )


def pause_never_idle(state: SimulatorState, steps: int) -> Violation:
    """Return the violation of a scheduler that is not idle after `steps` steps of a pause."""
    running = sorted(set(state.unfinished) - _held_requests(state))
    return PAUSE.violation(
        f"after {steps} steps under {state.paused.name} has_requests() is True, "
        + (f"and {running} have not finished" if running else "though no request may get tokens"),
        "requests held by a pause are no work, and the others must finish without them",
    )


def _held_requests(state: SimulatorState) -> set[str]:
    if state.paused is PauseState.UNPAUSED:
        return set()
    hold_all = state.paused is PauseState.PAUSED_ALL
    return {
        name
        for name, request in state.unfinished.items()
        if hold_all or not (request.was_scheduled or request.loaded)
    }


def _pending_work(state: SimulatorState) -> str | None:
    now, unfinished = state.clock.now, state.unfinished
    if state.ledger.unreported_finished:
        return f"the ends of {sorted(state.ledger.unreported_finished)} are not reported"
    late = [name for name, request in unfinished.items() if request.is_past_deadline(now)]
    if late:
        return f"the deadline of {sorted(late)} has passed"
    holders = state.kv_cache.holders
    begun = sorted(
        name
        for name, request in unfinished.items()
        if request.was_scheduled or (request.loaded and name in holders)
    )
    if begun and state.paused is PauseState.PAUSED_NEW:
        return f"{begun} have begun and are unfinished"
    transferring = state.connector is not None and state.connector.has_jobs
    transferring = transferring or state.worker.transfers.has_jobs
    if transferring or any(result.kv_loaded or result.kv_saved for _, result in state.in_flight):
        return "the KV connector has not completed its loads and saves"
    return None


def check_invariants(state: SimulatorState, plan: SchedulerOutput | None = None) -> None:
    """Check the state of a simulation after a call.

    Args:
        state: state of the simulation.
        plan: the plan just executed; None after any other call.
    """
    state.kv_cache.check_blocks()
    _check_counts(state)
    check_pause(state)
    if state.settings.uses_policy:
        _check_policy_requests(state)
    if plan is None:
        return
    if state.settings.uses_policy:
        _check_policy_tokens(state, plan)
    _check_tables(state)
    _check_reasons(state, plan)
    _check_stats(state)
    record = state.records[-1]
    free = state.kv_cache.num_free_blocks
    if record.num_free_blocks != free:
        raise STEP_RECORD.violation(
            f"the record of step {plan.step} has num_free_blocks "
            f"{record.num_free_blocks}, expected {free}"
        )


def check_all_finished(state: SimulatorState) -> None:
    """Check that every request has finished, its end was reported and its blocks are free."""
    if state.unfinished:
        raise FINISH.violation(
            f"{sorted(state.unfinished)} have not finished, but has_requests() is False"
        )
    if state.ledger.unreported_finished:
        raise FINISH.violation(
            f"no plan reported the ends of {sorted(state.ledger.unreported_finished)}"
        )
    state.worker.check_empty()
    state.kv_cache.check_all_free()
    if state.scheduler.num_unfinished_requests():
        raise COUNTS.violation(
            "no request is unfinished, but num_unfinished_requests is "
            f"{state.scheduler.num_unfinished_requests()}"
        )
    for request in state.requests.values():
        if state.settings.report_finished and not request.client_notified:
            raise FINISH.violation(
                f"finished_requests of client {request.source.client_index} never had "
                f"{request.request_id!r}"
            )
        request.check_events(state.settings.log_stats)


def _uncertain(state: SimulatorState) -> set[str]:
    return {name for name, request in state.unfinished.items() if request.may_have_finished}


def _check_counts(state: SimulatorState) -> None:
    unfinished, uncertain = state.unfinished, _uncertain(state)
    count = state.scheduler.num_unfinished_requests()
    if not len(unfinished) - len(uncertain) <= count <= len(unfinished):
        raise COUNTS.violation(
            f"num_unfinished_requests is {count}, but {len(unfinished)} requests are unfinished: "
            f"{sorted(unfinished)}"
        )
    unreported = state.ledger.unreported_finished
    unpaused = state.paused is PauseState.UNPAUSED
    if unpaused and (unfinished or unreported) and not state.scheduler.has_requests():
        raise COUNTS.violation(
            "has_requests() is False, but "
            + (
                f"{sorted(unfinished)} are unfinished"
                if unfinished
                else f"the ends of {sorted(unreported)} are not reported"
            )
        )
    stats = state.scheduler.stats()
    if stats.num_running + stats.num_waiting != count:
        raise COUNTS.violation(
            f"stats has {stats.num_running} running and {stats.num_waiting} waiting, "
            f"num_unfinished_requests is {count}"
        )


def _check_policy_requests(state: SimulatorState) -> None:
    unfinished, known = set(state.unfinished), set(state.policy_monitor.unfinished)
    if not unfinished - _uncertain(state) <= known <= unfinished:
        raise POLICY_CALLS.violation(
            f"by added() and finished() {sorted(known)} are unfinished, but "
            f"{sorted(unfinished)} are"
        )


def _check_policy_tokens(state: SimulatorState, plan: SchedulerOutput) -> None:
    unplanned = (
        {*state.policy_monitor.tokens} - set(plan.num_scheduled_tokens) - plan.preempted_request_ids
    )
    if unplanned:
        raise POLICY_CALLS.violation(
            f"scheduled() was called for {sorted(unplanned)}, which the plan does not have"
        )
    if "scheduled" in state.policy_monitor.methods:
        state.policy_monitor.check_scheduled(plan.num_scheduled_tokens)


def _check_tables(state: SimulatorState) -> None:
    size = state.settings.block_size
    for request_id, row in state.worker.rows.items():
        holder = state.kv_cache.holders.get(request_id)
        if (
            holder is None
            or request_id in state.worker.uncertain
            or state.requests[request_id].finished
        ):
            continue
        tables = state.kv_cache.block_ids(holder)
        if holder.releases is not None:
            _check_released(state, holder, row, tables)
            continue
        for group, table in enumerate(tables):
            first = state.worker.first_seen(group, row.computed) // size
            if list(table[first:]) != row.tables[group][first:]:
                raise BLOCKS.violation(
                    f"{request_id!r} has the blocks {row.tables[group][first:]} by its plans, but "
                    f"{list(table[first:])} in the KV cache manager",
                    "put each new block into exactly one plan",
                )


def _check_released(
    state: SimulatorState, holder: Request, row: WorkerRow, tables: BlockIds
) -> None:
    if holder.request_id in {new.source.request_id for new in state.plans[-1].new_requests}:
        return  # the manager releases with the next call of `extend`
    held = [[block for block in table if block != RELEASED] for table in row.tables]
    if held != [list(table) for table in tables]:
        raise RELEASES.violation(
            f"{holder.request_id!r} has the blocks {held} by its plans, but {tables} in the KV "
            f"cache manager",
            "call extend for each step of a request with releases",
        )


def _check_reasons(state: SimulatorState, plan: SchedulerOutput) -> None:
    if type(state.scheduler).why_waiting is Scheduler.why_waiting:
        return
    uncertain = _uncertain(state)
    for name, request in state.unfinished.items():
        try:
            reason = state.scheduler.why_waiting(name)
        except RequestError:
            if name in uncertain:
                continue
            raise WAIT_REASON.violation(
                f"why_waiting({name!r}) raised, but it is unfinished"
            ) from None
        if name in plan.num_scheduled_tokens:
            if reason is not None:
                raise WAIT_REASON.violation(
                    f"{name!r} got tokens, but has a wait reason: {reason.message}"
                )
        elif reason is None or not reason.message:
            raise WAIT_REASON.violation(f"{name!r} got no tokens, but has no reason: {reason!r}")
        else:
            _check_reason(state, request, reason)
    try:
        state.scheduler.why_waiting("unknown")
    except RequestError:
        return
    raise WAIT_REASON.violation("why_waiting of an unknown id did not raise RequestError")


def _check_reason(state: SimulatorState, request: ExpectedRequest, reason: WaitReason) -> None:
    name, source, script = request.request_id, request.source, request.script
    possible = {
        WaitingFor.POLICY: "admit" in state.policy_monitor.methods,
        WaitingFor.REMOTE_KV: script.transfer.tokens > 0 or script.transfer.pending_lookups > 0,
        WaitingFor.GRAMMAR: script.compile is not None,
        WaitingFor.ENCODER: bool(source.features),
        WaitingFor.RESULTS: state.settings.asynchronous and name in state.worker.rows,
        WaitingFor.SLOT: len(state.worker.rows) >= state.limits.max_num_seqs,
        WaitingFor.NEXT_STEP: name not in state.worker.rows,
        WaitingFor.PAUSED: state.paused is not PauseState.UNPAUSED,
    }
    if not possible.get(reason.waiting_for, True):
        raise WAIT_REASON.violation(
            f"{name!r} has the wait reason {reason.waiting_for.value!r}, which is impossible: "
            f"{reason.message}"
        )


def _check_stats(state: SimulatorState) -> None:
    stats, usable = state.scheduler.stats(), state.kv_cache.num_usable_blocks
    usage = 1 - state.kv_cache.num_free_blocks / usable
    if abs(stats.kv_cache_usage - usage) > 1e-9:
        raise COUNTS.violation(f"stats has kv_cache_usage {stats.kv_cache_usage}, expected {usage}")
    running = len(state.worker.rows)
    if stats.num_running != running and not state.worker.uncertain:
        raise COUNTS.violation(f"stats has {stats.num_running} running, the worker has {running}")
    verified, accepted = state.worker.verified, state.worker.accepted
    if not stats.num_accepted_drafts <= stats.num_drafts <= verified:
        raise COUNTS.violation(
            f"stats has {stats.num_accepted_drafts} of {stats.num_drafts} drafts accepted, the "
            f"worker accepted {accepted} of {verified}"
        )
