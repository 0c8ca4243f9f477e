"""The metrics of the Prometheus sink: their names, and the figures that they show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .figures import EngineFigures, Histogram, PluginFigures

OWN = "hardpoint"
"""Prefix of all names; an alias is another prefix."""

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By sleep level."""

_LABELS = ("model_name", "engine")

Series = Mapping[str, Any]
"""Values by the value of a family's own label."""


@dataclass(frozen=True)
class Family:
    """A metric with the names and labels that vLLM gives it, after its own prefix.

    Attributes:
        name: without the prefix, and without `_total` of a counter.
        kind: class of its Prometheus family.
        help: description of its count.
        read: returns its value of an engine, or one per value of `label`.
        label: in addition to the labels of all.
    """

    name: str
    kind: type[Any]
    help: str
    read: Callable[[EngineFigures], Any]
    label: str | None = None


def _tier_totals(engine: EngineFigures, *, name: str) -> Series:
    return engine.tiers.totals(name)


def _tier_used_bytes(engine: EngineFigures) -> Series:
    return engine.tiers.used_bytes


_G, _C, _H = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily

ENGINE_FAMILIES = (
    Family("num_requests_running", _G, "Requests that run.", lambda e: e.scheduler.num_running),
    Family("num_requests_waiting", _G, "Requests that wait.", lambda e: e.scheduler.num_waiting),
    Family(
        "num_requests_waiting_by_reason",
        _G,
        "Requests that wait for room (capacity), or for a grammar or KV blocks from another place "
        "(deferred).",
        lambda e: _waiting(e),
        "reason",
    ),
    Family(
        "kv_cache_usage_perc",
        _G,
        "Share of the KV cache blocks that requests use, from 0 to 1.",
        lambda e: e.scheduler.kv_cache_usage,
    ),
    Family(
        "engine_sleep_state",
        _G,
        "1 for the state that the engine is in.",
        lambda e: {s: int(e.sleep_level == level) for level, s in enumerate(SLEEP_STATES)},
        "sleep_state",
    ),
    Family(
        "prefix_cache_queries",
        _C,
        "Tokens looked up in the prefix cache.",
        lambda e: e.prefix_cache_queries.value,
    ),
    Family(
        "prefix_cache_hits",
        _C,
        "Tokens found in the prefix cache.",
        lambda e: e.prefix_cache_hits.value,
    ),
    Family(
        "external_prefix_cache_queries",
        _C,
        "Tokens looked up in the KV connector, after hits of the prefix cache.",
        lambda e: e.external_queries.value,
    ),
    Family(
        "external_prefix_cache_hits",
        _C,
        "Tokens that the KV connector could load.",
        lambda e: e.external_hits.value,
    ),
    Family("num_preemptions", _C, "Preemptions of requests.", lambda e: e.preemptions.value),
    Family(
        "prompt_tokens",
        _C,
        "Prompt tokens of requests with a first token, cached ones included.",
        lambda e: e.prompt_tokens,
    ),
    Family(
        "prompt_tokens_by_source",
        _C,
        "The same: computed, found in the prefix cache, or loaded by the KV connector.",
        lambda e: {
            "local_compute": e.prompt_tokens - e.prompt_tokens_cached,
            "local_cache_hit": e.prompt_tokens_cached - e.prompt_tokens_external,
            "external_kv_transfer": e.prompt_tokens_external,
        },
        "source",
    ),
    Family(
        "prompt_tokens_cached",
        _C,
        "Prompt tokens that were cached, and not computed.",
        lambda e: e.prompt_tokens_cached,
    ),
    Family("generation_tokens", _C, "Generated tokens.", lambda e: e.generation_tokens),
    Family(
        "request_success",
        _C,
        "Completions that ended, by reason.",
        lambda e: e.finished,
        "finished_reason",
    ),
    Family(
        "spec_decode_num_drafts",
        _C,
        "Drafts of speculative decoding that were verified.",
        lambda e: e.drafts.value,
    ),
    Family(
        "spec_decode_num_draft_tokens",
        _C,
        "Draft tokens that were verified.",
        lambda e: e.draft_tokens.value,
    ),
    Family(
        "spec_decode_num_accepted_tokens",
        _C,
        "Draft tokens that were accepted.",
        lambda e: e.accepted_tokens.value,
    ),
    Family(
        "spec_decode_num_accepted_tokens_per_pos",
        _C,
        "The same by position in the draft.",
        lambda e: {str(at): total.value for at, total in enumerate(e.accepted_by_position)},
        "position",
    ),
    Family(
        "time_to_first_token_seconds",
        _H,
        "From a request's arrival to its first token.",
        lambda e: e.time_to_first_token,
    ),
    Family(
        "inter_token_latency_seconds",
        _H,
        "Between two outputs with tokens of a request.",
        lambda e: e.inter_token_latency,
    ),
    Family(
        "request_time_per_output_token_seconds",
        _H,
        "Mean time of a token after the first, per completion.",
        lambda e: e.time_per_output_token,
    ),
    Family("e2e_request_latency_seconds", _H, "From arrival to end.", lambda e: e.e2e),
    Family("request_queue_time_seconds", _H, "From arrival to first step.", lambda e: e.queue),
    Family(
        "request_prefill_time_seconds", _H, "From first step to first token.", lambda e: e.prefill
    ),
    Family(
        "request_decode_time_seconds", _H, "From first token to last token.", lambda e: e.decode
    ),
    Family(
        "request_inference_time_seconds",
        _H,
        "From first step to last token.",
        lambda e: e.inference,
    ),
    Family(
        "request_prompt_tokens",
        _H,
        "Prompt tokens of a completion that ended.",
        lambda e: e.request_prompt_tokens,
    ),
    Family(
        "request_generation_tokens",
        _H,
        "Generated tokens of a completion that ended.",
        lambda e: e.request_generation_tokens,
    ),
    Family(
        "request_max_num_generation_tokens",
        _H,
        "Generated tokens of the longest completion of a prompt that ended.",
        lambda e: e.longest_completion,
    ),
    Family(
        "request_prefill_kv_computed_tokens",
        _H,
        "Prompt tokens of a completion that ended, without cached ones.",
        lambda e: e.prefill_computed_tokens,
    ),
    Family(
        "request_num_preemptions",
        _H,
        "Preemptions of a completion that ended.",
        lambda e: e.request_preemptions,
    ),
    Family("request_params_n", _H, "The parameter n of a prompt that ended.", lambda e: e.params_n),
    Family(
        "request_params_max_tokens",
        _H,
        "The parameter max_tokens of a completion that ended.",
        lambda e: e.params_max_tokens,
    ),
)
"""Metrics of an engine, under its own prefix and under the prefixes of aliases."""

