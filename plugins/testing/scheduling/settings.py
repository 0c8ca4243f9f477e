"""Settings of a scheduler simulation, and the built-in plugins that go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.plugins import (
    PolicyContext,
    SchedulingPolicy,
    StepCost,
)
from hardpoint.plugins.kv_cache import KVCacheManager
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits
from hardpoint.testing.engine_access import EvictionFactory, create_kv_cache_manager, load_policy

from .rules import EVICTION

PolicySource = SchedulingPolicy | type[SchedulingPolicy] | Callable[[], SchedulingPolicy] | str
"""A policy, its class, a factory of one, or the name of an installed one."""


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings:
    """Settings of a SchedulerSimulator; the limits have the names of SchedulerLimits.

    Attributes:
        blocks: number of blocks of the KV cache.
        block_size: tokens per block.
        windows: attention window per KV cache group; None is unlimited.
        kv_cache: factory of the KV cache manager; None for the engine's own.
        max_model_len: None for the longest request that fits the cache.
        eviction: factory of the eviction policy, which gets the fields of its context; None
            evicts in the order of release.
        policy: a policy, its class, a factory of one, or the name of an installed one.
        uses_policy: False for a scheduler without a scheduling policy; policy calls are not
            checked.
        options: the scheduler's options, as an operator writes them.
        connector, grammars: whether the scheduler gets a ScriptedConnector and ScriptedGrammars.
        encoder_cache_tokens: size of the encoder cache; 0 for none.
        step_cost: cost of steps in the scheduler's context.
        vocab_size: number of token ids in scripted replies.
    """

    blocks: int = 16
    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    prefix_caching: bool = True
    eviction: EvictionFactory | None = None
    kv_cache: Callable[[SimulatorSettings], KVCacheManager] | None = None
    watermark: float = 0.0
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int | None = None
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0
    max_encoder_tokens: int = 0
    asynchronous: bool = False
    step_milliseconds: float = 0.0
    step_cost: StepCost = field(default_factory=StepCost)
    policy: PolicySource = "fcfs"
    uses_policy: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    connector: bool = False
    grammars: bool = False
    encoder_cache_tokens: int = 0
    log_stats: bool = False
    report_finished: bool = False
    vocab_size: int = 29

    def manager(self, clock: Callable[[], float]) -> KVCacheManager:
        """Return a new KV cache manager."""
        if self.kv_cache is not None:
            return self.kv_cache(self)
        return create_kv_cache_manager(
            self.blocks,
            self.block_size,
            windows=self.windows,
            prefix_caching=self.prefix_caching,
            eviction=self.eviction,
            clock=clock,
            fault=raise_eviction_fault,
        )

    def limits(self, kv_cache: KVCacheManager) -> SchedulerLimits:
        """Return the scheduler's limits."""
        longest = kv_cache.num_usable_blocks // len(self.windows) * self.block_size
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len or max(longest - self.num_lookahead_tokens, 2),
            chunked_prefill=self.chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_lookahead_tokens=self.num_lookahead_tokens,
            max_encoder_tokens=self.max_encoder_tokens,
            asynchronous=self.asynchronous,
            step_milliseconds=self.step_milliseconds,
        )


def make_policy(policy: PolicySource) -> SchedulingPolicy:
    """Return the policy that `policy` stands for.

    Raises:
        PluginError: no policy of that name is installed.
    """
    if isinstance(policy, SchedulingPolicy):
        return policy
    if isinstance(policy, str):
        return load_policy(policy)
    if isinstance(policy, type) and issubclass(policy, SchedulingPolicy):
        return policy(PolicyContext(name=policy.__name__, options=policy.Options()))
    created = policy()
    assert isinstance(created, SchedulingPolicy), f"{policy!r} creates no scheduling policy"
    return created


def raise_eviction_fault(message: str, cause: BaseException | None = None) -> None:
    """Raise a fault of an eviction policy as a violation.

    Raises:
        Violation: always.
    """
    suffix = f": {type(cause).__name__}: {cause}" if cause is not None else ""
    raise EVICTION.violation(message + suffix) from cause
