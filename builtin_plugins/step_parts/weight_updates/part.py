"""Online weight updates as a step part."""

from __future__ import annotations

from hardpoint.plugins import StepPart, WorkerHalf
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

from .engine_half import VersionedRequests


class WeightUpdates(StepPart):
    """Weights that programs replace while the engine serves, see `LLM.weights.update`.

    The worker halves read them while steps run. The engine's half lets all workers use the new
    weights between two steps, and adds the versions of tokens to outputs.
    """

    contract = 1
    fault_scope = "engine"

    def engine_half(self, context: EngineHalfContext) -> VersionedRequests:
        """Return the half that knows the version of each token."""
        return VersionedRequests(self.name, self.context.config, context)

    def worker_half(self, context: WorkerHalfContext) -> WorkerHalf | None:
        """Return the half that reads weights; None if there is no model."""
        loaded = context.loaded
        if loaded is None or loaded.loader is None or loaded.prepare_again is None:
            return None
        from .worker_half import WeightReader  # noqa: PLC0415 - most workers read no weights again

        return WeightReader(loaded.loader, loaded.prepare_again)
