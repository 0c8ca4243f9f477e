"""Schedulers that make one mistake when they are paused."""

from __future__ import annotations

from hardpoint.plugins import PauseState
from support.broken.schedulers import Default, WithCache


class PausesNewAlone(Default):
    def set_pause(self, state):
        unpaused = state is PauseState.UNPAUSED
        super().set_pause(state if unpaused else PauseState.PAUSED_NEW)


class PausesAllAlone(Default):
    def set_pause(self, state):
        all_paused = state is PauseState.PAUSED_ALL
        super().set_pause(state if all_paused else PauseState.UNPAUSED)


class HoldsStarted(Default):
    def set_pause(self, state):
        unpaused = state is PauseState.UNPAUSED
        super().set_pause(state if unpaused else PauseState.PAUSED_ALL)


class HoldsLoaded(Default):
    pause = PauseState.UNPAUSED

    def set_pause(self, state):
        self.pause = state
        super().set_pause(state)

    def has_requests(self):
        tracker = self._tracker
        more = (
            tracker.running,
            tracker.blocked,
            tracker.unreported_finished,
            tracker.finished_outputs,
            tracker.pending_free,
        )
        begun = any(more) or any(request.num_preemptions for request in tracker.waiting)
        if self.pause is PauseState.PAUSED_NEW and tracker.loaded and not begun:
            return False
        return super().has_requests()


class NeverIdle(Default):
    def has_requests(self):
        return super().has_requests() or self.num_unfinished_requests() > 0


class StaysPaused(WithCache):
    """A request added during a pause is not admitted after it either."""

    paused = False

    def change(self, cache):
        self.late = set()

        def admit(request, *args, **named):
            return request.request_id not in self.late and cache.admit(request, *args, **named)

        self.cache.admit = admit

    def set_pause(self, state):
        super().set_pause(state)
        self.paused = state is not PauseState.UNPAUSED

    def add_request(self, request):
        super().add_request(request)
        if self.paused:
            self.late.add(request.request_id)


class StopsTheClock(Default):
    """A deadline that passes during a pause is never noticed."""

    def set_pause(self, state):
        super().set_pause(state)
        if state is not PauseState.UNPAUSED:
            self._tracker._deadlines.clear()


class ForgetsLoads(Default):
    paused = False

    def set_pause(self, state):
        super().set_pause(state)
        self.paused = state is PauseState.PAUSED_ALL

    def has_requests(self):
        tracker = self._tracker
        overdue = tracker.has_expired(self.context.clock())
        if self.paused:
            return bool(tracker.unreported_finished or tracker.finished_outputs or overdue)
        return super().has_requests()


class HidesReasons(Default):
    """Gives the reasons of the last step, which does not change during a pause."""

    def why_waiting(self, request_id):
        reason = super().why_waiting(request_id)
        return None if request_id in self._last_step.tokens else reason