_STEP_TOKENS = Family(
    "iteration_tokens",
    _H,
    "Tokens of prompts and generated tokens of a batch of outputs.",
    lambda e: e.iteration_tokens,
)
OWN_FAMILIES = (
    _STEP_TOKENS,
    Family("engine_restarts", _C, "Restarts of a dead engine.", lambda e: e.restarts),
    Family(
        "request_resumes",
        _C,
        "Requests that went on at the engine, after they had left another one.",
        lambda e: e.resumes,
    ),
)
"""Metrics under the own prefix only, or that an alias has under another name."""

STEP_COST_FAMILIES = (
    Family(
        "step_cost_error",
        _G,
        "Moving mean of the relative error with which the time of a step is predicted.",
        lambda e: e.scheduler.step_cost_error,
    ),
)
"""Metrics of engines that measure their steps, under the own prefix only."""

WAIT_FAMILIES = (
    Family(
        "waits_for_results",
        _C,
        "Steps that waited for the results of the step before, which a step part needs.",
        lambda e: {part: total.value for part, total in e.waits_for_results.items()},
        "part",
    ),
)
"""Metrics of engines that plan steps ahead, under the own prefix only."""

ADAPTER_FAMILIES = (
    Family(
        "num_requests_running_by_adapter",
        _G,
        "Requests that run with a loaded adapter.",
        lambda e: dict(e.scheduler.num_requests_by_adapter),
        "adapter",
    ),
)
"""Metrics of engines that hold adapters, under the own prefix only."""

WEIGHT_FAMILIES = (
    Family(
        "weight_version_info",
        _G,
        "The version of the weights, in a label; 1 for that in use.",
        lambda e: {} if (v := e.scheduler.weight_version) is None else {v: 1},
        "version",
    ),
)
"""Metrics of engines with versions of weights, under the own prefix only."""

