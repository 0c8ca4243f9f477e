"""The Prometheus sink: exported values, under its own names and under vLLM's."""

from __future__ import annotations

import gc
import re
import time
import weakref

import msgspec
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from support.processes import ROOT

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.stats.families import (
    ENGINE_FAMILIES,
    OFFLOAD_FAMILIES,
    OWN_FAMILIES,
    PLUGIN_COUNTERS,
    TIER_FAMILIES,
)
from hardpoint.builtin_plugins.stats.prometheus import PrometheusSink
from hardpoint.plugins import (
    ConfigError,
    IterationStats,
    PluginReport,
    PrefixCacheStats,
    SchedulerStats,
    StatSinkContext,
)
from hardpoint.plugins.requests.stats import (
    EngineReport,
    FinishedRequest,
    Health,
    KVTierStats,
    PluginMeter,
    RequestMetrics,
    StepFault,
)
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SINK = {"stats": {"sinks": ["prometheus"]}}
VLLM = SINK | {"metrics": {"aliases": ["vllm"]}}

ONLY_VLLMS = "iteration_tokens_total"
"""A histogram with the end of a counter's name, which is an alias's alone."""

# What dashboards, routers and the endpoint picker of the Gateway API read.
NAMES_OF_VLLM = {
    "cache_config_info": "gauge",
    "e2e_request_latency_seconds": "histogram",
    "engine_sleep_state": "gauge",
    "external_prefix_cache_hits_total": "counter",
    "external_prefix_cache_queries_total": "counter",
    "generation_tokens_total": "counter",
    "inter_token_latency_seconds": "histogram",
    "iteration_tokens_total": "histogram",
    "kv_cache_usage_perc": "gauge",
    "num_preemptions_total": "counter",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "prefix_cache_hits_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prompt_tokens_by_source_total": "counter",
    "prompt_tokens_cached_total": "counter",
    "prompt_tokens_total": "counter",
    "request_decode_time_seconds": "histogram",
    "request_generation_tokens": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_num_preemptions": "histogram",
    "request_params_max_tokens": "histogram",
    "request_params_n": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_success_total": "counter",
    "request_time_per_output_token_seconds": "histogram",
    "spec_decode_num_accepted_tokens_per_pos_total": "counter",
    "spec_decode_num_accepted_tokens_total": "counter",
    "spec_decode_num_draft_tokens_total": "counter",
    "spec_decode_num_drafts_total": "counter",
    "time_to_first_token_seconds": "histogram",
}


class State:
    """As a SchedulerStats, with which no weak reference is possible."""

    def __init__(self, stats):
        vars(self).update(msgspec.structs.asdict(stats))


def series(text, **labels):
    """Return the values of all series that have some labels, by name without the prefix.

    What is left of the labels follows the name: "request_success_total stop".
    """
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            wanted = {"model_name": "tiny", "engine": "0"} | labels
            if wanted.items() <= sample.labels.items():
                rest = [v for k, v in sorted(sample.labels.items()) if k not in wanted]
                values[" ".join([sample.name.partition(":")[2], *rest])] = sample.value
    return values


def types(text, prefix):
    metric_types = re.findall(rf"^# TYPE {prefix}:(\S+) (\S+)$", text, re.MULTILINE)
    assert len(metric_types) == len(dict(metric_types))
    return dict(metric_types)


def sink(**fields):
    return PrometheusSink(
        StatSinkContext(
            name="prometheus", options=None, clock=time.monotonic, **({"model": "tiny"} | fields)
        )
    )


