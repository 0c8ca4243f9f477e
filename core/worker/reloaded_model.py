"""A worker's model once more, with weights of another loader, which are read while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import msgspec
import torch

from hardpoint.core.weights.planned_model import PlannedModel, load_weights
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.errors import size_text
from hardpoint.host.boundary.errors import attribute_error, error_of, kind_of
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.system.memory import is_out_of_memory
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.plugins import ModelError, WeightLoader
from hardpoint.plugins.component.base import no_progress

_TRIAL = 2  # tokens and rows


class ReloadedModel:
    """The share of a rank of the model with other weights; see the contract's `PreparedModel`."""

    def __init__(
        self,
        spec: WorkerSpec,
        loader: Callable[[], WeightLoader],
        plan: Callable[[WorkerSpec], PlannedModel],
        use: Callable[[PlannedModel, WorkerSpec], None],
    ) -> None:
        """Read nothing yet.

        Args:
            plan: builds the model without weights.
            use: lets the worker run with the model, of which this is the spec then.
        """
        self._spec = dataclasses.replace(spec, progress=no_progress)
        self._loader, self._plan, self._use = loader, plan, use
        self._planned: PlannedModel | None = None

    def read(self) -> None:
        """Build the model, read its weights and try it; in any thread.

        Raises:
            ModelError: weights are missing or wrong, or memory is short.
            HardpointError: a plugin failed.
        """
        try:
            self._spec = dataclasses.replace(self._spec, loader=self._loader())
            self._planned = self._load(self._spec)
        except BaseException as error:
            raise_unless_fault(error)
            if is_out_of_memory(error):
                raise ModelError(f"weights: memory is short: {error}") from error
            named = attribute_error(error, self._spec.plugins)
            raise error_of(kind_of(named), str(named)) from error

    def _load(self, spec: WorkerSpec) -> PlannedModel:
        planned = self._plan(spec)
        with contextlib.ExitStack() as undo:
            undo.callback(planned.model.close)
            with contextlib.closing(planned.quantized):
                _check_memory(planned)
                # No file of the cache for each of the many versions of a training.
                off = WeightCache(msgspec.structs.replace(spec.config.weight_cache, path="off"))
                load_weights(spec, planned, off, bool)
            # Calls among ranks would mix with those of the steps that run.
            if (among := planned.model.context.parallel).tensor.size == among.engines.size == 1:
                with torch.inference_mode():
                    planned.checked.run_trial(min(_TRIAL, spec.max_model_len), _TRIAL)
            undo.pop_all()
        return planned

    def use(self) -> None:
        """Let the worker run with the model from the next step on."""
        planned, self._planned = self._planned, None
        assert planned is not None, "read() comes first"
        self._use(planned, self._spec)

    def close(self) -> None:
        """Release the model, unless it is in use."""
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.model.close()


def _check_memory(planned: PlannedModel) -> None:
    needed, limit = planned.estimate.weights, planned.estimate.limit
    if needed > limit.available:
        raise ModelError(
            f"weights: {size_text(needed)} are needed in addition to those in use, "
            f"{size_text(limit.available)} are available ({limit.source})"
        )
