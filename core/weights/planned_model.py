"""A rank's share of a model, built without weights.

A worker builds it to load the weights into it; the model report, to add up the memory it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hardpoint.boundary.checked_attention import CheckedAttention
from hardpoint.boundary.checked_model import CheckedModel
from hardpoint.boundary.layer_groups import LayerGroups, group_layers
from hardpoint.errors import PluginNotFoundError
from hardpoint.plugins import (
    AttentionBackend,
    AttentionContext,
    KVSpec,
    Model,
    ModelContext,
    Ops,
    OpsContext,
    QuantizationContext,
)
from hardpoint.plugins.parallel import Parallel
from hardpoint.system.memory import HeldWeight, MemoryEstimate, MemoryLimit, estimate_memory

from .held_weights import hold_weights
from .quantized_weights import QuantizedWeights, Scheme
from .shares import build_share
from .worker_spec import WorkerSpec


@dataclass(frozen=True)
class PlannedModel:
    """A rank's share of a model, whose weights are not read yet.

    Attributes:
        model: what the plugin built.
        checked: the same, checked.
        attention: the backend with the layers' specs and groups.
        quantized: what is to give the model its matrices of few bits; to be closed.
        weights: how each weight is held in memory, by Hugging Face name.
        estimate: estimate of the memory that all of it needs.
    """

    model: Model
    checked: CheckedModel
    attention: CheckedAttention
    quantized: QuantizedWeights
    weights: Mapping[str, HeldWeight]
    estimate: MemoryEstimate


def open_ops(spec: WorkerSpec) -> Ops:
    """Return the operations.

    Raises:
        ModelError: they do not run on the device.
    """
    return spec.plugins.create_for_device("ops", OpsContext, device=spec.device, dtype=spec.dtype)


def open_attention(spec: WorkerSpec) -> AttentionBackend:
    """Return the attention backend.

    Raises:
        ModelError: it does not run on the device.
    """
    return spec.plugins.create_for_device(
        "attention_backends",
        AttentionContext,
        device=spec.device,
        dtype=spec.dtype,
        block_size=spec.config.kv_cache.block_size,
    )


def plan_model(
    spec: WorkerSpec,
    ops: Ops,
    backend: AttentionBackend,
    parallel: Parallel,
    limit: Callable[[], MemoryLimit],
) -> PlannedModel:
    """Build a rank's share of the model, and estimate its memory; no weight is read.

    Args:
        spec: spec of the worker.
        ops: operations of the model's layers.
        backend: backend of attention.
        parallel: the share.
        limit: returns what may be allocated.

    Raises:
        ModelError: the model cannot be divided in this way, or its files store a weight in a way
            that cannot be read.
        ConfigError: the quantisation that is configured does not fit the model or its files.
        PluginFaultError: a plugin returned something else than it should.
    """
    entry = spec.plugins.get("models", spec.model_config.architecture)
    create = functools.partial(
        spec.plugins.create,
        entry,
        ModelContext,
        config=spec.model_config,
        dtype=spec.dtype,
        device=spec.device,
        max_model_len=spec.max_model_len,
        ops=ops,
    )
    model: Model = build_share(lambda share: create(parallel=share), parallel)
    checked = CheckedModel(model, entry.source)
    # What all stages have decides on the groups of the KV cache, and on what is quantised.
    whole = model if parallel.num_stages == 1 else create(parallel=Parallel())
    try:
        specs = checked.specs if whole is model else CheckedModel(whole, entry.source).specs
        groups = _layer_groups(spec, checked.specs, specs)
        source = spec.plugins.one("attention_backends").source
        attention = CheckedAttention(backend, source, checked.specs, groups, ops.rotate)
        quantized = QuantizedWeights(spec.config, model, checked.cuts, _schemes(spec), whole)
    finally:
        if whole is not model:
            whole.close()
    loader = spec.plugins.get("loaders", spec.loader.name).source
    try:
        weights = hold_weights(model, checked, spec.loader, loader, quantized)
        estimate = estimate_memory(
            model, spec.config, weights, attention.bytes_per_block, attention.groups, limit()
        )
    except BaseException:
        quantized.close()
        raise
    return PlannedModel(model, checked, attention, quantized, weights, estimate)


def _layer_groups(
    spec: WorkerSpec, specs: Sequence[KVSpec], whole: Sequence[KVSpec]
) -> LayerGroups:
    """Return the KV cache groups of this rank's layers.

    Args:
        spec: spec of the worker.
        specs: specs of this rank's layers.
        whole: specs of the layers of all stages.
    """
    if not spec.config.kv_cache.window_groups:
        return LayerGroups.single(len(specs))
    return group_layers(specs, whole, spec.max_model_len, spec.config.kv_cache.block_size)


def _schemes(spec: WorkerSpec) -> Callable[[str], Scheme]:
    """Return a function that builds the quantisation schemes of a checkpoint."""
    described = spec.model_config.hf.get("quantization_config")

    def scheme(name: str) -> Scheme:
        entry = spec.plugins.find("quantizations", name)
        if entry is None:  # quantization.use was checked
            known = (item.name for item in spec.plugins.entries("quantizations"))
            raise PluginNotFoundError(
                f"the loader {spec.loader.name!r} says that it is stored in {name!r}, which is no "
                f"quantisation scheme that is enabled{spec.plugins.hint(name, 'quantizations')}; "
                f"enabled: {', '.join(sorted(known)) or 'none'}"
            )
        is_its_own = name == spec.model_config.quantization and isinstance(described, Mapping)
        component = spec.plugins.create(
            entry,
            QuantizationContext,
            device=spec.device,
            dtype=spec.dtype,
            config=described if is_its_own else {},
        )
        return component, entry.source

    return scheme
