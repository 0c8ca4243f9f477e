"""A guard around a scheduling policy: whatever the plugin does, the scheduler can go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.core.faults import FaultReporter, StepFaults
from hardpoint.plugins import (
    EngineConfig,
    Load,
    PolicyContext,
    Request,
    Scheduler,
    SchedulingPolicy,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.manifest import Source
from hardpoint.registry.plugin_set import PluginSet


class GuardedPolicy(SchedulingPolicy):
    """Calls a policy, and decides as fcfs does where that fails or returns nonsense.

    Methods that the policy does not override are those of `SchedulingPolicy` here too, so a
    scheduler can see that they have nothing to say and need no call. Only `Exception` is caught.

    Attributes:
        wrapped: the policy itself.
    """

    contract = 1

    def __init__(self, policy: SchedulingPolicy, report: FaultReporter) -> None:
        """`report` is told of each fault."""
        super().__init__(policy.context)
        self.wrapped = policy
        self._report = report
        self._of_request = _Judge("key() of request", report)
        self._of_group = _Judge("group_key() of group", report)
        self._stood_in_for_group = False
        vars(self)["state_format"] = policy.state_format
        guards = {
            "group": self._group,
            "group_key": self._group_key,
            "admit": self._admit,
            "victim": self._victim,
        }
        for name in ("added", "scheduled", "preempted", "finished"):
            guards[name] = self._noting(name)
        for name, guard in guards.items():
            own = getattr(getattr(policy, name), "__func__", None)
            if own is not getattr(SchedulingPolicy, name):
                setattr(self, name, guard)

    def key(self, request: Request) -> Any:
        """Return the policy's key in a wrapper that compares with every other one."""
        who, arrival = request.request_id, request.arrival_time
        try:
            value = self.wrapped.key(request)
        except Exception as cause:
            self._report(f"key() of request {who!r} failed", cause)
            return _Key(None, who, arrival)
        return self._ordering(self._of_request, value, who, arrival)

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
        words = f"group() of request {request.request_id!r}"
        try:
            group = self.wrapped.group(request)
        except Exception as cause:
            self._report(f"{words} failed", cause)
        else:
            if _is_group(group):
                return group
            expected = "expected something hashable that is equal to itself"
            self._report(f"{words} returned {_show(group)}, {expected}", None)
        self._stood_in_for_group = True
        return None

    def _group_key(self, group: Hashable, now: float) -> Any:
        if group is None and self._stood_in_for_group:  # the policy may not know this one
            return _Key(None, group, 0.0)
        try:
            value = self.wrapped.group_key(group, now)
        except Exception as cause:
            self._report(f"group_key() of group {_show(group)} failed", cause)
            return _Key(None, group, 0.0)
        return self._ordering(self._of_group, value, group, 0.0)

    def _admit(self, request: Request, load: Load) -> str | None:
        words = f"admit() of request {request.request_id!r}"
        try:
            reason = self.wrapped.admit(request, load)
        except Exception as cause:
            self._report(f"{words} failed", cause)
            return None
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        self._report(f"{words} returned {_show(reason)}, expected None or a reason in words", None)
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

    def _noting(self, name: str) -> Callable[..., Any]:
        """Return a guard of a method that is told of something and returns nothing."""
        method = getattr(self.wrapped, name)

        def note(request: Request, *more: int) -> None:
            try:
                method(request, *more)
            except Exception as cause:
                self._report(f"{name}() of request {request.request_id!r} failed", cause)

        return note

    def _ordering(self, judge: _Judge, value: Any, who: Hashable, arrival: float) -> _Key:
        return _Key(value, who, arrival, judge if judge.accepts(value, who) else None)


