"""How a scheduler is set up for a rig, and finding the built-in plugins that go with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins import (
    EngineConfig,
    EvictionPolicy,
    PolicyContext,
    Scheduler,
    SchedulingPolicy,
    typed,
)
from hardpoint.plugins.kv_cache import KVCacheGroup, KVCacheManager
from hardpoint.plugins.scheduler import SchedulerLimits
from hardpoint.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.testing.scheduling.checks.names import EVICTION

PolicySource = SchedulingPolicy | type[SchedulingPolicy] | Callable[[], SchedulingPolicy] | str
"""A policy, its class, what makes one, or the name of an installed one."""


@dataclass(frozen=True, kw_only=True)
class RigSettings:
    """What a SchedulerRig is built with; the limits are those of SchedulerLimits.

    Attributes:
        blocks: of the KV cache.
        block_size: tokens of a block.
        windows: one entry per KV cache group.
        kv_cache: makes the KV cache manager; None makes the engine's own.
        max_model_len: None is the longest that the cache has room for.
        eviction: makes the eviction policy; None is the order of release.
        policy: one, a class of one, what makes one, or the name of an installed one.
        asks_policy: whether the scheduler asks one at all; if not, nobody checks what it tells it.
        options: the scheduler's, as an operator writes them.
        connector, grammars: whether there is a ScriptedConnector, and ScriptedGrammars.
        encoder_cache_tokens: room for embeddings; 0 is no encoder cache.
        vocab_size: of the scripted reply.
    """

    blocks: int = 16
    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    prefix_caching: bool = True
    eviction: Callable[[], EvictionPolicy] | None = None
    kv_cache: Callable[[RigSettings], KVCacheManager] | None = None
    watermark: float = 0.0
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int | None = None
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_waiting: int | None = None
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0
    max_loras: int = 0
    max_encoder_tokens: int = 0
    asynchronous: bool = False
    policy: PolicySource = "fcfs"
    asks_policy: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    connector: bool = False
    grammars: bool = False
    encoder_cache_tokens: int = 0
    log_stats: bool = False
    report_finished: bool = False
    vocab_size: int = 29

    def manager(self) -> KVCacheManager:
        """Return a new KV cache manager."""
        if self.kv_cache is not None:
            return self.kv_cache(self)
        return BlockManager(
            self.blocks,
            self.block_size,
            groups=tuple(KVCacheGroup(window=window) for window in self.windows),
            prefix_caching=self.prefix_caching,
            eviction=self.eviction() if self.eviction else None,
            fault=_raise_fault,
        )

    def limits(self, kv_cache: KVCacheManager) -> SchedulerLimits:
        """Return what no step may exceed."""
        longest = kv_cache.num_usable_blocks // len(self.windows) * self.block_size
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len or max(longest - self.num_lookahead_tokens, 2),
            chunked_prefill=self.chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_waiting=self.max_waiting,
            num_draft_tokens=self.num_draft_tokens,
            num_lookahead_tokens=self.num_lookahead_tokens,
            max_loras=self.max_loras,
            max_encoder_tokens=self.max_encoder_tokens,
            asynchronous=self.asynchronous,
        )


def make_policy(policy: PolicySource) -> SchedulingPolicy:
    """Return a policy, given one, its class, what makes it, or its name.

    Raises:
        PluginError: there is none of that name.
    """
    if isinstance(policy, SchedulingPolicy):
        return policy
    if isinstance(policy, str):
        plugins = _plugins("default", policy)
        return plugins.create(plugins.one("scheduling_policies"), PolicyContext)
    if isinstance(policy, type) and issubclass(policy, SchedulingPolicy):
        return policy(PolicyContext(name=policy.__name__, options=policy.Options()))
    made = policy()
    assert isinstance(made, SchedulingPolicy), f"{policy!r} makes no scheduling policy"
    return made


def builtin_scheduler(name: str = "default") -> type[Scheduler]:
    """Return a scheduler's class by its entry-point name."""
    plugins = _plugins(name, "fcfs")
    cls: type[Scheduler] = plugins.target(plugins.one("schedulers"))
    return cls


def _raise_fault(words: str, cause: BaseException | None = None) -> None:
    blame = f": {type(cause).__name__}: {cause}" if cause is not None else ""
    raise EVICTION.broken(words + blame) from cause


@functools.cache
def _plugins(scheduler: str, policy: str) -> PluginSet:
    tree = {"scheduler": {"use": scheduler, "policy": policy}}
    return resolve_plugins(typed.convert(tree, EngineConfig, path=""))
