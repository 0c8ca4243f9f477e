"""Live changes of components that run in two generations of the plugins side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from hardpoint.host.boundary.errors import close_all
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.sampling.logits import LogitsPlugin

from .change import LiveChange, Switch


class Replaceable(Protocol):
    """The caller of a component that a live change may replace.

    Attributes:
        until: the generation from which on requests do not use it; None if they do.
    """

    until: int | None

    @property
    def name(self) -> str:
        """Name of the component."""


class Runner(Replaceable, Protocol):
    """The runner of a logits processor."""

    @property
    def processor(self) -> LogitsPlugin:
        """The processor."""


C = TypeVar("C", bound=Replaceable)
R = TypeVar("R", bound=Runner)
T = TypeVar("T")


InUse = Callable[[], Sequence[C]]
"""Returns the components of all generations that are in use, in the order of their calls."""

Build = Callable[[PluginSet, Sequence[PluginEntry], Sequence[C], LiveChange], Sequence[C]]
"""Builds the components of entries, which take the places of others; if it fails, none is left."""


class GenerationChanges(Generic[C]):
    """Replaces the components of a kind in one process; a `WorkerSlot`.

    Requests use the components of the generation that they were admitted with. One that stays the
    same, and runs in the same order, serves several generations.

    Args:
        users_of: returns the ids of requests for which calls of a component are still to come.
        closes_later: whether a change closes what those before it have replaced, because
            requests that are being prepared, or validated, may still use what it replaces.

    Attributes:
        plugins: the latest ones.
    """

    def __init__(
        self,
        kind: str,
        plugins: PluginSet,
        in_use: InUse[C],
        use: Callable[[Sequence[C]], None],
        build: Build[C],
        close: Callable[[Sequence[C]], None],
        *,
        users_of: Callable[[C], Collection[str]] = lambda _one: (),
        closes_later: bool = False,
    ) -> None:
        self._kind, self.plugins = kind, plugins
        self._in_use, self._use, self._build, self._close = in_use, use, build, close
        self._users_of, self._closes_later = users_of, closes_later

    @property
    def latest(self) -> dict[str, C]:
        """The components of the latest generation, by name."""
        return {c.name: c for c in self._in_use() if c.until is None}

    def users_of_replaced(self) -> set[str]:
        """Return the ids of requests that use replaced or disabled components."""
        gone = [component for component in self._in_use() if component.until is not None]
        return {name for component in gone for name in self._users_of(component)}

    def prepare(self, change: LiveChange, plugins: PluginSet) -> Switch:
        """Build the components that are new.

        Raises:
            ConfigError: a component cannot be changed while the engine runs.
            PluginError: one cannot be built, or does not work together with the others.
        """
        entries, earlier = plugins.entries(self._kind), self.plugins
        unchanged = _kept_names(earlier.entries(self._kind), entries)
        current = self.latest
        gone = [component for name, component in current.items() if name not in unchanged]
        fresh = [entry for entry in entries if entry.name not in unchanged]
        built = self._build(plugins, fresh, gone, change) if fresh or gone else ()
        by_name = current | {component.name: component for component in built}
        after = [by_name[entry.name] for entry in entries if entry.name in by_name]
        generation = change.manifest.generation

        def switch(is_new: bool) -> None:
            self.plugins = plugins if is_new else earlier
            if not (gone or built):
                return
            for component in gone:
                component.until = generation if is_new else None
            before = self._in_use()
            rest = [component for component in before if component not in built]
            self._use(_joined(before, after) if is_new else rest)

        oldest = generation - 1 if self._closes_later else 0
        return Switch(switch, lambda: self.release(oldest), lambda: self._close(built))

    def release(self, oldest: int) -> None:
        """Close the components that no request of a generation from `oldest` on uses."""
        in_use = self._in_use()
        gone = [c for c in in_use if c.until is not None and c.until <= oldest]
        if unused := [component for component in gone if not self._users_of(component)]:
            self._use([component for component in in_use if component not in unused])
            self._close(unused)

    def close(self) -> None:
        """Close all components."""
        self._close(self._in_use())


def processor_changes(
    plugins: PluginSet,
    in_use: InUse[R],
    use: Callable[[Sequence[R]], None],
    build_one: Callable[[PluginSet, PluginEntry, LiveChange], R],
) -> GenerationChanges[R]:
    """Return the live changes of logits processors.

    Args:
        plugins, in_use, use: as for `GenerationChanges`.
        build_one: builds the processor of an entry; raises PluginError.
    """

    def close(runners: Sequence[R]) -> None:
        close_all([runner.processor for runner in runners])

    def build(
        plugins: PluginSet, entries: Sequence[PluginEntry], _: Sequence[R], change: LiveChange
    ) -> Sequence[R]:
        built: list[R] = []
        try:
            for entry in entries:
                built.append(build_one(plugins, entry, change))
        except BaseException:
            close(built)
            raise
        return built

    return GenerationChanges("logits_processors", plugins, in_use, use, build, close)


def _kept_names(before: Sequence[PluginEntry], after: Sequence[PluginEntry]) -> set[str]:
    """Return the names of unchanged entries, if their order does not change either.

    Where the order of any two changes, all are built again: each runs in one place of a step.
    """
    both = [entry for entry in before if any(entry.is_same(other) for other in after)]
    order = [entry.name for entry in after if any(entry.is_same(other) for other in both)]
    return set(order) if order == [entry.name for entry in both] else set()


def _joined(before: Sequence[T], after: Sequence[T]) -> list[T]:
    """Return runners of several generations in one order, in which each generation has its own.

    Args:
        before: in the order of all earlier generations.
        after: in the order of the next one; common components stand in the same order.
    """
    result: list[T] = []
    rest = list(before)
    for runner in after:
        if runner in rest:
            place = rest.index(runner) + 1
            result += rest[:place]
            rest = rest[place:]
        else:
            result.append(runner)
    return result + rest
