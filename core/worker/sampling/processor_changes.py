"""Live changes of the logits processors: those of two generations run side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hardpoint.boundary.activity import Activity
from hardpoint.boundary.errors import close_all
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.live.change import Change, Prepared
from hardpoint.live.engine import WorkerChanges
from hardpoint.live.settings import is_same
from hardpoint.plugins import Ops
from hardpoint.plugins.manifest import PluginEntry
from hardpoint.registry.plugin_set import PluginSet

from .pipeline import LogitsPipeline
from .processor_runner import ProcessorRunner
from .sampling_stage import SamplingStage, open_runner

_KIND = "logits_processors"


class StageChanges(WorkerChanges):
    """The live changes of a worker: those of its logits processors."""

    def __init__(self) -> None:
        """Begin without a model."""
        super().__init__()
        self._processors: ProcessorChanges | None = None
        self._plugins: PluginSet | None = None

    def open(
        self, stage: SamplingStage | None, spec: WorkerSpec, ops: Ops, activity: Activity
    ) -> None:
        """Change the processors of a stage; a rank that does not sample has none."""
        if stage is None:
            self.take([])
            return
        self._processors = ProcessorChanges(stage.pipeline, spec, ops, activity)
        self.take([self._processors])

    def latest(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec of a worker with the latest plugins, to load the model again."""
        plugins = self._plugins
        return spec if plugins is None else dataclasses.replace(spec, plugins=plugins)

    def close(self) -> None:
        """Close the processors; the model is released."""
        processors, self._processors = self._processors, None
        self.take(None)
        if processors is not None:
            self._plugins = processors.spec.plugins
            close_all([runner.processor for runner in processors.pipeline.runners])


class ProcessorChanges:
    """Replaces the logits processors of a pipeline by live changes; a `WorkerSlot`.

    Requests use the processors of the generation that they were admitted with. One that stays the
    same, and runs in the same order, serves several generations.
    """

    def __init__(
        self, pipeline: LogitsPipeline, spec: WorkerSpec, ops: Ops, activity: Activity
    ) -> None:
        """Replace the processors of a pipeline.

        Args:
            pipeline: has those of the plugins of `spec`.
            spec: spec of the worker.
            ops: operations of the model.
            activity: records the methods of plugins that run.
        """
        self.pipeline, self.spec = pipeline, spec
        self._ops, self._activity = ops, activity

    def prepare(self, change: Change, plugins: PluginSet) -> Prepared | None:
        """Build the processors that are new.

        Raises:
            PluginError: one cannot be built, or does not work together with speculation.
        """
        spec = dataclasses.replace(self.spec, plugins=plugins, config=change.config)
        before = self.spec.plugins.entries(_KIND)
        kept = kept_entries(before, plugins.entries(_KIND))
        generation = change.manifest.generation
        runners: list[ProcessorRunner] = []
        current = {one.name: one for one in self.pipeline.runners if one.until is None}
        built: list[ProcessorRunner] = []
        try:
            for entry in plugins.entries(_KIND):
                if entry.name in kept:
                    runners.append(current[entry.name])
                    continue
                built.append(open_runner(spec, entry, self._ops, self._activity, generation))
                runners.append(built[-1])
                if self.spec.num_draft_tokens:
                    LogitsPipeline([built[-1]], self.spec.device).check_drafts()
        except BaseException:
            close_all([runner.processor for runner in built])
            raise
        gone = [one for one in current.values() if one not in runners]
        return _PreparedProcessors(self, runners, built, gone, plugins, generation)

    def release(self, oldest: int) -> None:
        """Close the processors that no request of a generation from `oldest` on uses."""
        unused = [
            one for one in self.pipeline.runners if one.until is not None and one.until <= oldest
        ]
        if unused:
            self.pipeline.use([one for one in self.pipeline.runners if one not in unused])
            close_all([runner.processor for runner in unused])


class _PreparedProcessors(Prepared):
    def __init__(
        self,
        slot: ProcessorChanges,
        runners: Sequence[ProcessorRunner],
        built: Sequence[ProcessorRunner],
        gone: Sequence[ProcessorRunner],
        plugins: PluginSet,
        generation: int,
    ) -> None:
        self._slot, self._new, self._built, self._gone = slot, runners, built, gone
        self._plugins, self._generation = plugins, generation
        self._before: tuple[Sequence[ProcessorRunner], WorkerSpec] | None = None

    def commit(self) -> None:
        slot = self._slot
        self._before = slot.pipeline.runners, slot.spec
        for runner in self._gone:
            runner.until = self._generation
        slot.pipeline.use(joined(slot.pipeline.runners, self._new))
        slot.spec = dataclasses.replace(slot.spec, plugins=self._plugins)

    def undo(self) -> None:
        if self._before is not None:
            runners, self._slot.spec = self._before
            for runner in self._gone:
                runner.until = None
            self._slot.pipeline.use(runners)
        close_all([runner.processor for runner in self._built])


def kept_entries(before: Sequence[PluginEntry], after: Sequence[PluginEntry]) -> set[str]:
    """Return the names of the entries that stay the same, of which the order stays the same, too.

    Where the order of any two changes, all are built again: each runs in one place of a step.
    """
    both = [one for one in before if any(is_same(one, other) for other in after)]
    order = [one.name for one in after if any(is_same(one, other) for other in both)]
    return set(order) if order == [one.name for one in both] else set()


def joined(
    before: Sequence[ProcessorRunner], after: Sequence[ProcessorRunner]
) -> list[ProcessorRunner]:
    """Return runners of several generations in one order, in which each generation has its own.

    Args:
        before: in the order of all earlier generations.
        after: in the order of the next one; those that are in both stand in the same order.
    """
    result: list[ProcessorRunner] = []
    rest = list(before)
    for runner in after:
        if runner in rest:
            place = rest.index(runner) + 1
            result += rest[:place]
            rest = rest[place:]
        else:
            result.append(runner)
    return result + rest