def scheduler_stats(queried=0, hit=0, **fields):
    counts = {"num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0} | fields
    return SchedulerStats(prefix_cache=PrefixCacheStats(1, queried, hit), **counts)


def opened(scripted, extra):
    extra = {"kv_cache": {"block_size": 4, "num_blocks": 200}} | extra
    extra["metrics"] = extra.get("metrics", {}) | {"model_name": "tiny"}
    return LLM(config=scripted_config(scripted, extra))


def test_an_engine_exports_what_its_requests_did(scripted):
    slow = {"slow": {"seconds": 0.001}}
    prompts = ["say abc", "long 3456789", "long 3456789"]
    extra = {"stats": {"sinks": ["prometheus"], "request_metrics": True}}
    extra["plugins"] = {"enable": ["support.plugins.slow:Slow"]}
    with opened(scripted, extra) as llm:
        idle = series(llm.metrics())
        assert idle["request_success_total stop"] == idle["prompt_tokens_total"] == 0
        short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, plugin_args=slow)
        twice = SamplingParams(max_tokens=5, n=2, ignore_eos=True)
        outputs = [llm.generate(prompts[0], GREEDY), llm.generate(prompts[1], short)]
        outputs += [llm.generate(prompts[2], twice)]
        text = llm.metrics()
    values = series(text)
    ended = [each.metrics for (output,) in outputs for each in output.outputs]
    assert [(each.num_prompt_tokens, each.num_generation_tokens) for each in ended] == [
        *[(7, 13), (12, 3), (12, 5), (12, 5)]
    ]
    assert values["prompt_tokens_total"] == 43
    assert values["generation_tokens_total"] == 26
    cached = sum(each.num_cached_tokens for each in ended)
    assert cached > 0
    assert values["prompt_tokens_cached_total"] == values["prefix_cache_hits_total"] == cached
    assert values["prompt_tokens_by_source_total local_cache_hit"] == cached
    assert values["prompt_tokens_by_source_total local_compute"] == 43 - cached
    assert values["prefix_cache_queries_total"] == 43
    assert values["request_success_total stop"] == 1
    assert values["request_success_total length"] == 3
    assert values["request_success_total abort"] == 0
    assert values["iteration_tokens_sum"] == 43 + 26
    assert values["time_to_first_token_seconds_count"] == 4
    assert values["inter_token_latency_seconds_count"] == 26 - 4
    assert values["request_prompt_tokens_sum"] == 43
    assert values["request_generation_tokens_sum"] == 26
    assert values["request_generation_tokens_bucket 5.0"] == 3
    assert values["request_generation_tokens_bucket +Inf"] == 4
    assert (values["request_params_n_count"], values["request_params_n_sum"]) == (3, 1 + 1 + 2)
    assert values["request_params_max_tokens_sum"] == 20 + 3 + 5 + 5
    assert values["num_requests_running"] == values["num_requests_waiting"] == 0
    assert values["cache_config_info 4 True 200"] == 1
    assert values["plugin_steps_total slow"] == values["plugin_rows_total slow"] == 3
    assert values["plugin_seconds_total slow"] >= 0.003
    assert values["engine_restarts_total"] == 0


def ended(name, index=0, n=1, **metrics):
    return FinishedRequest(
        request_id=name,
        finish_reason="stop",
        tags={},
        index=index,
        n=n,
        metrics=RequestMetrics(num_prompt_tokens=10, **metrics),
    )


def test_figures_of_requests_that_vllm_has():
    exported = sink()
    exported.record(
        IterationStats(
            finished=[
                ended("a", 0, 2, num_generation_tokens=7, num_cached_tokens=4),
                ended("b", num_generation_tokens=3, num_preemptions=2),
            ]
        )
    )
    exported.record(IterationStats(finished=[ended("a", 1, 2, num_generation_tokens=5)]))
    exported.record(IterationStats(finished=[ended("c", 0, 2, num_generation_tokens=9)]))
    values = series(exported.exposition(PluginReport()))
    longest = "request_max_num_generation_tokens"
    assert (values[f"{longest}_count"], values[f"{longest}_sum"]) == (2, 7 + 3)
    assert values["request_prefill_kv_computed_tokens_sum"] == 4 * 10 - 4
    assert values["request_num_preemptions_bucket 1.0"] == 3
    assert values["request_num_preemptions_bucket 2.0"] == 4
    assert values["request_num_preemptions_sum"] == 2


