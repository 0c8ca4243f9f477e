"""The live changes of an engine, which has its workers make theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from hardpoint.errors import ConfigError, HardpointError
from hardpoint.host.boundary.errors import error_of
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.boundary.policy import PolicySlot
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import Executor, Request, RequestError, Scheduler
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits

from .change import Action, Changes, LiveChange, PreparedChange, Switch
from .parts import part_changes
from .policy import PolicyChanges

LIMITS = ("long_prefill_token_threshold", "max_waiting", "max_waiting_tokens")
"""Settings of the scheduler that change while it runs."""

_PROCESSORS = "logits_processors"

WorkerAnswer = tuple[str | None, str, bool]
"""Kind and text of the error that an action raised, and whether a change is prepared."""


class EngineChanges:
    """The live changes of an engine, one at a time."""

    def __init__(
        self,
        policy: PolicySlot,
        scheduler: Scheduler,
        limits: LimitsSlot,
        executor: Executor,
        halves: EngineHalves,
        end_requests: Callable[[list[str]], object],
    ) -> None:
        """`end_requests`: ends requests by their ids, with outputs."""
        self._parts = part_changes(halves, halves.use, policy.plugins, lambda part: part.users)
        self._changes = Changes([PolicyChanges(policy, scheduler), limits, self._parts])
        self._executor, self._scheduler = executor, scheduler
        self._policy, self._end_requests = policy, end_requests
        self._manifest: Manifest | None = None  # of the plugins now, once there was a change

    def run(self, action: Action, change: LiveChange | None) -> list[str]:
        """Run an action of a change; for "state", return the names of the pending slots.

        Args:
            change: the change, for "prepare"; else None.

        Raises:
            BusyError: another change is under way.
            HardpointError: it failed; "undo" is to follow, in all processes.
        """
        match action:
            case "prepare":
                if change is None:
                    raise RequestError("change: expected one to prepare, got None")
                self._manifest = self._manifest or self._policy.plugins.manifest
                self._changes.prepare(change)
                self._call_workers(action, msgspec.msgpack.encode(change))
            case "state":
                parts = {"the engine": self._changes.is_prepared(), **self._call_workers(action)}
                return [name for name, is_prepared in parts.items() if not is_prepared]
            case "commit":
                self._changes.commit()
                self._call_workers(action)
            case "keep":
                self._keep(self._changes.keep())
            case "undo":
                with contextlib.suppress(HardpointError):
                    self._call_workers(action)
                self._changes.undo()
        return []

    def _keep(self, change: LiveChange) -> None:
        """End a change; let workers close the components that no live request uses any more."""
        before, self._manifest = self._manifest, change.manifest
        assert before is not None, "prepare comes first"
        generation = change.manifest.generation
        try:
            live = list(self._scheduler.live_requests())
        except NotImplementedError:  # what its requests use stays open
            live, generation = [], before.generation
        if change.asked.running == "end":
            ending = _ending(live, before, change.manifest) | self._parts.users_of_replaced()
            self._end_requests(sorted(ending))
            live = [request for request in live if request.request_id not in ending]
        oldest = min((request.source.generation for request in live), default=generation)
        if change.lingers:
            oldest = min(oldest, before.generation)
        self._parts.release(oldest)
        self._call_workers("keep", str(oldest).encode())

    def _call_workers(self, action: Action, data: bytes = b"") -> dict[str, bool]:
        """Let all workers do something; return which have prepared the change, by name."""
        answers: list[WorkerAnswer] = self._executor.collective_rpc("live_change", (action, data))
        for kind, text, _ in answers:
            if kind is not None:
                raise error_of(kind, text)
        return {f"worker {rank}": answer[2] for rank, answer in enumerate(answers)}


def _ending(live: Sequence[Request], before: Manifest, after: Manifest) -> set[str]:
    gone = {
        entry.name
        for entry in before.entries
        if entry.kind == _PROCESSORS and not any(entry.is_same(other) for other in after.entries)
    }
    return {
        request.request_id
        for request, source in ((request, request.source) for request in live)
        if source.generation < after.generation and not gone.isdisjoint(source.plugin_args)
    }


class LimitsSlot:
    """The limits of the scheduler that change while it runs."""

    def __init__(self, scheduler: Scheduler, label: str) -> None:
        self._scheduler, self._label = scheduler, label
        self._limits: SchedulerLimits | None = None  # those of the last change

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Check the limits.

        Raises:
            ConfigError: they conflict, or the scheduler cannot change them.
        """
        del plugins
        before: SchedulerLimits = self._limits or self._scheduler.context.limits
        wanted = {name: getattr(change.config.scheduler, name) for name in LIMITS}
        limits = replace(before, **wanted)
        if limits == before:
            return None
        if type(self._scheduler).set_limits is Scheduler.set_limits:
            changed = next(name for name in LIMITS if wanted[name] != getattr(before, name))
            raise ConfigError(
                f"scheduler.{changed}: {self._label} cannot change its limits while it runs; "
                f"restart the engine with the new value"
            )
        return Switch(lambda is_new: self._use(limits if is_new else before))

    def _use(self, limits: SchedulerLimits) -> None:
        self._scheduler.set_limits(limits)
        self._limits = limits
