"""What a pause holds, and what is to do while it lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.plugins import PauseState, Scheduler, SchedulerOutput

from .names import PAUSE, WAITING, BrokenRule

if TYPE_CHECKING:
    from hardpoint.testing.scheduling.simulator import SchedulerRig

__all__ = ["check_idle", "check_pause", "check_paused_plan", "never_idle"]


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