def test_durations_are_those_of_the_requests(scripted):
    extra = {"stats": {"sinks": ["prometheus"], "request_metrics": True}}
    with opened(scripted, extra) as llm:
        ended = [each.metrics for each in llm.generate(["say abc", "long", "emoji"], GREEDY)]
        values = series(llm.metrics())
    for name, seconds in {
        "e2e_request_latency_seconds": [each.e2e_seconds for each in ended],
        "request_queue_time_seconds": [each.queue_seconds for each in ended],
        "request_prefill_time_seconds": [each.prefill_seconds for each in ended],
        "request_decode_time_seconds": [each.decode_seconds for each in ended],
        "request_inference_time_seconds": [e.prefill_seconds + e.decode_seconds for e in ended],
        "request_time_per_output_token_seconds": [
            each.decode_seconds / (each.num_generation_tokens - 1) for each in ended
        ],
    }.items():
        assert values[f"{name}_count"] == 3
        assert values[f"{name}_sum"] == pytest.approx(sum(seconds))
    first = [each.time_to_first_token for each in ended]
    assert values["time_to_first_token_seconds_sum"] == pytest.approx(sum(first))


def test_engines_of_one_process_do_not_meet_and_leave_nothing(scripted):
    before = {metric.name for metric in REGISTRY.collect()}
    with opened(scripted, SINK) as first, opened(scripted, SINK) as second:
        first.generate("say abc", GREEDY)
        second.generate(["say abc", "say abc"], GREEDY)
        assert series(first.metrics())["request_success_total stop"] == 1
        second.close()
        assert second.metrics() == ""
        assert series(first.metrics())["request_success_total stop"] == 1
    assert {metric.name for metric in REGISTRY.collect()} == before


def test_a_closed_sink_keeps_nothing():
    exporter, state = sink(), State(scheduler_stats())
    exporter.record(IterationStats(scheduler=state))
    assert exporter.exposition(PluginReport())
    reference = weakref.ref(state)
    del state
    assert reference() is not None
    exporter.close()
    gc.collect()
    assert reference() is None
    exporter.record(IterationStats(num_prompt_tokens=1))
    assert exporter.exposition(PluginReport()) == ""


def test_without_such_a_sink_there_is_nothing(scripted):
    with opened(scripted, {}) as llm:
        assert llm.metrics() == ""
    with opened(scripted, {"stats": {"sinks": ["log"]}}) as llm:
        llm.generate("say abc", GREEDY)
        assert llm.metrics() == ""


def test_an_alias_has_the_names_and_values_that_dashboards_read(scripted):
    with opened(scripted, VLLM) as llm:
        llm.generate("say abc", GREEDY)
        text = llm.metrics()
    assert types(text, "vllm") == NAMES_OF_VLLM
    own_types = types(text, "hardpoint")
    counters = {name for name in own_types if name.endswith("_total")}
    assert {own_types[name] for name in counters} == {"counter"}
    lines = [
        line.replace(f"vllm:{ONLY_VLLMS}", "vllm:iteration_tokens") for line in text.split("\n")
    ]
    for name in NAMES_OF_VLLM.keys() - {"cache_config_info"}:
        name = name.replace(ONLY_VLLMS, "iteration_tokens")
        assert name in own_types
        lines_of_name = [line[10:] for line in lines if re.match(rf"hardpoint:{name}[_{{]", line)]
        assert lines_of_name == [line[5:] for line in lines if re.match(rf"vllm:{name}[_{{]", line)]
        assert lines_of_name or name.startswith("spec_decode_num_accepted_tokens_per_pos")
    config = 'block_size="4",enable_prefix_caching="True",engine="0",num_gpu_blocks="200"'
    assert f"vllm:cache_config_info{{{config}}} 1.0" in lines
    assert (
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0'
        in (lines)
    )
    with opened(scripted, SINK) as llm:
        assert "vllm:" not in llm.metrics()


def test_an_unknown_alias_is_refused(scripted):
    with pytest.raises(ConfigError, match=r"metrics\.aliases\[0\].*'vlm'"):
        LLM(config=scripted_config(scripted, SINK | {"metrics": {"aliases": ["vlm"]}}))