RETENTION_FAMILIES = (
    Family(
        "retained_blocks",
        _G,
        "Cached blocks that requests wish to be kept.",
        lambda e: e.scheduler.num_retained_blocks,
    ),
    Family(
        "retained_block_hits",
        _C,
        "Retained blocks that requests found and no other used.",
        lambda e: e.retained_hits.value,
    ),
    Family(
        "retained_block_evictions",
        _C,
        "Retained blocks that were evicted before their time.",
        lambda e: e.retained_evictions.value,
    ),
)
"""Metrics of engines with requests that retain blocks, under the own prefix only."""

ALIAS_FAMILIES = (replace(_STEP_TOKENS, name="iteration_tokens_total"),)
"""The same, as dashboards for the aliases name them."""

TIER_FAMILIES = (
    *(
        Family(f"kv_tier_{name}", _C, text, partial(_tier_totals, name=name), "tier")
        for name, text in {
            "hits": "Blocks that a tier of the KV connector was asked for, and had.",
            "misses": "Blocks that it was asked for, and had not.",
            "loaded_blocks": "Blocks that were loaded from it.",
            "loaded_bytes": "Their bytes.",
            "load_seconds": "The time that took, summed over threads.",
            "stored_blocks": "Blocks that were stored in it.",
            "stored_bytes": "Their bytes.",
            "store_seconds": "The time that took, summed over threads.",
            "dropped_blocks": "Blocks that were not stored, for lack of room or time.",
            "failures": "Calls that raised, took too long, or gave bytes that are wrong.",
        }.items()
    ),
    Family(
        "kv_tier_used_bytes",
        _G,
        "Bytes that it keeps, if it reports them.",
        _tier_used_bytes,
        "tier",
    ),
)
"""Metrics of the tiers of a KV connector, all ranks together, under the own prefix only."""

OFFLOAD_FAMILIES = (
    Family(
        "kv_offload_load_bytes",
        _C,
        "Bytes that were loaded into the KV cache.",
        lambda e: e.tiers.sum("loaded_bytes"),
    ),
    Family(
        "kv_offload_load_time",
        _C,
        "Seconds that took, summed over threads.",
        lambda e: e.tiers.sum("load_seconds"),
    ),
    Family(
        "kv_offload_store_bytes",
        _C,
        "Bytes that were stored from the KV cache.",
        lambda e: e.tiers.nearest("stored_bytes"),
    ),
    Family(
        "kv_offload_store_time",
        _C,
        "Seconds that took, summed over threads.",
        lambda e: e.tiers.nearest("store_seconds"),
    ),
)
"""Aliases of them: all tiers loaded from, and the nearest one stored in."""

PLUGIN_COUNTERS = {
    "seconds": "Time in a logits processor's methods.",
    "rows": "Rows that a logits processor processed.",
    "steps": "Steps in which a logits processor ran.",
    "faults": "Requests that a plugin ended.",
    "slow_steps": "Steps for which a plugin took longer than plugins.slow_seconds.",
    "fallbacks": "Decisions of a plugin that the built-in default made, and calls that had no "
    "effect.",
}
"""Metrics `plugin_<key>` of plugins, under the own prefix only."""


def engine_families(
    model_name: str, engines: Mapping[int, EngineFigures], prefixes: Sequence[str]
) -> Iterator[Metric]:
    """Yield all metrics of the engines, under each prefix; some only where they are known."""
    aliases = [prefix for prefix in prefixes if prefix != OWN]
    exported: list[tuple[Sequence[Family], Sequence[str]]] = [
        (ENGINE_FAMILIES, prefixes),
        (OWN_FAMILIES, (OWN,)),
        (ALIAS_FAMILIES, aliases),
    ]
    if any(figures.scheduler.step_cost_error is not None for figures in engines.values()):
        exported.append((STEP_COST_FAMILIES, (OWN,)))
    if any(figures.waits_for_results for figures in engines.values()):
        exported.append((WAIT_FAMILIES, (OWN,)))
    if any(figures.scheduler.num_requests_by_adapter for figures in engines.values()):
        exported.append((ADAPTER_FAMILIES, (OWN,)))
    if any(figures.scheduler.weight_version is not None for figures in engines.values()):
        exported.append((WEIGHT_FAMILIES, (OWN,)))
    if any(figures.retains for figures in engines.values()):
        exported.append((RETENTION_FAMILIES, (OWN,)))
    if any(figures.tiers for figures in engines.values()):
        exported += [(TIER_FAMILIES, (OWN,)), (OFFLOAD_FAMILIES, aliases)]
    for families, names in exported:
        for family in families:
            yield from _metrics(family, model_name, engines, names)


