"""Loads and saves of a KV connector that are under way: each has a deadline, and ends once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class PendingLoad:
    """An asynchronous load.

    Attributes:
        blocks: blocks that it fills.
        deadline: time on the clock of `PendingLoads`; infinity once it is given up.
        ranks: ranks that have not finished.
        step: step of the plan that starts it; None before that.
        invalid: blocks that could not be loaded.
        cancelled_in: step of the plan that cancels it.
        was_lost: whether it is given up for another reason than that it failed.
        is_wanted: whether its request is live.
    """

    blocks: frozenset[int]
    deadline: float
    ranks: set[int]
    step: int | None = None
    invalid: frozenset[int] = frozenset()
    cancelled_in: int | None = None
    was_lost: bool = False
    is_wanted: bool = True

    @property
    def is_given_up(self) -> bool:
        """Whether a plan cancels it, or will."""
        return self.deadline == math.inf

    def give_up(self) -> None:
        """Let the next plan cancel it: its blocks are free once no worker writes to them."""
        self.invalid = self.blocks
        self.deadline = math.inf


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that has ended in all ranks.

    Attributes:
        invalid: blocks that could not be loaded, of a request that is live.
        failed: whether not all were loaded.
        is_error: whether that is a failure of the connector.
    """

    invalid: frozenset[int] = frozenset()
    failed: bool = True
    is_error: bool = False


class PendingLoads:
    """Asynchronous loads by request id.

    A request with a canceled load may be named late. Its id loads nothing again for a while, so
    that this does not end the load of another request.
    """

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float], seconds: float) -> None:
        """Begin without loads.

        Args:
            clock: counts the seconds in which the engine was not paused.
            seconds: maximum time of a load.
        """
        self._ranks, self._clock, self._seconds = frozenset(ranks), clock, seconds
        self._loads: dict[str, PendingLoad] = {}
        self._refused: dict[str, float] = {}  # until when

    def __bool__(self) -> bool:
        return bool(self._loads)

    def is_busy(self, request_id: str) -> bool:
        """Return whether a request with this id cannot load: reports on the id are ambiguous."""
        if (until := self._refused.get(request_id)) is not None:
            if self._clock() < until:
                return True
            del self._refused[request_id]
        return request_id in self._loads

    def begin(self, request_id: str, blocks: Iterable[int]) -> None:
        """Begin a load, which the next plan starts."""
        deadline = self._clock() + self._seconds
        self._loads[request_id] = PendingLoad(frozenset(blocks), deadline, set(self._ranks))

    def plan(self, step: int) -> list[str]:
        """Let a plan start transfers that no plan has started; return canceled ones."""
        cancelled = []
        for request_id, load in self._loads.items():
            if load.step is None:
                load.step = step
            if load.is_given_up and load.cancelled_in is None:
                load.cancelled_in = step
                cancelled.append(request_id)
        return cancelled

    def finished(self, request_id: str, rank: int, step: int) -> None:
        """Record a rank's report, with the result of a step, that it has finished a load."""
        load = self._loads.get(request_id)
        if load is not None and load.step is not None and load.step <= step:
            load.ranks.discard(rank)

    def failed(self, invalid: frozenset[int]) -> None:
        """Record blocks that could not be loaded."""
        for load in self._loads.values():
            load.invalid |= load.blocks & invalid

    def fail_all(self, step: int) -> None:
        """Give up all loads that plans up to a step have started: one or more have failed."""
        for load in self._loads.values():
            if load.step is not None and load.step <= step and not load.is_given_up:
                load.give_up()

    def plan_lost(self, step: int) -> None:
        """Give up all loads started by plans up to a lost one.

        Reports of workers with its result are lost, too: that a load has ended, or has failed.
        """
        for load in self._loads.values():
            if load.cancelled_in == step:
                load.cancelled_in = None  # the next plan cancels it again
            if load.step is not None and load.step <= step and not load.is_given_up:
                load.was_lost = True
                load.give_up()

    def workers_lost(self) -> None:
        """End all loads: no worker knows them any more."""
        for load in self._loads.values():
            load.was_lost = load.was_lost or not load.is_given_up
            load.give_up()
            load.ranks.clear()

    def request_ended(self, request_id: str) -> None:
        """Give up the load of a request that has ended."""
        if (load := self._loads.get(request_id)) is not None:
            load.is_wanted = False
            load.give_up()

    def pop_late(self) -> list[str]:
        """Give up late loads, and return them."""
        now, late = self._clock(), []
        for request_id, load in self._loads.items():
            if load.ranks and now > load.deadline:
                load.give_up()
                late.append(request_id)
        return late

    def end(self, step: int) -> dict[str, EndedLoad]:
        """Remove the loads that have ended with the result of a step, and return them."""
        ended = {}
        for request_id, load in list(self._loads.items()):
            if load.ranks and load.cancelled_in != step:
                continue
            del self._loads[request_id]
            if load.ranks:
                self._refuse(request_id)
            failed = bool(load.invalid)
            ended[request_id] = EndedLoad(
                invalid=load.invalid if load.is_wanted else frozenset(),
                failed=failed,
                is_error=failed and load.is_wanted and not load.was_lost,
            )
        return ended

    def _refuse(self, request_id: str) -> None:
        now = self._clock()
        self._refused = {r: until for r, until in self._refused.items() if now < until}
        self._refused[request_id] = now + self._seconds


@dataclass(slots=True)
class _Save:
    """An ended request with blocks kept for the connector.

    Attributes:
        deadline: time on the clock of `Saves`.
        ranks: ranks that have not reported that they have saved them.
        step: step of the plan that reports its end to them; None before that.
    """

    deadline: float
    ranks: set[int]
    step: int | None = None


@dataclass
class Saves:
    """Ended requests with blocks kept until all ranks have saved them, or time is over.

    Attributes:
        ranks: all ranks.
        clock: returns the engine's time, in seconds.
        seconds: maximum time.
    """

    ranks: frozenset[int]
    clock: Callable[[], float]
    seconds: float
    _saves: dict[str, _Save] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._saves)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._saves

    def begin(self, request_id: str) -> None:
        """Keep the blocks of a request that has ended."""
        self._saves[request_id] = _Save(self.clock() + self.seconds, set(self.ranks))

    def plan(self, step: int) -> None:
        """Let a plan report the requests that have ended."""
        for save in self._saves.values():
            if save.step is None:
                save.step = step

    def finished(self, request_id: str, rank: int, step: int) -> None:
        """Record a rank's report, with the result of a step, that it has saved the blocks."""
        save = self._saves.get(request_id)
        if save is not None and save.step is not None and save.step <= step:
            save.ranks.discard(rank)

    def workers_lost(self) -> None:
        """End all: no worker knows them any more."""
        for save in self._saves.values():
            save.ranks.clear()

    def end(self) -> tuple[list[str], list[str]]:
        """Remove saved and late saves; return both, the late ones again by themselves."""
        now = self.clock()
        late = [r for r, save in self._saves.items() if save.ranks and now > save.deadline]
        ended = [r for r, save in self._saves.items() if not save.ranks] + late
        for request_id in ended:
            del self._saves[request_id]
        return ended, late
