"""Reports a model and the memory it would need, before its weights are read."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.kv_cache import size_cache
from hardpoint.core.weights.planned_model import PlannedModel, open_attention, open_ops, plan_model
from hardpoint.core.weights.shares import FirstRank, check_parallelism
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.host.system.memory import HeldWeight, MemoryLimit, memory_limit
from hardpoint.plugins import (
    AttentionBackend,
    ConfigError,
    EngineConfig,
    ModelError,
    Ops,
)
from hardpoint.plugins.commands import ContextMemory, ModelReport, WeightGroup
from hardpoint.plugins.component.base import no_progress
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.parallel import Parallel

__all__ = ["report_model"]

_USUAL_LENGTH = 4096


def report_model(
    config: EngineConfig, config_sources: ConfigSources, lengths: Sequence[int]
) -> ModelReport:
    """Return a report of the configured model and of the memory it would need.

    Args:
        config: names the model.
        config_sources: for messages.
        lengths: lengths of requests to compute the KV cache of; by default a usual and the longest.

    Raises:
        HardpointError: as opening the model does before its weights are read, but not for a lack
            of memory.
    """
    plugins = resolve_plugins(config, config_sources)
    spec = prepare_worker(config, plugins, config_sources, no_progress)
    entry = plugins.get("models", spec.model_config.model_plugin)
    check_parallelism(plugins.target(entry), entry.source, config.parallel)
    if not lengths:
        lengths = sorted({min(_USUAL_LENGTH, spec.max_model_len), spec.max_model_len})
    ops, backend = open_ops(spec), open_attention(spec)
    limit = _limit(spec)
    tensor, stages = FirstRank(config.parallel.tensor), config.parallel.pipeline
    engines = FirstRank(config.parallel.data if config.parallel.spreads_experts else 1)
    shares = list[PlannedModel]()
    try:
        for stage in range(stages):
            parallel = Parallel(tensor, stage, stages, config.parallel.expert, engines)
            shares.append(plan_model(spec, ops, backend, parallel, lambda: limit))
            shares[-1].quantized.close()
        return _report(spec, shares, lengths, ops, backend)
    finally:
        close_all([*(share.model for share in shares), backend, ops])


def _report(
    spec: WorkerSpec,
    shares: Sequence[PlannedModel],
    lengths: Sequence[int],
    ops: Ops,
    backend: AttentionBackend,
) -> ModelReport:
    """Return the report of all stages, by the first rank of each.

    Args:
        shares: the share of each stage.
    """
    config, model_config = spec.config, spec.model_config
    tightest = min(shares, key=lambda share: share.estimate.room - share.estimate.cache)
    estimate = tightest.estimate
    cache_bytes, problem = 0, _problem(tightest, config.model)
    longest = min(share.estimate.longest for share in shares)
    if not problem:
        cache_bytes, problem = _cache_bytes(tightest, spec)
    sizes = {n: s for share in shares for n, s in share.checked.shapes.items()}
    specs = [layer for share in shares for layer in share.checked.specs]
    return ModelReport(
        model=config.model,
        path=spec.loader.context.files.path,
        loader=spec.loader.name,
        architecture=model_config.architecture,
        provider=spec.plugins.get("models", model_config.model_plugin).source.package,
        device=str(spec.device),
        dtype=_dtype(spec),
        operations=ops.describe(),
        attention=backend.describe(),
        cache_dtype=config.kv_cache.dtype,
        num_params=sum(math.prod(shape) for shape in sizes.values()),
        weights=_groups(spec, shares),
        vocab_size=model_config.vocab_size,
        windows=[layer.window for layer in specs],
        num_state_layers=sum(len(share.checked.states) for share in shares),
        max_position_embeddings=model_config.max_position_embeddings,
        max_model_len=spec.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_ranks=config.parallel.world_size,
        weights_bytes=estimate.weights,
        loading_bytes=estimate.loading,
        step_bytes=estimate.step,
        cache_bytes=cache_bytes,
        contexts=[_context(tightest, config, length, longest) for length in lengths],
        available=estimate.limit.available,
        limit=estimate.limit.source,
        longest=longest,
        problem=problem,
        implementation=model_config.model_plugin,
        heads=[(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in specs],
        token_bytes=sum(map(backend.bytes_per_block, specs)) // config.kv_cache.block_size,
    )


def _limit(spec: WorkerSpec) -> MemoryLimit:
    limit, count = memory_limit(spec.device), spec.config.parallel.world_size
    if spec.device.type != "cpu" or count == 1:
        return limit
    return MemoryLimit(limit.available // count, f"{limit.source}, divided by {count} ranks")


def _problem(share: PlannedModel, model: str) -> str:
    try:
        share.estimate.check(model)
    except ModelError as error:
        return str(error)
    return ""


def _cache_bytes(share: PlannedModel, spec: WorkerSpec) -> tuple[int, str]:
    estimate, attention = share.estimate, share.attention
    rest = max(estimate.limit.available - estimate.weights - estimate.step, 0)
    info = dataclasses.replace(
        attention.worker_info(), available_bytes=rest, cache_share=estimate.share
    )
    try:
        size = size_cache(spec.config, spec.max_model_len, info)
    except ConfigError as error:
        return 0, str(error)
    return estimate.request.size(size.num_blocks), ""


def _context(share: PlannedModel, config: EngineConfig, length: int, longest: int) -> ContextMemory:
    request = share.estimate.request
    null = request.needs.num_null_blocks * request.bytes_per_block
    request_bytes = request.of(length)
    return ContextMemory(
        num_tokens=length,
        one_request=request_bytes,
        all_requests=(request_bytes - null) * config.scheduler.max_num_seqs + null,
        fits=length <= longest,
    )


def _groups(spec: WorkerSpec, shares: Sequence[PlannedModel]) -> list[WeightGroup]:
    """Return the weights by how they are stored and held, the most bytes first."""
    groups: dict[tuple[str | None, str], list[tuple[HeldWeight, int, bool]]] = defaultdict(list)
    seen = set[str]()
    for share in shares:
        for name, weight in share.weights.items():
            stored = None if weight.stored is None else weight.stored.name
            held = weight.scheme or _dtype(spec)
            count = math.prod(share.checked.shapes[name])
            groups[stored, held].append((weight, count, name not in seen))
            seen.add(name)
    listed = []
    for (stored, held), weights in groups.items():
        first = [(weight, count) for weight, count, is_new in weights if is_new]
        sizes = [weight.stored.num_bytes for weight, _ in first if weight.stored is not None]
        listed.append(
            WeightGroup(
                stored=stored,
                held=held,
                count=len(first),
                num_params=sum(count for _, count in first),
                stored_bytes=sum(sizes) if stored is not None else None,
                held_bytes=sum(weight.num_bytes for weight, _, _ in weights)
                * spec.config.parallel.tensor,
            )
        )
    return sorted(listed, key=lambda group: -group.held_bytes)


def _dtype(spec: WorkerSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")