def _metrics(
    family: Family, model_name: str, engines: Mapping[int, EngineFigures], prefixes: Sequence[str]
) -> list[Any]:
    labels = _LABELS if family.label is None else (*_LABELS, family.label)
    metrics = [
        family.kind(f"{prefix}:{family.name}", family.help, labels=labels) for prefix in prefixes
    ]
    for index, figures in engines.items():
        add = _add_histogram if family.kind is HistogramMetricFamily else _add_value
        value = family.read(figures)
        if value is None:
            continue
        for metric in metrics:
            if family.label is None:
                add(metric, (model_name, str(index)), value)
                continue
            for key, item in value.items():
                add(metric, (model_name, str(index), key), item)
    return metrics


def cache_families(
    model_name: str,
    engine: int,
    config: Mapping[str, object],
    num_blocks: int,
    prefixes: Sequence[str],
) -> Iterator[Metric]:
    """Yield the sizes of the KV cache as labels; under an alias, with the names that it reads.

    Args:
        config: other labels.
        num_blocks: number of blocks of the cache.
    """
    for prefix in prefixes:
        blocks = "num_blocks" if prefix == OWN else "num_gpu_blocks"
        labels: dict[str, object] = {"engine": engine, **config, blocks: num_blocks}
        if prefix == OWN:
            labels["model_name"] = model_name
        metric = GaugeMetricFamily(
            f"{prefix}:cache_config_info", "The KV cache, in labels.", labels=tuple(labels)
        )
        metric.add_metric([str(value) for value in labels.values()], 1.0)
        yield metric


def adapter_families(
    engines: Iterable[EngineFigures], prefixes: Sequence[str], now: float
) -> Iterator[Metric]:
    """Yield `lora_requests_info` under the aliases: the adapters of requests, in labels.

    Args:
        now: seconds since the epoch, the value of the metric.
    """
    schedulers = [engine.scheduler for engine in engines]
    slots = max((stats.num_adapter_slots for stats in schedulers), default=0)
    if not slots:
        return
    running = {
        name
        for stats in schedulers
        for name, number in stats.num_requests_by_adapter.items()
        if number
    }
    waiting = {name for stats in schedulers for name in stats.num_waiting_by_adapter}
    labels = {
        "max_lora": str(slots),
        "waiting_lora_adapters": ",".join(sorted(waiting)),
        "running_lora_adapters": ",".join(sorted(running)),
    }
    for prefix in prefixes:
        if prefix == OWN:
            continue
        metric = GaugeMetricFamily(
            f"{prefix}:lora_requests_info",
            "The adapters of running and waiting requests, in labels; the value is the time.",
            labels=tuple(labels),
        )
        metric.add_metric(list(labels.values()), now)
        yield metric


def plugin_families(model_name: str, engine: int, figures: PluginFigures) -> Iterator[Metric]:
    """Yield all metrics of plugins, all engines together."""
    common = (model_name, str(engine))
    for counter_name, text in PLUGIN_COUNTERS.items():
        counter = CounterMetricFamily(
            f"{OWN}:plugin_{counter_name}", text, labels=(*_LABELS, "plugin")
        )
        for name, total in figures.totals(counter_name).items():
            counter.add_metric((*common, name), total)
        yield counter
    gauge = GaugeMetricFamily(
        f"{OWN}:plugin_quarantined",
        "1 if requests that use the plugin are refused.",
        labels=(*_LABELS, "plugin"),
    )
    for name, quarantined in figures.quarantined.items():
        gauge.add_metric((*common, name), quarantined)
    yield gauge


def _waiting(engine: EngineFigures) -> Series:
    deferred = engine.scheduler.num_deferred
    return {"capacity": engine.scheduler.num_waiting - deferred, "deferred": deferred}


def _add_value(metric: Any, labels: Sequence[str], value: float) -> None:
    metric.add_metric(labels, value)


def _add_histogram(metric: Any, labels: Sequence[str], value: Histogram) -> None:
    metric.add_metric(labels, value.buckets(), value.sum)
