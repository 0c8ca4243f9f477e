"""torch's settings around the calls of a step that no guard compares them for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardpoint.plugins import Scheduler
from hardpoint.plugins.manifest import Source
from hardpoint.registry.discovery import is_third_party
from hardpoint.system.plugin_settings import READ, changed


class StepSettings:
    """Puts back what the scheduler or the executor of an engine has changed, and names it."""

    def __init__(
        self, scheduler: Scheduler, label: str, executor: str, policy: Callable[[], Source]
    ) -> None:
        """Name who is responsible.

        Args:
            scheduler: its calls are compared.
            label: names it in messages.
            executor: names the executor.
            policy: returns the source of the policy now.
        """
        self._scheduler, self._label = scheduler, label
        self._executor, self._policy = executor, policy

    def of_scheduler(self, before: Any, method: str) -> None:
        """Compare the settings with those before a call of the scheduler.

        The calls of a policy are compared themselves, but for `scheduled`, which is called for each
        request: where the scheduler is a built-in, that must have changed them.
        """
        if READ[0]() == before:
            return
        source = self._scheduler.context.source
        if source is not None and not is_third_party(source) and is_third_party(self._policy()):
            changed(before, self._policy(), "scheduled")
        else:
            changed(before, self._label, method)

    def of_executor(self, before: Any, method: str) -> None:
        """Compare the settings with those before a call of the executor."""
        if READ[0]() != before:
            changed(before, self._executor, method)
