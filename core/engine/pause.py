"""Pause and resume, sleep and wake-up of an engine core, and actions between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from hardpoint import typed
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.plugins import (
    Executor,
    HardpointError,
    PauseState,
    Request,
    RequestError,
    Scheduler,
    WeightLoader,
)

MEMORY_TAGS = ("weights", "kv_cache")
SCHEDULING_TAG = "scheduling"
_RELEASES_MODEL = 2  # level of sleep
_USER = ""  # owner of the pauses by `pause` and `sleep`; those by `run` are of step parts


class PauseMode(StrEnum):
    """The treatment of running requests when the engine is paused."""

    ABORT = "abort"
    """They end."""
    WAIT = "wait"
    """They finish first; new ones wait."""
    KEEP = "keep"
    """They keep their state, without steps, until the engine is resumed."""


class PausedSteps(Protocol):
    """The steps of an engine core, as pauses end and complete them."""

    def abort_later(self, request_ids: Sequence[str] | None) -> None:
        """End requests, None is all of them; one of the next steps reports that to the clients."""

    def settle(self) -> None:
        """Complete all steps that are under way."""

    def halves_built(self) -> None:
        """Notify step parts of worker halves that were built again."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """An action to run once the engine is idle, with the future of its call."""

    action: Callable[[], Any]
    owner: str
    future: Future[Any] = field(default_factory=Future)


class PauseController:
    """The pause state of an engine core, and which of its memory is released.

    Where a busy loop steps the core, a pause is complete once no step is left to run, and caches
    are cleared then. Without a loop, every pause is complete at once. Step parts use it as the
    `StepBorder` of the contract.

    Attributes:
        loader: loader of the weights that the engine started with.
        has_loop: whether a busy loop steps the core and calls `went_idle`.
        num_wake_ups: calls of the workers' `wake_up`.
    """

    def __init__(self, loader: WeightLoader) -> None:
        self.loader = loader
        self._states = {_USER: PauseState.UNPAUSED}  # by owner
        self._asleep: set[str] = set()  # memory tags
        self._sleep_level = 0
        self._when_idle: list[_Waiting] = []
        self._last_sleep: Future[None] | None = None
        self.has_loop = False
        self.num_wake_ups = 0

    def use(
        self,
        scheduler: Scheduler,
        executor: Executor,
        step_parts: EngineHalves,
        sleep_levels: tuple[int, ...],
        steps: PausedSteps,
    ) -> None:
        """Set the parts of the engine to pause; its workers support `sleep_levels` besides 0."""
        self._scheduler, self._executor, self._step_parts = scheduler, executor, step_parts
        self._sleep_levels, self._steps = sleep_levels, steps

    @property
    def is_paused(self) -> bool:
        """Whether a pause keeps some requests, or all, from running."""
        return set(self._states.values()) != {PauseState.UNPAUSED}

    @property
    def is_paused_by_user(self) -> bool:
        """Whether the engine stays paused until `resume`."""
        return self._states[_USER] is not PauseState.UNPAUSED

    @property
    def is_pending(self) -> bool:
        """Whether a pause waits for the engine to be idle."""
        return bool(self._when_idle)

    @property
    def is_sleeping(self) -> bool:
        """Whether some memory is released."""
        return bool(self._asleep)

    @property
    def sleep_level(self) -> int:
        """The level of the sleep that released memory; 0 while none is released."""
        return self._sleep_level if self._asleep else 0

    def pause(self, mode: str, *, clear_cache: bool) -> Future[None]:
        """Stop scheduling; the future is done when the engine is idle.

        Raises:
            RequestError: an unknown mode, or a mode that this engine does not support.
        """
        self._begin(mode)
        return self._run_when_idle(self._clear_caches if clear_cache else lambda: None)

    def resume(self) -> None:
        """End the pauses by `pause` and `sleep`; fail the futures of incomplete ones.

        The pauses of step parts stay, since other engines may have run their actions already.

        Raises:
            HardpointError: the engine is asleep.
        """
        self._check_awake()
        self.fail_pending("the engine was resumed before it was idle", _USER)
        self._set_state(PauseState.UNPAUSED)

    def sleep(self, level: int, mode: str) -> Future[None]:
        """Pause, then release memory; the future is done after both, or fails with either.

        Raises:
            RequestError: an unknown level or mode.
            HardpointError: the engine is asleep already, or is about to be.
        """
        levels = (0, *self._sleep_levels)
        if level not in levels:
            known = f"{', '.join(map(str, levels[:-1]))} or {levels[-1]}"
            why = ", which the workers cannot do" if level == 1 else ""
            raise RequestError(f"level: expected {known}, got {level!r}{why}")
        if level == 0:
            return self.pause(mode, clear_cache=False)
        if self._asleep:
            raise HardpointError(f"the engine sleeps already ({self._sleeping_tags})")
        self._check_no_sleep_waits()
        self._begin(mode)
        self._last_sleep = self._run_when_idle(lambda: self._release_memory(level))
        return self._last_sleep

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Reallocate released memory; scheduling is resumed once all of it is allocated.

        Args:
            tags: some of "weights", "kv_cache" and "scheduling"; None is all of them.

        Raises:
            RequestError: an unknown tag.
            HardpointError: scheduling was asked for, but some memory would still be released.
        """
        known = (*MEMORY_TAGS, SCHEDULING_TAG)
        wanted = set(known if tags is None else tags)
        if unknown := sorted(wanted.difference(known)):
            raise RequestError(f"tags: expected some of {', '.join(known)}, got {unknown[0]!r}")
        rest = self._asleep - wanted
        if rest and SCHEDULING_TAG in wanted:
            raise HardpointError(
                f"tags: scheduling cannot be resumed while {', '.join(sorted(rest))} is asleep"
            )
        memory = [tag for tag in MEMORY_TAGS if tag in wanted & self._asleep]
        if memory:
            self.num_wake_ups += 1
            self._wake_up(memory)
        if not rest and (memory or SCHEDULING_TAG in wanted):
            self.resume()

    def _wake_up(self, memory: Sequence[str]) -> None:
        """Reallocate memory; start worker halves of step parts again, if the model was released."""
        parts = self._step_parts
        released = self._sleep_level >= _RELEASES_MODEL
        loads = released and "weights" in memory
        if loads:
            parts.blocks.weights_load()
        self._executor.collective_rpc("wake_up", (memory,))
        self._asleep -= set(memory)
        if loads:
            parts.weights_changed()
        if released and "kv_cache" in memory:
            parts.blocks.restart()
        if loads:
            self._steps.halves_built()

    def check(self, mode: str) -> None:
        """Check that `run` can pause the engine.

        Raises:
            RequestError: as `pause`.
            HardpointError: the engine is asleep, or is about to be.
        """
        self._check_awake()
        self._check_no_sleep_waits()
        self._checked(mode)

    def run(self, part: str, mode: str, action: Callable[[], Any]) -> Future[Any]:
        """Pause, run an action, and continue as the other pauses have it by then.

        Args:
            part: the step part that owns the pause; an action of it that waits is given up.
            mode: as for `pause`.
            action: called when no step is under way; the future gets its result, or exception.

        Raises:
            RequestError, HardpointError: as `check`.
        """
        self.check(mode)
        self.give_up(part, f"{part}: another action came before the next step")
        self._begin(mode, part)

        def run_action() -> Any:
            try:
                self._check_awake()
                return action()
            finally:
                self.num_wake_ups += 1  # workers may have work to do ahead again
                self._set_state(PauseState.UNPAUSED, part)

        return self._run_when_idle(run_action, part)

    def give_up(self, part: str, why: str) -> None:
        """Fail the pending future of `run`, and end its pause."""
        self.fail_pending(why, part)
        self._set_state(PauseState.UNPAUSED, part)

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes a part move KV blocks; None if none does."""
        return self._step_parts.moves_blocks

    def live_requests(self) -> Iterable[Request[Any]]:
        """Return the live requests."""
        return self._scheduler.live_requests()

    def change_weights(
        self, change: Callable[[], object], loader: Callable[[], WeightLoader], *, recompute: bool
    ) -> None:
        """Change the weights of all workers; notify step parts, and start the block-moving ones.

        Args:
            change: gives the workers other weights.
            loader: returns a loader of these weights, for parts that move KV blocks.
            recompute: whether requests that have begun compute their keys and values again.
        """
        parts = self._step_parts
        if parts.moves_blocks is not None:
            parts.blocks.weights_load(loader())
        self._scheduler.reset_prefix_cache(recompute_running=recompute)
        change()
        parts.weights_changed()
        parts.blocks.restart()

    def went_idle(self) -> None:
        """Complete the pauses that wait for the engine to be idle."""
        while self._when_idle:
            waiting = self._when_idle.pop(0)
            if waiting.future.set_running_or_notify_cancel():
                try:
                    result = waiting.action()
                except BaseException as error:
                    raise_unless_fault(error)
                    waiting.future.set_exception(error)
                else:
                    waiting.future.set_result(result)
            if waiting.owner != _USER and self._scheduler.has_requests():
                break  # its own pause was the stricter one

    def fail_pending(self, message: str, owner: str | None = None) -> None:
        """Fail the futures of incomplete pauses; with an owner, of its pauses only."""
        pending = [w for w in self._when_idle if owner is None or w.owner == owner]
        self._when_idle = [waiting for waiting in self._when_idle if waiting not in pending]
        for waiting in pending:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(HardpointError(message))

    def _check_awake(self) -> None:
        if self._asleep:
            raise HardpointError(f"the engine sleeps ({self._sleeping_tags}); call wake_up() first")

    def _check_no_sleep_waits(self) -> None:
        if self._last_sleep is not None and not self._last_sleep.done():
            raise HardpointError("the engine is about to sleep already, once it is idle")

    @property
    def _sleeping_tags(self) -> str:
        return ", ".join(tag for tag in MEMORY_TAGS if tag in self._asleep)

    def _begin(self, mode: str, owner: str = _USER) -> None:
        mode = self._checked(mode)
        pauses_all = mode is PauseMode.KEEP or self._asleep
        self._set_state(PauseState.PAUSED_ALL if pauses_all else PauseState.PAUSED_NEW, owner)
        if mode is PauseMode.ABORT:
            self._steps.abort_later(None)

    def _checked(self, mode: str) -> PauseMode:
        checked = typed.convert(mode, PauseMode, path="mode", error=RequestError)
        if checked is PauseMode.WAIT and not self.has_loop:
            raise RequestError(
                "mode: expected 'abort' or 'keep' in an engine that runs in this process, where "
                "nothing steps it while the caller waits; got 'wait'"
            )
        return checked

    def _set_state(self, state: PauseState, owner: str = _USER) -> None:
        self._states[owner] = state
        self._scheduler.set_pause(max(self._states.values(), key=list(PauseState).index))

    def _run_when_idle(self, action: Callable[[], Any], owner: str = _USER) -> Future[Any]:
        waiting = _Waiting(action, owner)
        # The user's pauses are last: they may have to wait again once the others are over.
        self._when_idle.insert(len(self._when_idle) if owner == _USER else 0, waiting)
        if not self.has_loop:
            self._steps.settle()
            self.went_idle()
        return waiting.future

    def _clear_caches(self) -> None:
        self._scheduler.reset_prefix_cache(recompute_running=True)

    def _release_memory(self, level: int) -> None:
        self._clear_caches()
        self._set_state(PauseState.PAUSED_ALL)  # no request can run now, whatever the mode
        self._executor.collective_rpc("sleep", (level,))
        self._asleep, self._sleep_level = set(MEMORY_TAGS), level
