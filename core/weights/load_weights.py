"""Loads the weights of a planned model into it, from the weight cache or from the model's files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import torch

from hardpoint.boundary.checked_model import checked_weights
from hardpoint.plugins import Model, ModelError
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.system.memory import trim_memory

from .planned_model import PlannedModel
from .weight_cache import WeightCache
from .weight_key import cache_key
from .worker_spec import WorkerSpec

_log = logging.getLogger("hardpoint")


@torch.inference_mode()
def load_weights(
    spec: WorkerSpec, planned: PlannedModel, cache: WeightCache, any_rank: Callable[[bool], bool]
) -> None:
    """Load the weights that an earlier process has packed, else those of the model's files.

    Args:
        spec: spec of the worker.
        planned: the model.
        cache: cache of packed weights.
        any_rank: returns whether a flag is set in any of the ranks.

    Raises:
        ModelError: weights are missing, or of the wrong shape or dtype.
    """
    model, checked, quantized = planned.model, planned.checked, planned.quantized
    key = _cache_key(spec, model) if cache.is_on else None
    if key is not None and cache.load(key, model):
        any_rank(True)  # the others may ask; what was not used would not have been kept
        return
    loader = spec.plugins.get("loaders", spec.loader.name)
    weights = checked_weights(spec.loader, loader.source, checked.shapes, checked.cuts)
    model.load_weights(quantized.pass_on(_checked(weights, checked.needed, spec)))
    quantized.check_used(any_rank(quantized.is_used))
    description = quantized.describe()
    if spec.rank == 0 and description is not None:
        _log.info("matrices of few bits: %s", description)
    trim_memory()
    if key is not None and _cache_key(spec, model) == key:  # the files are the same as before
        cache.save(key, model, description)


def _cache_key(spec: WorkerSpec, model: Model) -> str | None:
    """Return the key of a model's packed weights; None if they are not kept."""
    entries = [
        spec.plugins.get("loaders", spec.loader.name),
        spec.plugins.get("models", spec.model_config.architecture),
        spec.plugins.one("ops"),
        *spec.plugins.entries("quantizations"),
    ]
    components = [(e, spec.plugins.target(e)) for entry in entries for e in entry.tree()]
    return cache_key(spec.loader, model, model.context.ops, spec.config.quantization, components)


def _checked(
    weights: Iterable[tuple[str, torch.Tensor | QuantizedWeight]],
    shapes: dict[str, tuple[int, ...]],
    spec: WorkerSpec,
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Yield the weights that the model needs, each once, after a check of a tensor's shape."""
    missing = dict(shapes)
    for name, tensor in weights:
        if (expected := missing.pop(name, None)) is None:
            continue
        if isinstance(tensor, QuantizedWeight):  # may be the whole of a part
            spec.progress("Loading weights", len(shapes) - len(missing), len(shapes))
            yield name, tensor
            continue
        if tuple(tensor.shape) != tuple(expected):
            raise ModelError(
                f"model: weight {name!r} of {spec.config.model!r} has shape "
                f"{tuple(tensor.shape)}, {spec.model_config.architecture} needs {tuple(expected)}"
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"model: weight {name!r} of {spec.config.model!r} has the dtype {tensor.dtype}, "
                f"expected a floating one"
            )
        spec.progress("Loading weights", len(shapes) - len(missing), len(shapes))
        yield name, tensor
    if missing:
        names = ", ".join(list(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"model: {spec.config.model!r} lacks {len(missing)} weights: {names}")
