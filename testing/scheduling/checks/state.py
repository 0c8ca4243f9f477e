"""What must hold between steps: blocks, tables, counts, reasons, and what is left at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.plugins import (
    PauseState,
    RequestError,
    Scheduler,
    SchedulerOutput,
    WaitingFor,
    WaitReason,
)
from hardpoint.testing.scheduling.fakes.requests import Life

from .names import (
    BOOKS,
    FINISHED,
    PAUSE,
    POLICY,
    POOL,
    RECORD,
    WAITING,
    BrokenRule,
)

if TYPE_CHECKING:
    from hardpoint.testing.scheduling.simulator import SchedulerRig


def check_paused_plan(rig: SchedulerRig, plan: SchedulerOutput) -> None:
    """Check that a plan gives no tokens to those whom the pause holds."""
    if early := sorted(_held(rig) & set(plan.num_scheduled_tokens)):
        raise PAUSE.broken(
            f"{early} are scheduled in step {plan.step} under {rig.paused.name}"
            + (", and have never begun" if rig.paused is PauseState.PAUSED_NEW else "")
        )


def check_pause(rig: SchedulerRig) -> None:
    """Check that what a pause does not hold is something to do."""
    if rig.paused is PauseState.UNPAUSED:
        return
    if not rig.scheduler.has_requests() and (due := _due(rig)) is not None:
        raise PAUSE.broken(
            f"has_requests() is False under {rig.paused.name}, but {due}",
            "let has_requests say what a pause does not hold: who has begun under PAUSED_NEW, "
            "deadlines that have passed, ends to be told, what a connector loads or keeps",
        )


def check_idle(rig: SchedulerRig) -> None:
    """Check that a pause leaves nobody who could go on, and that the others have a reason."""
    check_pause(rig)
    if type(rig.scheduler).why_waiting is Scheduler.why_waiting:
        return
    for name in sorted(_held(rig)):
        if rig.live[name].may_have_ended:
            continue
        reason = rig.scheduler.why_waiting(name)
        if reason is None or not reason.message:
            raise WAITING.broken(
                f"{rig.paused.name} holds {name!r}, but it has no reason: {reason!r}"
            )


def never_idle(rig: SchedulerRig, steps: int) -> BrokenRule:
    """Return what is wrong where so many steps were taken in a pause and more are wanted."""
    going_on = sorted(set(rig.live) - _held(rig))
    return PAUSE.broken(
        f"after {steps} steps under {rig.paused.name} has_requests() is True, "
        + (f"and {going_on} have not ended" if going_on else "though nobody may have tokens"),
        "whom a pause holds is nothing to do, and who has begun must get on without the others",
    )


def _held(rig: SchedulerRig) -> set[str]:
    """Return the live requests that may get no tokens."""
    if rig.paused is PauseState.UNPAUSED:
        return set()
    everybody = rig.paused is PauseState.PAUSED_ALL
    return {name for name, life in rig.live.items() if everybody or not (life.ran or life.loaded)}


def _due(rig: SchedulerRig) -> str | None:
    """Return in words what there is to do although requests are held; None if nothing."""
    now, live = rig.clock.now, rig.live
    if rig.roll.untold:
        return f"{sorted(rig.roll.untold)} are to be told"
    if late := sorted(name for name, life in live.items() if life.is_late(now)):
        return f"the deadline of {late} has passed"
    held = rig.kv_cache.holders
    begun = sorted(n for n, life in live.items() if life.ran or (life.loaded and n in held))
    if begun and rig.paused is PauseState.PAUSED_NEW:
        return f"{begun} have begun and are live"
    moving = rig.connector is not None and rig.connector.busy
    moving = moving or rig.worker.transfers.busy
    if moving or any(result.kv_loaded or result.kv_saved for _, result in rig.in_flight):
        return "the KV connector has not ended what it loads or keeps"
    return None


def check_standing(rig: SchedulerRig, plan: SchedulerOutput | None = None) -> None:
    """Check how a scheduler stands, after anything was done to it.

    Args:
        rig: it, and what was around it.
        plan: the one that was just carried out; None if it was something else.
    """
    rig.kv_cache.check()
    _check_counts(rig)
    check_pause(rig)
    if rig.settings.asks_policy:
        _check_ledger(rig)
    if plan is None:
        return
    if rig.settings.asks_policy:
        _check_accounts(rig, plan)
    _check_tables(rig)
    _check_reasons(rig, plan)
    _check_stats(rig)
    record = rig.records[-1]
    free = rig.kv_cache.num_free_blocks
    if record.num_free_blocks != free:
        raise RECORD.broken(
            f"the record of step {plan.step} says that {record.num_free_blocks} blocks are free, "
            f"there are {free}"
        )


def check_end(rig: SchedulerRig) -> None:
    """Check that nothing is left over when all has ended."""
    if rig.live:
        raise FINISHED.broken(f"{sorted(rig.live)} have not ended, but has_requests() is False")
    if rig.roll.untold:
        raise FINISHED.broken(f"no plan told that {sorted(rig.roll.untold)} ended")
    rig.worker.check_empty()
    rig.kv_cache.check_all_free()
    if rig.scheduler.num_unfinished_requests():
        raise BOOKS.broken(
            f"nothing is live, num_unfinished_requests is {rig.scheduler.num_unfinished_requests()}"
        )
    for life in rig.lives.values():
        if rig.settings.report_finished and not life.reported:
            raise FINISHED.broken(
                f"finished_requests never told client {life.source.client_index} that "
                f"{life.request_id!r} ended"
            )
        life.check_events(rig.settings.log_stats)


def _uncertain(rig: SchedulerRig) -> set[str]:
    """Return live requests that the scheduler may have ended already."""
    return {name for name, life in rig.live.items() if life.may_have_ended}


def _check_counts(rig: SchedulerRig) -> None:
    live, uncertain = rig.live, _uncertain(rig)
    count = rig.scheduler.num_unfinished_requests()
    if not len(live) - len(uncertain) <= count <= len(live):
        raise BOOKS.broken(
            f"num_unfinished_requests is {count}, {len(live)} requests are live: {sorted(live)}"
        )
    unpaused = rig.paused is PauseState.UNPAUSED
    if unpaused and (live or rig.roll.untold) and not rig.scheduler.has_requests():
        what = f"{sorted(live)} are live" if live else f"{sorted(rig.roll.untold)} are to be told"
        raise BOOKS.broken(f"has_requests() is False, but {what}")
    stats = rig.scheduler.stats()
    if stats.num_running + stats.num_waiting != count:
        raise BOOKS.broken(
            f"stats says {stats.num_running} running and {stats.num_waiting} waiting, "
            f"num_unfinished_requests is {count}"
        )


def _check_ledger(rig: SchedulerRig) -> None:
    live, known = set(rig.live), set(rig.ledger.live)
    if not live - _uncertain(rig) <= known <= live:
        raise POLICY.broken(
            f"by added() and finished() {sorted(known)} are live, but {sorted(live)} are"
        )


def _check_accounts(rig: SchedulerRig, plan: SchedulerOutput) -> None:
    """The policy was told of the plan's tokens, and of no others."""
    told = {*rig.ledger.tokens} - set(plan.num_scheduled_tokens) - plan.preempted_request_ids
    if told:
        raise POLICY.broken(f"scheduled() was told of {sorted(told)}, which the plan does not have")
    if "scheduled" in rig.ledger.methods:
        rig.ledger.check_scheduled(plan.num_scheduled_tokens)


