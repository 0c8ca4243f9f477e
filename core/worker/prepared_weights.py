"""Other weights of a loaded model, which are read beside those that it runs with."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence

import msgspec
import torch

from hardpoint.boundary.errors import attribute_error
from hardpoint.core.weights.planned_model import PlannedModel, load_weights
from hardpoint.core.weights.updated_weights import UpdatedWeights
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.errors import size_text
from hardpoint.plugins import ModelError
from hardpoint.registry.blame import raise_unless_fault
from hardpoint.system.memory import is_out_of_memory
from hardpoint.system.weight_cache import WeightCache

_TRIAL_TOKENS = 2


class PreparedWeights:
    """The share of a rank of the model with other weights; a thread reads them, while steps run.

    Attributes:
        spec: spec of the worker with these weights.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        updates: Sequence[str],
        version: str,
        plan: Callable[[WorkerSpec], PlannedModel],
    ) -> None:
        """Begin.

        Args:
            spec: spec of the worker as it is.
            updates: as `load.updates`.
            version: of the weights.
            plan: builds the model without weights.
        """
        load = msgspec.structs.replace(spec.config.load, updates=tuple(updates), version=version)
        config = msgspec.structs.replace(spec.config, load=load)
        self.spec = dataclasses.replace(spec, config=config, progress=_report_nothing)
        self._plan = plan
        self._planned: PlannedModel | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hardpoint-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._planned = self._load()
        except BaseException as error:
            self._error = error

    def _load(self) -> PlannedModel:
        loader, updates = self.spec.loader, self.spec.config.load.updates
        base = loader.base if isinstance(loader, UpdatedWeights) else loader
        spec = dataclasses.replace(self.spec, loader=UpdatedWeights(base, updates))
        self.spec = spec
        planned = self._plan(spec)
        with contextlib.ExitStack() as undo:
            undo.callback(planned.model.close)
            with contextlib.closing(planned.quantized):
                _check_memory(planned)
                # No file of the cache for each of the many versions of a training.
                off = WeightCache(msgspec.structs.replace(spec.config.weight_cache, path="off"))
                load_weights(spec, planned, off, bool)
            with torch.inference_mode():
                tokens = min(_TRIAL_TOKENS, spec.max_model_len)
                planned.checked.run_trial(tokens, _TRIAL_TOKENS)
            undo.pop_all()
        return planned

    def result(self) -> PlannedModel | None:
        """Return the model; None while it is being read.

        Raises:
            HardpointError: the weights are not the model's or cannot be read, or memory is short.
        """
        if self._thread.is_alive():
            return None
        if (error := self._error) is None:
            return self._planned
        raise_unless_fault(error)
        if is_out_of_memory(error):
            raise ModelError(f"weights: memory is short: {error}") from error
        raise attribute_error(error, self.spec.plugins)

    def close(self) -> None:
        """Wait until the model is read, and forget it."""
        self._thread.join()
        if self._planned is not None:
            self._planned.model.close()
            self._planned = None


def _check_memory(planned: PlannedModel) -> None:
    """Check that there is memory for the weights beside those that the model runs with.

    Raises:
        ModelError: there is not.
    """
    needed, limit = planned.estimate.weights, planned.estimate.limit
    if needed > limit.available:
        raise ModelError(
            f"weights: {size_text(needed)} are needed beside those in use, "
            f"{size_text(limit.available)} are available ({limit.source})"
        )


def _report_nothing(what: str, done: int, total: int) -> None:
    """Show no progress: the model serves meanwhile."""
