"""A rank's share of a model, built without weights.

A worker builds it to load the weights into it; the model report, to add up the memory it needs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from hardpoint.errors import PluginConflictError, PluginFaultError, PluginNotFoundError, shown
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.host.boundary.checked_model import CheckedModel, checked_weights, is_quantized_weight
from hardpoint.host.boundary.guard import checked
from hardpoint.host.boundary.layers.groups import LayerGroups, group_layers
from hardpoint.host.boundary.layers.states import LayerStates, check_states_fit
from hardpoint.host.registry.blame import faults_as
from hardpoint.host.system.memory import (
    HeldWeight,
    MemoryEstimate,
    MemoryLimit,
    estimate_memory,
    trim_memory,
)
from hardpoint.host.system.weight_cache import WeightCache
from hardpoint.host.system.weight_key import cache_key
from hardpoint.plugins import (
    AttentionBackend,
    AttentionContext,
    HardpointError,
    Model,
    ModelContext,
    ModelError,
    Ops,
    OpsContext,
    QuantizationContext,
    WeightLoader,
)
from hardpoint.plugins.cache_memory import CacheMemory
from hardpoint.plugins.component import Source
from hardpoint.plugins.model.loader import WeightFormat
from hardpoint.plugins.parallel import Parallel
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.toolkit.updated_weights import UpdatedWeights

from .quantized_weights import QuantizedWeights, Scheme
from .shares import build_share
from .worker_spec import WorkerSpec

_log = logging.getLogger("hardpoint")

_READ = 4  # bytes of a number as it is read, before it is packed: float32
_DEQUANTIZED = 9  # the same, with its code, and factors of its groups for each column
_MADE = 9  # of one that is quantized while it is loaded: its numbers, and its codes
_EXPERTS = ".experts."  # in Hugging Face names
_HEAD = "lm_head."
_CODES = 3  # of a matrix that stays in codes: those of the whole product, a byte each, and a copy


@dataclass(frozen=True)
class PlannedModel:
    """A rank's share of a model, with weights that are not read yet.

    Attributes:
        model: the model built by the plugin.
        checked: the same, checked.
        attention: the backend with the layers' specs and groups.
        quantized: gives the model its quantized matrices; to be closed.
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
    activations = spec.config.quantization.activations
    return spec.plugins.create_for_device(
        "ops", OpsContext, device=spec.device, dtype=spec.dtype, activations=activations
    )


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
        cache_dtype=spec.config.kv_cache.dtype,
    )


def plan_model(
    spec: WorkerSpec,
    ops: Ops,
    backend: AttentionBackend,
    parallel: Parallel,
    limit: Callable[[], MemoryLimit],
) -> PlannedModel:
    """Build a rank's share of the model, and estimate its memory; no weight is read.

    Raises:
        ModelError: the model cannot be divided in this way, or its files store a weight in a way
            that cannot be read.
        ConfigError: something that is configured does not fit the model or its files.
        PluginFaultError: a plugin returned something else than it should.
    """
    entry = spec.plugins.get("models", spec.model_config.model_plugin)
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
    # What all stages have decides on the groups of the KV cache, and on what is quantized.
    whole = model if parallel.num_stages == 1 else create(parallel=Parallel())
    try:
        whole_checked = checked if whole is model else CheckedModel(whole, entry.source)
        groups, states = _layer_groups(spec, checked, whole_checked)
        source = spec.plugins.one("attention_backends").source
        attention = CheckedAttention(
            backend, source, checked.specs, groups, ops.rotate, states, sees_ahead=model.sees_ahead
        )
        quantized = QuantizedWeights(spec.config, model, checked.cuts, _schemes(spec), whole)
    finally:
        if whole is not model:
            whole.close()
    loader = spec.plugins.get("loaders", spec.loader.name).source
    try:
        if spec.model_config.quantization is not None:
            quantized.scheme(spec.model_config.quantization)
        weights = hold_weights(model, checked, spec.loader, loader, quantized)
        info, longest = attention.worker_info(), model.context.max_model_len
        request = CacheMemory.of_rank(spec.config, info, longest)
        estimate = estimate_memory(model, spec.config, weights, request, limit())
    except BaseException:
        quantized.close()
        raise
    return PlannedModel(model, checked, attention, quantized, weights, estimate)


def _layer_groups(
    spec: WorkerSpec, mine: CheckedModel, whole: CheckedModel
) -> tuple[LayerGroups, LayerStates | None]:
    """Return the KV cache groups of this rank's layers, and the states if any stage has some."""
    groups = LayerGroups.single(len(mine.specs))
    if spec.config.kv_cache.window_groups:
        size = spec.config.kv_cache.block_size
        groups = group_layers(mine.specs, whole.specs, spec.max_model_len, size)
    if not whole.states:
        return groups, None
    check_states_fit(spec.config, spec.num_draft_tokens, whole.source)
    states = LayerStates(mine.states, mine.source, spec.device)
    return groups.with_states(has_attention=bool(whole.specs)), states