def test_every_name_is_in_the_documentation():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    families = (*ENGINE_FAMILIES, *OWN_FAMILIES, *TIER_FAMILIES, *OFFLOAD_FAMILIES)
    names = [family.name for family in families] + ["cache_config_info"]
    names += [f"plugin_{name}" for name in (*PLUGIN_COUNTERS, "quarantined")]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_names_of_models_and_plugins_are_escaped():
    name = 'a "model" \\ of\ntwo lines'
    exporter = sink(model=name)
    text = exporter.exposition(PluginReport(meters={'my "own"': PluginMeter(rows=2)}))
    assert series(text, model_name=name, plugin='my "own"')["plugin_rows_total"] == 2
    assert 'model_name="a \\"model\\" \\\\ of\\ntwo lines"' in text
    named = sink(model="/models/of/mine", model_name="served")
    assert "/models/of/mine" not in named.exposition(PluginReport())
    assert series(named.exposition(PluginReport()), model_name="served")["prompt_tokens_total"] == 0


def test_totals_go_on_after_a_restart():
    exporter = sink()
    for queried, hit, preemptions in [(100, 30, 4), (0, 0, 0), (20, 5, 1), (50, 5, 1)]:
        stats = scheduler_stats(queried, hit, num_preemptions=preemptions)
        exporter.record(IterationStats(scheduler=stats))
    meters = [PluginMeter(steps=5, rows=9, seconds=1.0), PluginMeter(steps=1, rows=2, seconds=0.5)]
    for restarts, meter in enumerate(meters):
        report = PluginReport(meters={"top_k": meter}, health=Health({}, {}, restarts=restarts))
        text = exporter.exposition(report)
    values = series(text)
    assert values["prefix_cache_queries_total"] == 150
    assert values["prefix_cache_hits_total"] == 35
    assert values["num_preemptions_total"] == 5
    assert values["plugin_steps_total top_k"] == 6
    assert values["plugin_rows_total top_k"] == 11
    assert values["plugin_seconds_total top_k"] == 1.5
    assert values["engine_restarts_total"] == 1


def tier(number, **fields):
    """Totals that all differ, in thousands of a number."""
    names = [name for name in KVTierStats.__struct_fields__ if name != "used_bytes"]
    return KVTierStats(**{name: number * 1000 + at for at, name in enumerate(names)} | fields)


def test_the_error_of_the_cost_of_steps_is_exported_where_they_are_measured():
    exporter = sink()
    exporter.record(IterationStats(scheduler=scheduler_stats()))
    assert "step_cost_error" not in exporter.exposition(PluginReport())
    exporter.record(IterationStats(scheduler=scheduler_stats(step_cost_error=0.125)))
    text = exporter.exposition(PluginReport())
    assert series(text)["step_cost_error"] == 0.125
    assert types(text, "hardpoint")["step_cost_error"] == "gauge"


def test_steps_that_waited_are_exported_by_the_part_that_needs_their_results():
    exporter = sink()
    exporter.record(IterationStats(scheduler=scheduler_stats()))
    assert "waits_for_results" not in exporter.exposition(PluginReport())
    exporter.record(
        IterationStats(scheduler=scheduler_stats(num_waits_for_results={"structured": 3}))
    )
    text = exporter.exposition(PluginReport())
    assert series(text)["waits_for_results_total structured"] == 3
    assert types(text, "hardpoint")["waits_for_results_total"] == "counter"


def test_requests_by_adapter_are_exported_while_adapters_are_loaded():
    exporter = sink()
    exporter.record(
        IterationStats(scheduler=scheduler_stats(num_requests_by_adapter={"a": 2, "b": 0}))
    )
    text = exporter.exposition(PluginReport())
    assert series(text)["num_requests_running_by_adapter a"] == 2
    assert series(text)["num_requests_running_by_adapter b"] == 0
    assert types(text, "hardpoint")["num_requests_running_by_adapter"] == "gauge"
    exporter.record(IterationStats(scheduler=scheduler_stats()))
    assert "by_adapter" not in exporter.exposition(PluginReport())


def test_adapters_of_requests_are_labels_under_the_alias():
    one = sink(aliases=("vllm",))
    one.record(IterationStats(scheduler=scheduler_stats()))
    assert "lora_requests_info" not in one.exposition(PluginReport())
    stats = scheduler_stats(
        num_requests_by_adapter={"b": 1, "a": 2, "idle": 0},
        num_waiting_by_adapter={"c": 1},
        num_adapter_slots=4,
    )
    before = time.time()
    one.record(IterationStats(scheduler=stats))
    (sample,) = [
        sample
        for family in text_string_to_metric_families(one.exposition(PluginReport()))
        for sample in family.samples
        if sample.name == "vllm:lora_requests_info"
    ]
    assert sample.labels == {
        "max_lora": "4",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "c",
    }
    assert before <= sample.value <= time.time()


