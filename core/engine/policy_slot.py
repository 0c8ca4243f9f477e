"""The scheduling policy that is in use, and its replacement on a running engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hardpoint.core.faults import FaultReporter, StepFaults
from hardpoint.plugins import (
    PluginFaultError,
    PluginSet,
    PolicyContext,
    Scheduler,
    SchedulingPolicy,
)
from hardpoint.registry.loading import Source

from .policy import GuardedPolicy

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
        self._source: Source
        self.policy, self.report, self._source = self._build(plugins)

    def replace(self, plugins: PluginSet, scheduler: Scheduler) -> None:
        """Put the policy of another plugin set in the place of this one, between two steps.

        If anything fails, the old one stays.

        Raises:
            PluginLoadError: its constructor failed.
            PluginFaultError: `export_state` or `import_state` did.
            Exception: of the scheduler.
        """
        new, report, source = self._build(plugins)
        old = self.policy
        try:
            if new.state_format and new.state_format == old.state_format:
                with _named(self._source, "export_state"):
                    books = old.export_state()
                with _named(source, "import_state"):
                    new.import_state(books)
            scheduler.set_policy(new)
        except BaseException:
            new.close()
            raise
        old_report = self.report
        self.policy, self.report, self._source = new, report, source
        try:
            old.close()
        except Exception as cause:  # the new one is there all the same
            old_report("close() failed", cause)

    def close(self) -> None:
        """Close the policy."""
        self.policy.close()

    def _build(self, plugins: PluginSet) -> tuple[GuardedPolicy, FaultReporter, Source]:
        entry = plugins.one(_KIND)
        policy: SchedulingPolicy = plugins.create(entry, PolicyContext)
        report = self._faults.reporter(entry.source)
        return GuardedPolicy(policy, report), report, entry.source


@contextlib.contextmanager
def _named(source: Source, method: str) -> Iterator[None]:
    """Say whose method failed."""
    try:
        yield
    except Exception as cause:
        words = f"{source}: {method}() failed: {type(cause).__name__}: {cause}"
        raise PluginFaultError(words) from cause