def _schemes(spec: WorkerSpec) -> Callable[[str], Scheme]:
    described = spec.model_config.hf.get("quantization_config")

    def scheme(name: str) -> Scheme:
        entry = spec.plugins.find("quantizations", name, PluginConflictError)
        if entry is None:  # quantization.use was checked
            known = (item.name for item in spec.plugins.entries("quantizations"))
            raise PluginNotFoundError(
                f"the loader {spec.loader.name!r} reports storage in {name!r}, which is no enabled "
                f"quantization scheme{spec.plugins.hint(name, 'quantizations')}; "
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


@torch.inference_mode()
def load_weights(
    spec: WorkerSpec, planned: PlannedModel, cache: WeightCache, any_rank: Callable[[bool], bool]
) -> None:
    """Load the weights that an earlier process has packed, else the model's files.

    Args:
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
        _log.info("quantized weights: %s", description)
    trim_memory()
    if key is not None and _cache_key(spec, model) == key:  # the files are the same as before
        if spec.config.parallel.num_local > 1:
            cache.share(key, model, description)
            trim_memory()
        else:
            cache.save(key, model, description)
    elif spec.config.parallel.num_local > 1 and spec.place.rank == 0:
        _log.info("packed weights: not kept (weight_cache), so each engine has a copy of its own")


def _cache_key(spec: WorkerSpec, model: Model) -> str | None:
    if isinstance(spec.loader, UpdatedWeights):
        return None  # the next update replaces them
    entries = [
        spec.plugins.get("loaders", spec.loader.name),
        spec.plugins.get("models", spec.model_config.model_plugin),
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
        if not tensor.is_floating_point() or tensor.itemsize == 1:  # float8 has scales besides
            raise ModelError(
                f"model: weight {name!r} of {spec.config.model!r} has the dtype {tensor.dtype}, "
                f"expected a floating one of at least 16 bits"
            )
        spec.progress("Loading weights", len(shapes) - len(missing), len(shapes))
        yield name, tensor
    if missing:
        names = ", ".join(list(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"model: {spec.config.model!r} lacks {len(missing)} weights: {names}")


def hold_weights(
    model: Model,
    checked: CheckedModel,
    loader: WeightLoader,
    source: Source,
    quantized: QuantizedWeights,
) -> dict[str, HeldWeight]:
    """Return how each weight that a rank needs will be held, by Hugging Face name.

    Raises:
        ModelError: the files store a weight in a way that cannot be read.
        ConfigError: they lack the scheme that the configuration requires.
        PluginFaultError: the loader's `formats` raised something else, or gave something else.
    """
    formats = _formats(loader, source, quantized.whole_shapes)
    quantized.check_stored(formats)
    vocab, size = model.context.config.vocab_size, model.context.dtype.itemsize
    held = {}
    for name, shape in checked.needed.items():
        stored, count = formats.get(name), math.prod(shape)
        of = stored.name if stored is not None and stored.is_quantized else None
        scheme = wanted = quantized.scheme_of(name, of)
        is_vocabulary = checked.shapes[name][:1] == (vocab,)
        num_bytes = None
        if scheme is not None and _is_multiplied(model, quantized, scheme, name, is_vocabulary):
            num_bytes = quantized.stored_bytes(scheme, shape)
        if num_bytes is None:
            scheme, loading = None, _READ if of is wanted is None else _DEQUANTIZED
        else:
            loading = _CODES if scheme == of else _MADE
        held[name] = HeldWeight(
            stored,
            scheme,
            tuple(shape),
            count * size if num_bytes is None else num_bytes,
            count * loading,
            is_vocabulary,
        )
    return held | _copy_of_table(model, held)


def _is_multiplied(
    model: Model, quantized: QuantizedWeights, scheme: str, name: str, is_vocabulary: bool
) -> bool:
    if not quantized.scheme(scheme)[0].own_linear:
        return bool(model.context.ops.code_bits)
    return _EXPERTS not in name and (not is_vocabulary or name.startswith(_HEAD))


def _copy_of_table(model: Model, held: Mapping[str, HeldWeight]) -> dict[str, HeldWeight]:
    context, parallel = model.context, model.context.parallel
    tables = [(name, weight) for name, weight in held.items() if weight.is_vocabulary]
    if len(tables) != 1 or not (parallel.is_first and parallel.is_last):
        return {}
    ((name, table),) = tables
    row = torch.zeros(1, table.shape[1], device=context.device, dtype=context.dtype)
    if table.scheme is not None or context.ops.pack(row) is row:
        return {}
    return {name: dataclasses.replace(table, num_bytes=2 * table.num_bytes)}


def _formats(
    loader: WeightLoader, source: Source, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, WeightFormat]:
    """Return how the files store weights, as the loader reports it."""
    with faults_as(PluginFaultError, f"{source}: its formats()", passing=(HardpointError,)):
        formats = loader.formats(dict(shapes))
    checked(formats, WeightLoader, "formats()", source)
    for name, weight_format in formats.items():
        if not _is_format(weight_format):
            raise PluginFaultError(
                f"{source}: its formats() gave {shown(weight_format)} for {shown(name)}, expected "
                f"a WeightFormat with a name, a number of bytes, and None or a QuantizedWeight"
            )
    return formats


def _is_format(value: object) -> bool:
    return (
        isinstance(value, WeightFormat)
        and isinstance(value.name, str)
        and isinstance(value.num_bytes, int)
        and (value.stored is None or is_quantized_weight(value.stored))
    )
