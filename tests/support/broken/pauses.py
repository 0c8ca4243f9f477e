"""Schedulers that make one mistake when they are paused."""

from __future__ import annotations

from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import PauseState
from support.broken.schedulers import WithCache


class PausesNewAlone(DefaultScheduler):
    contract = 1

    def set_pause(self, state):
        anybody = state is PauseState.UNPAUSED
        super().set_pause(state if anybody else PauseState.PAUSED_NEW)


class PausesAllAlone(DefaultScheduler):
    contract = 1

    def set_pause(self, state):
        everybody = state is PauseState.PAUSED_ALL
        super().set_pause(state if everybody else PauseState.UNPAUSED)


class HoldsTheBegun(DefaultScheduler):
    contract = 1

    def set_pause(self, state):
        anybody = state is PauseState.UNPAUSED
        super().set_pause(state if anybody else PauseState.PAUSED_ALL)


class HoldsTheLoaded(DefaultScheduler):
    contract = 1
    pause = PauseState.UNPAUSED

    def set_pause(self, state):
        self.pause = state
        super().set_pause(state)

    def has_requests(self):
        books = self._books
        more = (books.running, books.blocked, books.untold, books.ended, books.lingering)
        begun = any(more) or any(request.num_preemptions for request in books.waiting)
        if self.pause is PauseState.PAUSED_NEW and books.loaded and not begun:
            return False
        return super().has_requests()


class NeverIdle(DefaultScheduler):
    contract = 1

    def has_requests(self):
        return super().has_requests() or self.num_unfinished_requests() > 0


class StaysPaused(WithCache):
    """Whoever came during a pause is not admitted after it either."""

    contract = 1
    paused = False

    def change(self, cache):
        self.late = set()

        def admit(request, *given, **named):
            return request.request_id not in self.late and cache.admit(request, *given, **named)

        self.cache.admit = admit

    def set_pause(self, state):
        super().set_pause(state)
        self.paused = state is not PauseState.UNPAUSED

    def add_request(self, request):
        super().add_request(request)
        if self.paused:
            self.late.add(request.request_id)


class StopsTheClock(DefaultScheduler):
    """A deadline that comes during a pause is never noticed."""

    contract = 1

    def set_pause(self, state):
        super().set_pause(state)
        if state is not PauseState.UNPAUSED:
            self._books._deadlines.clear()


class ForgetsLoads(DefaultScheduler):
    contract = 1
    paused = False

    def set_pause(self, state):
        super().set_pause(state)
        self.paused = state is PauseState.PAUSED_ALL

    def has_requests(self):
        books = self._books
        overdue = books.is_overdue(self.context.clock())
        if self.paused:
            return bool(books.untold or books.ended or overdue)
        return super().has_requests()


class PausesInSecret(DefaultScheduler):
    """Tells of the last step, though none follows it while it is paused."""

    contract = 1

    def why_waiting(self, request_id):
        reason = super().why_waiting(request_id)
        return None if request_id in self._last_step.tokens else reason
