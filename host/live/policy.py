"""Replaces the scheduling policy of an engine by live changes."""

from __future__ import annotations

from hardpoint.host.boundary.guard import boundary_of
from hardpoint.host.boundary.policy import NewPolicy, PolicySlot
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import Scheduler

from .change import LiveChange, PreparedChange


class PolicyChanges:
    """Replaces the policy of an engine by live changes; a `Slot`."""

    def __init__(self, slot: PolicySlot, scheduler: Scheduler) -> None:
        self._slot, self._scheduler = slot, scheduler

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Build the policy, if it is another one.

        Raises:
            ConfigError: the scheduler cannot take another one.
            PluginError: it cannot be built.
        """
        new = self._slot.build(plugins, always=change.asked.policy is not None)
        return None if new is None else _PreparedPolicy(self._slot, self._scheduler, new)


class _PreparedPolicy(PreparedChange):
    def __init__(self, slot: PolicySlot, scheduler: Scheduler, new: NewPolicy) -> None:
        self._slot, self._scheduler, self._new = slot, scheduler, new
        self._old: NewPolicy | None = None

    def commit(self) -> None:
        self._old = self._slot.use(self._new, self._scheduler)

    def undo(self) -> None:
        if self._old is not None:
            # Not the old one itself: it would count requests twice.
            fresh = self._slot.build(self._old.plugins, always=True)
            if fresh is not None:
                self._slot.use(fresh, self._scheduler)
            self._old.close()
        self._new.close()

    def keep(self) -> None:
        if self._old is not None:
            try:
                self._old.policy.close()
            except BaseException as cause:  # the new policy is in place all the same
                raise_unless_fault(cause)
                boundary_of(self._old.policy).report("close() failed", cause)
