"""Live changes of logits processors: those of two generations of the plugins run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from hardpoint.host.boundary.errors import close_all
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.sampling.logits import LogitsPlugin

from .change import LiveChange, PreparedChange, Switch

KIND = "logits_processors"


class Runner(Protocol):
    """The runner of a logits processor.

    Attributes:
        name: name of the processor.
        processor: the processor.
        until: the generation from which on requests do not use it; None if they do.
    """

    name: str
    processor: LogitsPlugin
    until: int | None


R = TypeVar("R", bound=Runner)
T = TypeVar("T")


class Pipeline(Protocol[R]):
    """Runs processors in their order."""

    @property
    def runners(self) -> Sequence[R]:
        """Those of all generations that are in use, in the order in which they run."""

    def use(self, runners: Sequence[R]) -> None:
        """Run other processors from the next step on."""


Build = Callable[[PluginSet, PluginEntry, LiveChange], R]
"""Builds the processor of an entry; raises PluginError."""


class ProcessorChanges(Generic[R]):
    """Replaces the logits processors of a pipeline by live changes; a `WorkerSlot`.

    Requests use the processors of the generation that they were admitted with. One that stays the
    same, and runs in the same order, serves several generations.

    Attributes:
        pipeline: runs the processors.
        plugins: the latest ones.
    """

    def __init__(self, pipeline: Pipeline[R], plugins: PluginSet, build: Build[R]) -> None:
        self.pipeline, self.plugins, self._build = pipeline, plugins, build

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Build the processors that are new.

        Raises:
            PluginError: one cannot be built, or does not work together with speculation.
        """
        entries, earlier = plugins.entries(KIND), self.plugins
        kept = kept_names(earlier.entries(KIND), entries)
        if len(kept) == len(entries) == len(earlier.entries(KIND)):
            return None
        current = {one.name: one for one in self.pipeline.runners if one.until is None}
        built: dict[str, R] = {}

        def close_built() -> None:
            close_all([runner.processor for runner in built.values()])

        try:
            for entry in entries:
                if entry.name not in kept:
                    built[entry.name] = self._build(plugins, entry, change)
        except BaseException:
            close_built()
            raise
        after = [built.get(entry.name) or current[entry.name] for entry in entries]
        gone = [one for one in current.values() if one not in after]

        def switch(is_new: bool) -> None:
            for runner in gone:
                runner.until = change.manifest.generation if is_new else None
            before = self.pipeline.runners
            own = [one for one in before if one not in built.values()]
            self.pipeline.use(joined(before, after) if is_new else own)
            self.plugins = plugins if is_new else earlier

        return Switch(switch, close_new=close_built)

    def release(self, oldest: int) -> None:
        """Close the processors that no request of a generation from `oldest` on uses."""
        runners = self.pipeline.runners
        unused = [one for one in runners if one.until is not None and one.until <= oldest]
        if unused:
            self.pipeline.use([one for one in runners if one not in unused])
            close_all([runner.processor for runner in unused])

    def close(self) -> None:
        """Close all processors."""
        close_all([runner.processor for runner in self.pipeline.runners])


def kept_names(before: Sequence[PluginEntry], after: Sequence[PluginEntry]) -> set[str]:
    """Return the names of the entries that stay the same, of which the order stays the same, too.

    Where the order of any two changes, all are built again: each runs in one place of a step.
    """
    both = [one for one in before if any(one.is_same(other) for other in after)]
    order = [one.name for one in after if any(one.is_same(other) for other in both)]
    return set(order) if order == [one.name for one in both] else set()


def joined(before: Sequence[T], after: Sequence[T]) -> list[T]:
    """Return runners of several generations in one order, in which each generation has its own.

    Args:
        before: in the order of all earlier generations.
        after: in the order of the next one; those that are in both stand in the same order.
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
