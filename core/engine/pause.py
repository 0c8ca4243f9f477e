"""Standing still: pause and resume, sleep and wake-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from hardpoint.core.wire import PauseMode
from hardpoint.plugins import Executor, HardpointError, PauseState, RequestError, Scheduler, typed

MEMORY_TAGS = ("weights", "kv_cache")
SCHEDULING_TAG = "scheduling"


@dataclass(frozen=True)
class Surroundings:
    """What pausing needs of an engine core.

    Attributes:
        abort_all: ends every request and sees that clients are told.
        settle: takes the results of all steps that are under way.
        sleep_levels: those that the workers can do, beside 0.
    """

    scheduler: Scheduler
    executor: Executor
    abort_all: Callable[[], None]
    settle: Callable[[], None]
    sleep_levels: tuple[int, ...] = (1, 2)


class Pausing:
    """Whether an engine core schedules, and whether it has its memory.

    Where a loop steps the core, a pause is over once nothing is left to do; caches are cleared
    then, not before. Where nobody does, every pause is immediate.

    Attributes:
        has_loop: whether `went_idle` will be called.
    """

    def __init__(self, core: Surroundings) -> None:
        """Begin awake and unpaused."""
        self._core = core
        self._state = PauseState.UNPAUSED
        self._asleep: set[str] = set()
        self._waiting: list[tuple[Callable[[], None], Future[None]]] = []
        self._last_sleep: Future[None] | None = None
        self.has_loop = False

    @property
    def is_paused(self) -> bool:
        """Whether some requests, or all, get no tokens because of a pause."""
        return self._state is not PauseState.UNPAUSED

    @property
    def is_sleeping(self) -> bool:
        """Whether memory was given back and is not there again."""
        return bool(self._asleep)

    def pause(self, mode: str, *, clear_cache: bool) -> Future[None]:
        """Stop scheduling; the future is done when the engine stands still.

        Raises:
            RequestError: an unknown mode, or one that cannot be had here.
        """
        self._begin(mode)
        return self._when_idle(self._clear_caches if clear_cache else _nothing)

    def resume(self) -> None:
        """Schedule again. Who waits for a pause to be complete is told that it never was.

        Raises:
            HardpointError: memory is asleep.
        """
        if self._asleep:
            raise HardpointError(f"the engine sleeps ({self._sleepers}); call wake_up() first")
        self.give_up("the engine was resumed before it stood still")
        self._set(PauseState.UNPAUSED)

    def sleep(self, level: int, mode: str) -> Future[None]:
        """Pause, then give memory back; the future is done after both, or fails with either.

        Raises:
            RequestError: an unknown level or mode.
            HardpointError: the engine sleeps already, or is about to.
        """
        levels = (0, *self._core.sleep_levels)
        if level not in levels:
            known = f"{', '.join(map(str, levels[:-1]))} or {levels[-1]}"
            why = ", which the workers cannot do" if level == 1 else ""
            raise RequestError(f"level: expected {known}, got {level!r}{why}")
        if level == 0:
            return self.pause(mode, clear_cache=False)
        if self._asleep:
            raise HardpointError(f"the engine sleeps already ({self._sleepers})")
        if self._last_sleep is not None and not self._last_sleep.done():
            raise HardpointError("the engine is about to sleep already, once it stands still")
        self._begin(mode)
        self._last_sleep = self._when_idle(lambda: self._lie_down(level))
        return self._last_sleep

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Have memory again. Scheduling is resumed once all of it is there.

        Args:
            tags: of "weights", "kv_cache" and "scheduling"; None is all of them.

        Raises:
            RequestError: an unknown tag.
            HardpointError: scheduling was asked for, but some memory would still be asleep.
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
            self._core.executor.collective_rpc("wake_up", (memory,))
            self._asleep -= set(memory)
        if not rest and (memory or SCHEDULING_TAG in wanted):
            self.resume()

    def went_idle(self) -> None:
        """Complete what waited until nothing is left to do."""
        while self._waiting:
            action, future = self._waiting.pop(0)
            _complete(action, future)

    def give_up(self, words: str) -> None:
        """Fail whatever still waits."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(HardpointError(words))

    @property
    def _sleepers(self) -> str:
        return ", ".join(tag for tag in MEMORY_TAGS if tag in self._asleep)

    def _begin(self, mode: str) -> None:
        mode = typed.convert(mode, PauseMode, path="mode", error=RequestError)
        if mode is PauseMode.WAIT and not self.has_loop:
            raise RequestError(
                "mode: expected 'abort' or 'keep' in an engine that runs in this process, where "
                "nothing steps it while the caller waits; got 'wait'"
            )
        everybody = mode is PauseMode.KEEP or self._asleep
        self._set(PauseState.PAUSED_ALL if everybody else PauseState.PAUSED_NEW)
        if mode is PauseMode.ABORT:
            self._core.abort_all()

    def _set(self, state: PauseState) -> None:
        self._core.scheduler.set_pause(state)
        self._state = state

    def _when_idle(self, action: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._waiting.append((action, future))
        if not self.has_loop:
            self._core.settle()
            self.went_idle()
        return future

    def _clear_caches(self) -> None:
        """Forget what is cached; requests that stand still are computed anew."""
        self._core.scheduler.reset_prefix_cache(recompute_running=True)

    def _lie_down(self, level: int) -> None:
        self._clear_caches()
        self._set(PauseState.PAUSED_ALL)  # nobody can be computed now, whatever the mode
        self._core.executor.collective_rpc("sleep", (level,))
        self._asleep = set(MEMORY_TAGS)


def _nothing() -> None:
    """Do nothing."""


def _complete(action: Callable[[], None], future: Future[None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        action()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