def test_tiers_have_figures_of_their_own_and_those_that_dashboards_read():
    exporter = sink(aliases=("vllm",))
    assert "kv_tier" not in exporter.exposition(PluginReport())
    stats = scheduler_stats(
        external_prefix_cache=PrefixCacheStats(3, 90, 48),
        kv_tiers={"memory": tier(1), "ssd": tier(2, used_bytes=77)},
    )
    batch = IterationStats(
        num_prompt_tokens=100, num_cached_tokens=64, num_external_tokens=48, scheduler=stats
    )
    exporter.record(batch)
    text = exporter.exposition(PluginReport())
    values = series(text)
    assert {name for name in types(text, "hardpoint") if name.startswith("kv_tier")} == {
        *("kv_tier_hits_total", "kv_tier_misses_total", "kv_tier_loaded_blocks_total"),
        *("kv_tier_loaded_bytes_total", "kv_tier_load_seconds_total"),
        *("kv_tier_stored_blocks_total", "kv_tier_stored_bytes_total"),
        *("kv_tier_store_seconds_total", "kv_tier_dropped_blocks_total"),
        *("kv_tier_failures_total", "kv_tier_used_bytes"),
    }
    assert (values["kv_tier_hits_total memory"], values["kv_tier_hits_total ssd"]) == (1000, 2000)
    assert values["kv_tier_misses_total ssd"] == 2001
    assert values["kv_tier_failures_total ssd"] == 2009
    assert values["kv_tier_used_bytes ssd"] == 77
    assert "kv_tier_used_bytes memory" not in values
    assert values["external_prefix_cache_queries_total"] == 90
    assert values["external_prefix_cache_hits_total"] == 48
    assert values["prompt_tokens_by_source_total local_compute"] == 36
    assert values["prompt_tokens_by_source_total local_cache_hit"] == 16
    assert values["prompt_tokens_by_source_total external_kv_transfer"] == 48
    alias = {name for name in types(text, "vllm") if name.startswith("kv_")}
    offload = {f"kv_offload_{name}_total" for name in ("load_bytes", "load_time")}
    offload |= {f"kv_offload_{name}_total" for name in ("store_bytes", "store_time")}
    assert alias == {*offload, "kv_cache_usage_perc"}
    assert values["kv_offload_load_bytes_total"] == 1003 + 2003  # whatever it was loaded from
    assert values["kv_offload_store_bytes_total"] == 1006  # in the nearest, once


def test_tiers_go_on_after_a_restart_also_if_they_were_gone():
    exporter = sink()
    for tiers in [{"disk": tier(3)}, {}, {"disk": tier(1)}, {"disk": tier(2), "redis": tier(1)}]:
        exporter.record(IterationStats(scheduler=scheduler_stats(kv_tiers=tiers)))
    values = series(exporter.exposition(PluginReport()))
    assert values["kv_tier_hits_total disk"] == 3000 + 2000
    assert values["kv_tier_hits_total redis"] == 1000


def test_the_state_of_the_scheduler_is_the_latest_that_is_known():
    exporter = sink()
    stats = scheduler_stats(num_running=3, num_waiting=5, num_deferred=2, kv_cache_usage=0.25)
    exporter.record(IterationStats(scheduler=stats))
    values = series(exporter.exposition(PluginReport(sleep_level=2)))
    assert (values["num_requests_running"], values["num_requests_waiting"]) == (3, 5)
    assert values["num_requests_waiting_by_reason capacity"] == 3
    assert values["num_requests_waiting_by_reason deferred"] == 2
    assert values["kv_cache_usage_perc"] == 0.25
    sleeping = ["awake", "weights_offloaded", "discard_all"]
    assert [values[f"engine_sleep_state {state}"] for state in sleeping] == [0, 0, 1]
    now = PluginReport(scheduler=scheduler_stats(num_running=0, num_waiting=7))
    values = series(exporter.exposition(now))
    assert (values["num_requests_running"], values["num_requests_waiting"]) == (0, 7)


