"""Building the engine core: executor, KV cache, scheduler and what they call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    EvictionContext,
    EvictionPolicy,
    Executor,
    ExecutorContext,
    KVEventPublisher,
    Origins,
    PluginFaultError,
    PluginSet,
    PublisherContext,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
    StepRecord,
)
from hardpoint.plugins.hook_set import HookSet

from .engine import EngineCore, EngineCoreParts
from .kv_cache import BlockManager, CacheSize, size_cache
from .kv_events import KVEventFanout
from .policy_slot import PolicySlot
from .step_faults import StepFaults
from .worker.worker import LocalWorker, WorkerSpec

__all__ = ["BuiltCore", "build_core", "limits_of"]

_Clock = Callable[[], float]


@dataclass(frozen=True)
class BuiltCore:
    """An engine core, and what was found out while it was built."""

    core: EngineCore
    size: CacheSize


def limits_of(
    config: EngineConfig, max_model_len: int, *, asynchronous: bool = False
) -> SchedulerLimits:
    """Return what no step may exceed.

    Args:
        config: what was asked for.
        max_model_len: resolved.
        asynchronous: whether steps are planned before the results of earlier ones are in.

    Raises:
        ConfigError: limits that cannot work together.
    """
    scheduler = config.scheduler
    return SchedulerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        chunked_prefill=scheduler.chunked_prefill,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        max_waiting=scheduler.max_waiting,
        asynchronous=asynchronous,
    )


def build_core(spec: WorkerSpec, hooks: HookSet, origins: Origins, clock: _Clock) -> BuiltCore:
    """Load the model and build everything around it. What was built is closed if a part fails.

    Raises:
        ConfigError: the KV cache does not fit; the message says what would.
        PluginError: a component could not be built.
    """
    config, plugins = spec.config, spec.plugins
    on_error = config.plugins.on_error
    faults = StepFaults([name for name, scope in on_error.items() if scope == "engine"])
    with contextlib.ExitStack() as undo:
        policy = PolicySlot(plugins, faults)
        undo.callback(policy.close)
        kv_events = _kv_events(plugins, faults)
        undo.callback(kv_events.close)
        eviction: EvictionPolicy = plugins.create(plugins.one("eviction_policies"), EvictionContext)
        undo.callback(eviction.close)
        executor: Executor = plugins.create(
            plugins.one("executors"),
            ExecutorContext,
            create_worker=lambda _rank: LocalWorker(spec),
        )
        undo.callback(executor.close)
        size = _start(executor, spec, origins)
        kv_cache = BlockManager(
            size.num_blocks,
            config.kv_cache.block_size,
            prefix_caching=config.kv_cache.prefix_caching,
            hash_algorithm=config.kv_cache.hash_algorithm,
            eviction=eviction,
            fault=faults.reporter(plugins.one("eviction_policies").source),
            events=bool(plugins.entries("kv_event_publishers")),
        )
        scheduler: Scheduler = plugins.create(
            plugins.one("schedulers"),
            SchedulerContext,
            limits=limits_of(
                config, size.max_model_len, asynchronous=executor.max_concurrent_batches > 1
            ),
            kv_cache=kv_cache,
            policy=policy.policy,
            clock=clock,
            watermark=config.kv_cache.watermark,
            policy_fault=lambda words: policy.report(words, None),
            record=_recorder(hooks, faults),
        )
        parts = EngineCoreParts(
            scheduler, executor, kv_cache, policy, kv_events, faults, [eviction], config
        )
        undo.pop_all()
        return BuiltCore(EngineCore(parts), size)


def _start(executor: Executor, spec: WorkerSpec, origins: Origins) -> CacheSize:
    """Load the model and allocate the KV cache."""
    info = executor.start()
    try:
        size = size_cache(spec.config, spec.max_model_len, info)
    except ConfigError as error:
        raise ConfigError(origins.locate(str(error))) from None
    if size.max_model_len != spec.max_model_len:
        executor.collective_rpc("set_max_model_len", (size.max_model_len,))
    executor.initialize_cache(size.num_blocks)
    return size


def _kv_events(plugins: PluginSet, faults: StepFaults) -> KVEventFanout:
    publishers: list[KVEventPublisher] = []
    reporters = []
    try:
        for entry in plugins.entries("kv_event_publishers"):
            publishers.append(plugins.create(entry, PublisherContext))
            reporters.append(faults.reporter(entry.source))
    except BaseException:
        for publisher in publishers:
            publisher.close()
        raise
    return KVEventFanout(list(zip(publishers, reporters, strict=True)), time.time)


def _recorder(hooks: HookSet, faults: StepFaults) -> Callable[[StepRecord], None] | None:
    """Return what takes step records; None if no hook wants them."""
    if not hooks.has("step_planned"):
        return None

    def record(record: StepRecord) -> None:
        try:
            hooks.call("step_planned", record=record)
        except PluginFaultError as fault:
            faults.note("step_planned", str(fault), fault.__cause__)

    return record
