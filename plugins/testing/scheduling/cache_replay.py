"""Prompts in the engine's KV cache, to compare the hit rates of eviction policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hardpoint import typed
from hardpoint.plugins import (
    EngineCoreRequest,
    EvictionContext,
    EvictionPolicy,
    Request,
    RequestStatus,
    SamplingParams,
)
from hardpoint.testing.engine_access import create_kv_cache_manager, plugin_name
from hardpoint.testing.scripted import ScriptedClock

from .settings import raise_eviction_fault


def measure_hit_rate(
    eviction: type[EvictionPolicy],
    prompts: Iterable[Sequence[int]],
    *,
    num_blocks: int,
    block_size: int = 16,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Return the share of tokens that requests find in the KV cache, which runs without a model.

    The requests run one after the other, one per second of the policy's clock.

    Args:
        eviction: the policy's class.
        prompts: token ids of each request; the reply of a turn is part of the next one's prompt.
        num_blocks: number of blocks of the cache; each prompt has to fit.
        block_size: tokens per block.
        options: options of the policy, as an operator writes them.

    Raises:
        Violation: the policy raised, or evicted a block that is not a candidate.
        ValueError: a prompt does not fit.
    """
    name, clock = plugin_name(eviction), ScriptedClock(now=100.0)
    path = f"plugin.{name}"
    converted = typed.convert(dict(options or {}), eviction.Options, path=path, str_keys=True)

    def create(**fields: Any) -> EvictionPolicy:
        return eviction(EvictionContext(name=name, options=converted, **fields))

    cache = create_kv_cache_manager(
        num_blocks,
        block_size,
        windows=(None,),
        prefix_caching=True,
        eviction=create,
        clock=clock,
        fault=raise_eviction_fault,
    )
    params = SamplingParams()
    for number, tokens in enumerate(prompts):
        request = Request(
            EngineCoreRequest(request_id=str(number), prompt_token_ids=list(tokens), params=params)
        )
        prefix = cache.lookup(request)
        if not cache.admit(request, prefix, len(tokens) - prefix.num_tokens):
            raise ValueError(f"prompt {number} has {len(tokens)} tokens and does not fit")
        clock.advance(1.0)
        request.status = RequestStatus.FINISHED
        cache.free(request)
    stats = cache.stats()
    return stats.hit_tokens / max(1, stats.queried_tokens)