class _Judge:
    """Says what is wrong with the keys of one method."""

    def __init__(self, words: str, report: FaultReporter) -> None:
        self._words = words
        self._report = report

    def accepts(self, value: Any, who: Hashable) -> bool:
        """Whether a value has an order at all; tells if not."""
        cause: Exception | None = None
        wrong = "is not equal to itself"
        try:
            bool(value < value)
            if _equals_itself(value):
                return True
        except Exception as error:
            wrong, cause = "has no order", error
        self._report(f"{self._words} {_show(who)} returned {_show(value)}, which {wrong}", cause)
        return False

    def blame(self, one: _Key, other: _Key, cause: Exception) -> None:
        """Tell that two keys do not compare."""
        names = f"{_show(one.who)} and {_show(other.who)}"
        self._report(f"{self._words}s {names} do not compare", cause)


class _Key:
    """What a policy ordered something by, comparable with others whatever that is.

    Where the policy's values are of no use, the arrival decides: of requests, when they came; of
    groups it is always 0, so these are equal.
    """

    __slots__ = ("arrival", "judge", "told", "value", "who")

    def __init__(
        self, value: Any, who: Hashable, arrival: float, judge: _Judge | None = None
    ) -> None:
        """Without `judge` there is no use in `value`."""
        self.value = value
        self.who = who
        self.arrival = arrival
        self.judge = judge
        self.told = False

    def __lt__(self, other: _Key) -> bool:
        if self.judge is not None and other.judge is not None:
            try:
                return bool(self.value < other.value)
            except Exception as cause:
                if not (self.told and other.told):  # once is enough
                    self.told = other.told = True
                    self.judge.blame(self, other, cause)
        return self.arrival < other.arrival

    def __eq__(self, other: object) -> bool:
        # By order alone, so that a value which only has `<` can be equal to another one.
        return isinstance(other, _Key) and not (self < other or other < self)

    __hash__ = None  # type: ignore[assignment]


def _equals_itself(value: Any) -> bool:
    """Whether a value is equal to itself; NaN is not, nor is what contains it."""
    if isinstance(value, tuple | list):  # these take identical members for equal
        return all(map(_equals_itself, value))
    return bool(value == value)


def _is_group(value: Any) -> bool:
    """Whether a value can tell groups apart."""
    try:
        hash(value)
        return _equals_itself(value)
    except Exception:
        return False


def _show(value: Any) -> str:
    """Return what a message says of a value that may be anything."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} without a repr"
    return text if len(text) <= 100 else f"{text[:97]}..."


_KIND = "scheduling_policies"
_ORIGIN = "set_policy()"


def change_policy(
    config: EngineConfig,
    config_sources: ConfigSources,
    plugins: PluginSet,
    use: str,
    options: Mapping[str, Any],
) -> tuple[EngineConfig, PluginSet]:
    """Return the configuration with another policy, and the next generation of the plugin set.

    Args:
        config, config_sources, plugins: as they are now.
        use: entry-point name or FQCN.
        options: the policy's own.

    Raises:
        ConfigError, PluginError: the policy cannot be had; nothing was changed.
    """
    old = plugins.one(_KIND).name
    tables = {k: v for k, v in config.plugin.items() if k not in (old, f"{_KIND}/{old}")}
    config = msgspec.structs.replace(
        config,
        scheduler=msgspec.structs.replace(config.scheduler, policy=use),
        plugin=tables,
    )
    by_path = {**config_sources.by_path, "scheduler.policy": _ORIGIN}
    changed = plugins.changed(config, ConfigSources(by_path), _KIND)
    if options:
        name = changed.one(_KIND).name
        alone = sum(entry.name == name for entry in changed.manifest.entries) == 1
        table = name if alone else f"{_KIND}/{name}"
        path = f"plugin.{table}"
        kept = {k: v for k, v in by_path.items() if not f"{k}.".startswith(f"{path}.")}
        config_sources = ConfigSources({**kept, path: _ORIGIN})
        config = msgspec.structs.replace(config, plugin={**tables, table: dict(options)})
        changed = plugins.changed(config, config_sources, _KIND)
    return config, changed


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
