"""A guard around a scheduling policy: whatever the plugin does, the scheduler can go on."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Sequence
from typing import Any

from hardpoint.plugins import Load, Request, SchedulingPolicy

from .step_faults import FaultReporter

__all__ = ["GuardedPolicy"]

_OPTIONAL = (
    "group",
    "group_key",
    "admit",
    "victim",
    "added",
    "scheduled",
    "preempted",
    "finished",
)


class GuardedPolicy(SchedulingPolicy):
    """Calls a policy, and decides as fcfs does where that fails or returns nonsense.

    Methods that the policy does not override are not guarded: they are those of
    `SchedulingPolicy`, so a scheduler can tell that they have nothing to say and need no call.
    Only `Exception` is caught.

    Attributes:
        wrapped: the policy itself.
    """

    contract = 1

    def __init__(self, policy: SchedulingPolicy, report: FaultReporter) -> None:
        """`report` is told of each fault."""
        super().__init__(policy.context)
        self.wrapped = policy
        self.name = policy.name
        self.options = policy.options
        vars(self)["state_format"] = policy.state_format  # that of this very policy
        self._report = report
        self._stood_in_for_group = False
        for name in _OPTIONAL:
            own = getattr(getattr(policy, name), "__func__", None)
            if own is not getattr(SchedulingPolicy, name):
                setattr(self, name, getattr(self, f"_{name}"))

    def key(self, request: Request) -> Any:
        """Return the policy's key in a wrapper that compares with every other one."""
        who, arrival = request.request_id, request.arrival_time
        try:
            value = self.wrapped.key(request)
        except Exception as cause:
            self._report(f"key() of request {who!r} failed", cause)
            return _Key(None, who, arrival, None)
        return self._ordering("key", "request", value, who, arrival)

    def export_state(self) -> Any:
        """Return the policy's books; its errors are the caller's to handle."""
        return self.wrapped.export_state()

    def import_state(self, state: Any) -> None:
        """Hand over books; the policy's errors are the caller's to handle."""
        self.wrapped.import_state(state)

    def close(self) -> None:
        """Close the policy."""
        self.wrapped.close()

    def _group(self, request: Request) -> Hashable:
        try:
            group = self.wrapped.group(request)
        except Exception as cause:
            self._report(f"group() of request {request.request_id!r} failed", cause)
        else:
            if _is_hashable(group):
                return group
            self._report(
                f"group() of request {request.request_id!r} returned {_show(group)}, "
                f"expected something hashable that equals itself",
                None,
            )
        self._stood_in_for_group = True
        return None

    def _group_key(self, group: Hashable, now: float) -> Any:
        if group is None and self._stood_in_for_group:  # the policy may not know this group
            return _Key(None, group, 0.0, None)
        try:
            value = self.wrapped.group_key(group, now)
        except Exception as cause:
            self._report(f"group_key() of group {_show(group)} failed", cause)
            return _Key(None, group, 0.0, None)
        return self._ordering("group_key", "group", value, group, 0.0)

    def _admit(self, request: Request, load: Load) -> str | None:
        who = request.request_id
        try:
            reason = self.wrapped.admit(request, load)
        except Exception as cause:
            self._report(f"admit() of request {who!r} failed", cause)
            return None
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        self._report(
            f"admit() of request {who!r} returned {_show(reason)}, expected None or a reason "
            f"in words",
            None,
        )
        return None

    def _victim(self, running: Sequence[Request], load: Load) -> Request:
        running = tuple(running)
        try:
            victim = self.wrapped.victim(running, load)
        except Exception as cause:
            self._report("victim() failed", cause)
        else:
            if any(victim is request for request in running):
                return victim
            self._report(f"victim() returned {_show(victim)}, which is not running", None)
        return running[-1]

    def _added(self, request: Request) -> None:
        try:
            self.wrapped.added(request)
        except Exception as cause:
            self._report(f"added() of request {request.request_id!r} failed", cause)

    def _scheduled(self, request: Request, tokens: int) -> None:
        try:
            self.wrapped.scheduled(request, tokens)
        except Exception as cause:
            self._report(f"scheduled() of request {request.request_id!r} failed", cause)

    def _preempted(self, request: Request) -> None:
        try:
            self.wrapped.preempted(request)
        except Exception as cause:
            self._report(f"preempted() of request {request.request_id!r} failed", cause)

    def _finished(self, request: Request) -> None:
        try:
            self.wrapped.finished(request)
        except Exception as cause:
            self._report(f"finished() of request {request.request_id!r} failed", cause)

    def _ordering(
        self, method: str, what: str, value: Any, who: Hashable, arrival: float
    ) -> _Key:
        """Wrap what a method returned, after a look at whether it has an order at all."""
        try:
            wrong = None if _has_order(value) else "is not equal to itself"
        except Exception as cause:
            wrong = f"has no order ({type(cause).__name__}: {_text(cause)})"
        if wrong is None:
            return _Key(value, who, arrival, _Complaint(method, what, self._report))
        self._report(f"{method}() of {what} {_show(who)} returned {_show(value)}, which {wrong}", None)
        return _Key(None, who, arrival, None)


class _Complaint:
    """Tells that two keys do not compare; one for all keys of a method."""

    __slots__ = ("_method", "_report", "_what")

    def __init__(self, method: str, what: str, report: FaultReporter) -> None:
        self._method = method
        self._what = what
        self._report = report

    def __call__(self, one: _Key, other: _Key, cause: Exception) -> None:
        self._report(
            f"{self._method}() of {self._what}s {_show(one.who)} and {_show(other.who)} "
            f"do not compare",
            cause,
        )
