"""Builds an engine core: policy, executor, KV cache and scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from hardpoint.core.kv_cache import BlockManager, BlockMetadata, CacheSize, Eviction, size_cache
from hardpoint.core.weights.shares import check_shares
from hardpoint.core.weights.worker_spec import WorkerSpec
from hardpoint.errors import PluginContractError, PluginFaultError, shown
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.boundary.faults import CALL_LOST, StepFaults
from hardpoint.host.boundary.kv_cache import KVEventFanout, open_publishers
from hardpoint.host.boundary.parts.components import Components, describe_fault
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.boundary.parts.opening import open_parts
from hardpoint.host.boundary.policy import PolicySlot
from hardpoint.host.registry.blame import close_if_failed
from hardpoint.host.registry.hooks import HookSet
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    EvictionContext,
    EvictionPolicy,
    Executor,
    ExecutorContext,
    Scheduler,
    SchedulerContext,
    StepRecord,
    WorkerInfo,
)
from hardpoint.plugins.cache_memory import block_needs, tightest
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.kv_cache import BlockNeeds, KVEvent
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.toolkit.kv_blocks import releases
from hardpoint.toolkit.step_cost import StepCostFit
from hardpoint.typed import read_only

from .core import Clock, EngineCore, EngineInputs, OpenInputs, RecordStep
from .pause import PauseController
from .prepare import limits_of, num_batches
from .step import EngineCoreParts
from .step_log import StepLog
from .worker_launch import WorkerLauncher

_log = logging.getLogger("hardpoint")


@dataclass(frozen=True)
class BuiltCore:
    """An engine core, the size of its KV cache, and the info common to all workers."""

    core: EngineCore
    size: CacheSize
    info: WorkerInfo


def build_core(
    spec: WorkerSpec,
    hooks: HookSet,
    config_sources: ConfigSources,
    clock: Clock,
    activity: Activity | None = None,
    vocabulary: Vocabulary | None = None,
    follow_cache: Callable[[Sequence[KVEvent]], None] | None = None,
    open_inputs: OpenInputs = EngineInputs,
) -> BuiltCore:
    """Load the model and build the engine core. If a part fails, the others are closed.

    Args:
        activity: records the engine's activity; None is in memory of this process.
        vocabulary: vocabulary of the tokenizer, for grammars.
        follow_cache: is called with the events of the KV cache, besides publishers.

    Raises:
        ConfigError: the KV cache does not fit; the message names the size that would.
        PluginError: a component could not be built.
    """
    inputs, plugins = open_inputs(spec), spec.plugins
    clock, activity = inputs.clock(clock), activity or Activity()
    activity.compares_settings = spec.config.debug.watch_plugins
    faults, fit = StepFaults.under(spec.config.plugins, activity), StepCostFit()
    with contextlib.ExitStack() as undo:
        # The plugins of the engine: one that cannot start fails before a model loads.
        policy = PolicySlot(plugins, faults, spec.model_config.vocab_size)
        close_if_failed(undo, policy.close)
        rank = spec.place.rank
        publishers = open_publishers(plugins, faults, rank)
        kv_events = KVEventFanout(publishers, time.time, rank, follow_cache)
        close_if_failed(undo, kv_events.close)
        blocks = BlockMetadata(clock)
        eviction_policy, eviction = _build_eviction(plugins, faults, blocks, clock)
        close_if_failed(undo, partial(close_all, [eviction_policy]))
        pause = PauseController(spec.loader)
        context = EngineHalfContext(
            components=Components(plugins, faults.calls),
            describe_fault=describe_fault,
            faults=faults,
            clock=clock,
            scheduler=str(plugins.one("schedulers").source),
            vocab_size=spec.model_config.vocab_size,
            vocabulary=vocabulary,
            block_size=spec.config.kv_cache.block_size,
            world_size=spec.config.parallel.world_size,
            block_hashes=lambda request, count: kv_cache.block_hashes(request, count),
            publish=kv_events.publish,
            retained=blocks.retained,
            step_cost=fit.current,
            border=pause,
        )
        step_parts = open_parts(plugins, spec.for_parts, context, faults)
        close_if_failed(undo, step_parts.close)
        spec = dataclasses.replace(spec, num_draft_tokens=step_parts.num_draft_tokens)

        launcher = WorkerLauncher(spec, config_sources, activity)
        close_if_failed(undo, launcher.close)
        executor = _build_executor(spec, launcher, step_parts, undo)
        step_parts.blocks.weights_load(spec.loader)
        info, size, config = _start_workers(executor, spec, config_sources, step_parts)
        launcher.close()

        needs, events = block_needs(config, info), kv_events.has_any
        kv_cache = _build_kv_cache(config, needs, size, step_parts, blocks, eviction, events=events)
        step_parts.blocks.start()
        scheduler = plugins.create(
            plugins.one("schedulers"),
            SchedulerContext,
            limits=_scheduler_limits(config, size, executor, step_parts),
            kv_cache=kv_cache,
            policy=policy.policy,
            policy_fault=policy.report_fault,
            clock=clock,
            watermark=config.kv_cache.watermark,
            step_cost=fit.current,
            gates=inputs.gates(step_parts.gates),
            transfers=inputs.transfers(step_parts.transfers),
            encoder_cache=step_parts.encoder_cache,
            record=inputs.recorder(_build_recorder(hooks, faults)),
            log_stats=config.stats.on,
        )

        model = plugins.get("models", spec.model_config.model_plugin)
        parts = EngineCoreParts(
            scheduler=scheduler,
            executor=executor,
            kv_cache=kv_cache,
            policy=policy,
            kv_events=kv_events,
            faults=faults,
            pause=pause,
            scheduler_label=str(plugins.one("schedulers").source),
            executor_label=str(plugins.one("executors").source),
            components=[eviction_policy],
            config=config,
            log_stats=config.stats.on,
            step_parts=step_parts,
            generates=plugins.target(model).generates,
            step_log=StepLog() if config.engine.log_steps else None,
            step_cost=fit if config.scheduler.step_milliseconds or spec.num_draft_tokens else None,
            sleep_levels=info.sleep_levels,
            idle_method=info.idle_method,
            activity=activity,
            without_overlap=spec.without_overlap,
        )
        core = inputs.core(parts)
        undo.pop_all()
        return BuiltCore(core, size, info)


def _build_eviction(
    plugins: PluginSet, faults: StepFaults, blocks: BlockMetadata, clock: Clock
) -> tuple[EvictionPolicy, Eviction]:
    entry = plugins.one("eviction_policies")
    history = blocks.start_history
    policy = plugins.create(entry, EvictionContext, blocks=blocks, history=history, clock=clock)
    calls = faults.calls("eviction_policies", entry.source)
    return policy, Eviction(policy, faults.reporter(entry.source), calls)


def _build_executor(
    spec: WorkerSpec, launcher: WorkerLauncher, parts: EngineHalves, undo: contextlib.ExitStack
) -> Executor:
    # Here, too, since it takes time to start workers.
    if spec.config.parallel.world_size > 1 or spec.place.engines is not None:
        check_shares(spec.plugins, spec.model_config, spec.dtype, spec.config.parallel)
    executor = spec.plugins.create(
        spec.plugins.one("executors"),
        ExecutorContext,
        parallel=spec.config.parallel,
        launch=launcher.launch,
        start_process=launcher.start_process,
        progress=spec.progress,
        watchdog_seconds=spec.config.engine.watchdog_seconds,
        watchdog_exits=spec.config.engine.watchdog_exits,
        num_batches=num_batches(spec.config),
        all_report=parts.moves_blocks is not None,
    )
    close_if_failed(undo, partial(close_all, [executor]))
    parts.calls.use(executor.collective_rpc)
    parts.blocks.use(executor, spec.config.weight_cache)
    _check_depth(executor, spec.config)
    entry = spec.plugins.one("schedulers")
    scheduler = spec.plugins.target(entry)
    if spec.num_draft_tokens and scheduler.update_drafts is Scheduler.update_drafts:
        drafting = f"it takes no drafts, which {parts.drafting} makes"
        raise ConfigError(f"{entry.source}: {drafting}: enable one of the two")
    releases.check_scheduler(parts.halves, scheduler, entry.source, spec.config)
    return executor


def _start_workers(
    executor: Executor, spec: WorkerSpec, config_sources: ConfigSources, parts: EngineHalves
) -> tuple[WorkerInfo, CacheSize, EngineConfig]:
    """Load the model and allocate the KV cache.

    Returns:
        The info of the tightest worker, the cache's size, and the configuration to run with.
    """
    info = _find_tightest(executor.start(), spec)
    if not info.has_cache and (moving := parts.moves_blocks) is not None:
        raise ConfigError(
            f"{moving} moves blocks of the KV cache, and the model {spec.config.model!r} has none"
        )
    config = spec.config if info.has_cache else _config_without_cache(spec)
    try:
        size = size_cache(config, spec.max_model_len, info)
    except ConfigError as error:
        raise ConfigError(config_sources.locate(str(error))) from None
    if size.max_model_len != spec.max_model_len:
        executor.collective_rpc("set_max_model_len", (size.max_model_len,))
    if size.num_states:
        executor.collective_rpc("set_num_states", (size.num_states,))
    executor.initialize_cache(size.num_blocks)
    parts.workers_started()
    replace = msgspec.structs.replace
    kv_cache = replace(config.kv_cache, num_blocks=size.num_blocks)
    return info, size, replace(config, max_model_len=size.max_model_len, kv_cache=kv_cache)


def _build_kv_cache(
    config: EngineConfig,
    needs: BlockNeeds,
    size: CacheSize,
    parts: EngineHalves,
    blocks: BlockMetadata,
    eviction: Eviction,
    *,
    events: bool,
) -> BlockManager:
    cache = config.kv_cache
    return BlockManager(
        size.num_blocks,
        cache.block_size,
        groups=needs.groups,
        num_states=size.num_states,
        max_step_tokens=needs.max_step_tokens,
        prefix_caching=cache.prefix_caching,
        drops_last_block=parts.num_lookahead_tokens > 0,
        hash_algorithm=cache.hash_algorithm,
        part_keys=parts.block_keys,
        eviction=eviction,
        metadata=blocks,
        events=events,
    )


def _find_tightest(infos: Sequence[WorkerInfo], spec: WorkerSpec) -> WorkerInfo:
    label = spec.plugins.one("executors").source
    world_size = spec.config.parallel.world_size
    if (
        not isinstance(infos, Sequence)
        or len(infos) != world_size
        or not all(isinstance(info, WorkerInfo) for info in infos)
    ):
        raise PluginFaultError(
            f"{label}: its start() gave {shown(infos)}, expected a list of {world_size} WorkerInfo"
        )
    if len(windows := {tuple(info.windows) for info in infos}) > 1:
        raise PluginFaultError(
            f"{label}: its start() gave workers with KV cache groups of the windows "
            f"{' and '.join(sorted(map(str, windows)))}, expected the same in all ranks"
        )
    idle_methods = {info.idle_method for info in infos}
    return dataclasses.replace(
        tightest(infos, spec.config.kv_cache.memory_bytes),
        sleep_levels=tuple(sorted(set.intersection(*(set(info.sleep_levels) for info in infos)))),
        idle_method=idle_methods.pop() if len(idle_methods) == 1 else None,
        process_id=max({i.process_id for i in infos} - {os.getpid()}, default=os.getpid()),
    )


def _config_without_cache(spec: WorkerSpec) -> EngineConfig:
    """Return the configuration for a model without a KV cache."""
    config, max_tokens = spec.config, spec.config.scheduler.max_num_batched_tokens
    if max_tokens < spec.max_model_len:
        raise ConfigError(
            f"model: {config.model!r} has no KV cache, so that a prompt is computed in one step: "
            f"scheduler.max_num_batched_tokens: expected at least max_model_len "
            f"({spec.max_model_len}), got {max_tokens}"
        )
    _log.warning(
        "the model %s has no KV cache: prompts are computed in one step each, without "
        "scheduler.chunked_prefill and kv_cache.prefix_caching",
        config.model,
    )
    replace = msgspec.structs.replace
    scheduler = replace(
        config.scheduler,
        chunked_prefill=False,
        long_prefill_token_threshold=0,
        step_milliseconds=0.0,
    )
    kv_cache = replace(config.kv_cache, prefix_caching=False)
    return replace(config, scheduler=scheduler, kv_cache=kv_cache)


def _check_depth(executor: Executor, config: EngineConfig) -> None:
    depth = executor.max_concurrent_batches
    if not 1 <= depth <= Executor.MAX_CONCURRENT_BATCHES:
        raise PluginContractError(
            f"executor {executor.name!r}: max_concurrent_batches: expected 1 to "
            f"{Executor.MAX_CONCURRENT_BATCHES}, got {depth}"
        )
    if depth == 1 and config.scheduler.asynchronous:
        raise ConfigError(
            f"scheduler.asynchronous: executor {executor.name!r} takes one step at a time, so that "
            'none can be planned ahead; "uniproc" and "multiproc" take two'
        )


def _scheduler_limits(
    config: EngineConfig, size: CacheSize, executor: Executor, parts: EngineHalves
) -> SchedulerLimits:
    # A stage gets the tokens of the last one with the next plan, so that none is made without them.
    # Ranks of one stage send them to each other, if asked to.
    parallel, depth = config.parallel, executor.max_concurrent_batches
    can_follow = parallel.world_size == 1 or bool(config.scheduler.asynchronous)
    ahead = depth > 1 and parallel.pipeline == 1 and can_follow
    return dataclasses.replace(
        limits_of(config, size.max_model_len),
        num_draft_tokens=parts.num_draft_tokens,
        num_lookahead_tokens=parts.num_lookahead_tokens,
        max_encoder_tokens=parts.max_encoder_tokens,
        asynchronous=ahead,
        num_batches=1 if ahead else depth,
    )


def _build_recorder(hooks: HookSet, faults: StepFaults) -> RecordStep | None:
    if not hooks.has("step_planned"):
        return None
    hooks.route(
        "step_planned",
        lambda source, call: faults.calls("hooks", source).bound(call.__name__, call),
    )

    def record(record: StepRecord) -> None:
        try:
            hooks.call("step_planned", record=read_only(record))
        except PluginFaultError as fault:
            faults.note("step_planned", str(fault), fault.__cause__, CALL_LOST)

    return record