def _check_tables(rig: SchedulerRig) -> None:
    """The worker's tables are those of the KV cache manager, where its tokens see them."""
    size = rig.settings.block_size
    for request_id, row in rig.worker.rows.items():
        holder = rig.kv_cache.holders.get(request_id)
        if holder is None or request_id in rig.worker.doubtful or rig.lives[request_id].ended:
            continue
        tables = rig.kv_cache.block_ids(holder)
        for group, table in enumerate(tables):
            first = rig.worker.first_seen(group, row.computed) // size
            if list(table[first:]) != row.tables[group][first:]:
                raise POOL.broken(
                    f"{request_id!r} has the blocks {row.tables[group][first:]} as plans told, but "
                    f"{list(table[first:])} as the KV cache manager says",
                    "tell of each new block exactly once",
                )


def _check_reasons(rig: SchedulerRig, plan: SchedulerOutput) -> None:
    if type(rig.scheduler).why_waiting is Scheduler.why_waiting:
        return
    uncertain = _uncertain(rig)
    for name, life in rig.live.items():
        try:
            reason = rig.scheduler.why_waiting(name)
        except RequestError:
            if name in uncertain:
                continue
            raise WAITING.broken(f"why_waiting({name!r}) raised, but it is live") from None
        if name in plan.num_scheduled_tokens:
            if reason is not None:
                raise WAITING.broken(f"{name!r} got tokens, but waits: {reason.message}")
        elif reason is None or not reason.message:
            raise WAITING.broken(f"{name!r} got no tokens, but has no reason: {reason!r}")
        else:
            _check_reason(rig, life, reason)
    try:
        rig.scheduler.why_waiting("nobody")
    except RequestError:
        return
    raise WAITING.broken("why_waiting of an id that is not live did not raise RequestError")


def _check_reason(rig: SchedulerRig, life: Life, reason: WaitReason) -> None:
    """The reason fits the request and its surroundings."""
    name, source, script = life.request_id, life.source, life.script
    fits = {
        WaitingFor.POLICY: "admit" in rig.ledger.methods,
        WaitingFor.REMOTE_KV: script.transfer.tokens > 0 or script.transfer.asks > 0,
        WaitingFor.GRAMMAR: script.compile is not None,
        WaitingFor.LORA_SLOT: source.lora is not None and rig.limits.max_loras > 0,
        WaitingFor.ENCODER: bool(source.features),
        WaitingFor.RESULTS: rig.settings.asynchronous and name in rig.worker.rows,
        WaitingFor.SLOT: len(rig.worker.rows) >= rig.limits.max_num_seqs,
        WaitingFor.NEXT_STEP: name not in rig.worker.rows,
        WaitingFor.PAUSED: rig.paused is not PauseState.UNPAUSED,
    }
    if not fits.get(reason.waiting_for, True):
        raise WAITING.broken(
            f"{name!r} is said to wait for {reason.waiting_for.value!r}, which cannot be: "
            f"{reason.message}"
        )


def _check_stats(rig: SchedulerRig) -> None:
    stats, usable = rig.scheduler.stats(), rig.kv_cache.num_usable_blocks
    usage = 1 - rig.kv_cache.num_free_blocks / usable
    if abs(stats.kv_cache_usage - usage) > 1e-9:
        raise BOOKS.broken(f"stats says kv_cache_usage {stats.kv_cache_usage}, it is {usage}")
    running = len(rig.worker.rows)
    if stats.num_running != running and not rig.worker.doubtful:
        raise BOOKS.broken(f"stats says {stats.num_running} running, the workers have {running}")
    verified, accepted = rig.worker.verified, rig.worker.accepted
    if not stats.num_accepted_drafts <= stats.num_drafts <= verified:
        raise BOOKS.broken(
            f"stats says {stats.num_accepted_drafts} of {stats.num_drafts} drafts accepted, the "
            f"workers accepted {accepted} of {verified}"
        )
