"""Other weights of a loaded model, which are read while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from threading import Lock, Thread

import msgspec
import torch

from hardpoint.core.weights.planned_model import PlannedModel, load_weights
from hardpoint.core.weights.updated_weights import UpdatedWeights
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.errors import size_text
from hardpoint.host.boundary.errors import attribute_error, kind_of
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.system.memory import is_out_of_memory
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.plugins import ModelError
from hardpoint.plugins.component.base import no_progress

_TRIAL = 2  # tokens and rows


class PreparedWeights:
    """The share of a rank of the model with other weights; a thread reads them, while steps run.

    Attributes:
        spec: spec of the worker with these weights.
        planned: the model, once it is read.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        updates: Sequence[str],
        version: str,
        plan: Callable[[WorkerSpec], PlannedModel],
        earlier: PreparedWeights | None,
    ) -> None:
        """Begin.

        Args:
            spec: spec of the worker as it is.
            updates: as `load.updates`.
            version: as `load.version`.
            plan: builds the model without weights.
            earlier: those that were given up; they may be read still, and this waits for them.
        """
        load = msgspec.structs.replace(spec.config.load, updates=tuple(updates), version=version)
        config = msgspec.structs.replace(spec.config, load=load)
        self.spec = dataclasses.replace(spec, config=config, progress=no_progress)
        self._plan, self._lock, self._is_given_up = plan, Lock(), False
        self.planned: PlannedModel | None = None
        self._error: BaseException | None = None
        self._thread = Thread(
            target=self._run, args=[earlier], name="hardpoint-weights", daemon=True
        )
        self._thread.start()

    def _run(self, earlier: PreparedWeights | None) -> None:
        try:
            if earlier is not None:
                earlier.close()
            if not self._is_given_up:
                self.planned = self._load()
        except BaseException as error:
            self._error = error
        if self._is_given_up:
            self.give_up()

    def _load(self) -> PlannedModel:
        loader, updates = self.spec.loader, self.spec.config.load.updates
        base = loader.base if isinstance(loader, UpdatedWeights) else loader
        self.spec = spec = dataclasses.replace(self.spec, loader=UpdatedWeights(base, updates))
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

    @property
    def state(self) -> tuple[bool, str | None, str]:
        """Whether the model is read, and kind and text of the error if it cannot be."""
        if self._thread.is_alive():
            return False, None, ""
        if (error := self._error) is None:
            return True, None, ""
        raise_unless_fault(error)
        if is_out_of_memory(error):
            error = ModelError(f"weights: memory is short: {error}")
        named = attribute_error(error, self.spec.plugins)
        return False, kind_of(named), str(named)

    def give_up(self) -> None:
        """Forget the model, now or once it is read; wait for nothing."""
        self._is_given_up, self._error = True, None
        with self._lock:  # the thread may have come to its end just now
            planned, self.planned = self.planned, None
        if planned is not None:
            planned.model.close()

    def close(self) -> None:
        """Give up, and wait until nothing is read."""
        self.give_up()
        self._thread.join()


def _check_memory(planned: PlannedModel) -> None:
    """Check that there is memory for the weights in addition to those in use.

    Raises:
        ModelError: there is not.
    """
    needed, limit = planned.estimate.weights, planned.estimate.limit
    if needed > limit.available:
        raise ModelError(
            f"weights: {size_text(needed)} are needed in addition to those in use, "
            f"{size_text(limit.available)} are available ({limit.source})"
        )
