"""The scheduling policy that is in use, and its replacement on a running engine."""

from __future__ import annotations

from hardpoint.plugins import PluginSet, PolicyContext, Scheduler, SchedulingPolicy

from .policy_guard import GuardedPolicy
from .step_faults import FaultReporter, StepFaults

__all__ = ["PolicySlot"]

_KIND = "scheduling_policies"


class PolicySlot:
    """Holds one policy, guarded.

    Attributes:
        policy: what schedulers call.
        report: takes faults of the policy that are noticed elsewhere.
    """

    def __init__(self, plugins: PluginSet, faults: StepFaults) -> None:
        """Build the configured policy.

        Raises:
            PluginLoadError: its constructor failed.
        """
        self._faults = faults
        self.policy: GuardedPolicy
        self.report: FaultReporter
        self.policy, self.report = self._build(plugins)

    def replace(self, plugins: PluginSet, scheduler: Scheduler) -> None:
        """Put the policy of another plugin set in the place of this one, between two steps.

        If anything fails, the old one stays.

        Raises:
            PluginLoadError: its constructor failed.
            Exception: of `export_state`, `import_state` or the scheduler.
        """
        new, report = self._build(plugins)
        old = self.policy
        try:
            if new.state_format and new.state_format == old.state_format:
                new.import_state(old.export_state())
            scheduler.set_policy(new)
        except BaseException:
            new.close()
            raise
        self.policy, self.report = new, report
        old.close()

    def close(self) -> None:
        """Close the policy."""
        self.policy.close()

    def _build(self, plugins: PluginSet) -> tuple[GuardedPolicy, FaultReporter]:
        entry = plugins.one(_KIND)
        policy: SchedulingPolicy = plugins.create(entry, PolicyContext)
        report = self._faults.reporter(entry.source)
        return GuardedPolicy(policy, report), report