def test_drafts_and_several_engines():
    exporter = sink()
    for index, accepted in enumerate([[3, 1], [2]]):
        stats = scheduler_stats(
            num_drafts=9,
            num_verified_drafts=3,
            num_accepted_drafts=sum(accepted),
            num_accepted_by_position=accepted,
        )
        exporter.record(IterationStats(engine_index=index, scheduler=stats))
    first, second = (series(exporter.exposition(PluginReport()), engine=index) for index in "01")
    assert first["spec_decode_num_drafts_total"] == 3
    assert first["spec_decode_num_draft_tokens_total"] == 9
    assert first["spec_decode_num_accepted_tokens_total"] == 4
    assert first["spec_decode_num_accepted_tokens_per_pos_total 0"] == 3
    assert first["spec_decode_num_accepted_tokens_per_pos_total 1"] == 1
    assert second["spec_decode_num_accepted_tokens_per_pos_total 0"] == 2
    assert (first["engine_restarts_total"], second["engine_restarts_total"]) == (0, 0)


def test_each_of_several_engines_has_its_own_series():
    exporter = sink()
    for first, second in ((5, 1), (7, 2)):
        engines = {0: scheduler_stats(first, num_running=3), 1: scheduler_stats(second)}
        merged = scheduler_stats(first + second, num_running=3, engines=engines)
        exporter.record(IterationStats(engine_index=1, num_generation_tokens=2, scheduler=merged))
    reports = {0: EngineReport(sleep_level=1), 1: EngineReport(restarts=2, num_resumes=4)}
    text = exporter.exposition(PluginReport(engines=reports, health=Health({}, {}, restarts=2)))
    first, second = (series(text, engine=index) for index in "01")
    assert [e["prefix_cache_queries_total"] for e in (first, second)] == [7, 2]
    assert [e["num_requests_running"] for e in (first, second)] == [3, 0]
    assert [e["generation_tokens_total"] for e in (first, second)] == [0, 4]
    assert [e["engine_restarts_total"] for e in (first, second)] == [0, 2]
    assert [e["request_resumes_total"] for e in (first, second)] == [0, 4]
    assert [e["engine_sleep_state weights_offloaded"] for e in (first, second)] == [1, 0]


def test_faults_of_plugins():
    health = Health(
        faults={"picky": 3},
        quarantined={"picky": "it ended 3 requests"},
        fallbacks={"policy": StepFault(2, "plugin 'policy': victim() failed")},
        slow={"picky": StepFault(4, "took long")},
    )
    values = series(sink().exposition(PluginReport(health=health, meters={"top_k": PluginMeter()})))
    assert values["plugin_faults_total picky"] == 3
    assert values["plugin_quarantined picky"] == 1
    assert values["plugin_quarantined top_k"] == 0
    assert values["plugin_fallbacks_total policy"] == 2
    assert values["plugin_slow_steps_total picky"] == 4


def test_stages_that_a_request_did_not_reach_are_not_counted():
    exporter = sink()
    for metrics in (
        RequestMetrics(num_prompt_tokens=3, e2e_seconds=1.0),
        RequestMetrics(num_prompt_tokens=3, num_generation_tokens=1, decode_seconds=0.0),
    ):
        ended = FinishedRequest(
            request_id="0", finish_reason="abort", tags={"tenant": "acme"}, metrics=metrics
        )
        exporter.record(IterationStats(finished=[ended]))
    text = exporter.exposition(PluginReport())
    values = series(text)
    assert values["request_success_total abort"] == 2
    assert values["e2e_request_latency_seconds_count"] == 1
    assert values["request_queue_time_seconds_count"] == 0
    assert values["request_inference_time_seconds_count"] == 0
    assert values["request_decode_time_seconds_bucket 0.001"] == 1
    assert values["request_time_per_output_token_seconds_count"] == 0
    assert values["request_params_max_tokens_count"] == 0
    assert values["iteration_tokens_count"] == 0
    assert "acme" not in text
