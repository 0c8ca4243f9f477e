"""Reports of an engine about its KV connector: metrics of requests, totals of tiers, KV events."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.builtins.split import steps_until
from support.plugins.kv_event_list import EVENTS

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.plugins import BlockRemoved, BlockStored
from hardpoint.testing import scripted_config, write_scripted_model

BLOCK = 4
PROMPT = "five blocks of four tokens"  # 26 tokens: six blocks and two more
SMALL = {"use": "support.plugins.small_store:SmallStore", "name": "small"}
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.fixture
def opened(tmp_path):
    engines = []

    def open_engine(stores, **extra):
        folder = tmp_path / "model"
        if not folder.exists():
            write_scripted_model(folder)
        config = {
            "kv_cache": {"block_size": BLOCK, "num_blocks": 200},
            "kv_connector": {"stores": stores},
        }
        engines.append(LLM(config=scripted_config(folder, config | extra)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def figures(llm):
    """Return the values of the metrics that have one series per tier, or only one."""
    values = {}
    for family in text_string_to_metric_families(llm.metrics()):
        for sample in family.samples:
            rest = [v for k, v in sample.labels.items() if k in ("tier", "source")]
            values[" ".join([sample.name.removeprefix("hardpoint:"), *rest])] = sample.value
    return values


def test_metrics_count_loads_and_the_work_of_the_tiers(opened):
    llm = opened(["memory", SMALL], stats={"sinks": ["prometheus"], "request_metrics": True})
    (first,) = llm.generate(PROMPT, ONE_TOKEN)
    assert (first.metrics.num_cached_tokens, first.metrics.num_external_tokens) == (0, 0)
    steps_until(llm, lambda: figures(llm).get("kv_tier_stored_blocks_total small", 0) >= 6)
    before = figures(llm)
    llm.reset_prefix_cache()
    (again,) = llm.generate(PROMPT, ONE_TOKEN)
    assert again.num_cached_tokens == 24
    assert (again.metrics.num_cached_tokens, again.metrics.num_external_tokens) == (24, 24)
    (third,) = llm.generate(PROMPT, ONE_TOKEN)
    assert (third.metrics.num_cached_tokens, third.metrics.num_external_tokens) == (24, 0)
    after = figures(llm)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["prompt_tokens_by_source_total external_kv_transfer"] == 24
    assert grown["prompt_tokens_by_source_total local_cache_hit"] == 24
    assert grown["prompt_tokens_by_source_total local_compute"] == 2 + 2
    assert grown["external_prefix_cache_hits_total"] == 24
    assert grown["kv_tier_hits_total memory"] == grown["kv_tier_loaded_blocks_total memory"] == 6
    assert grown["kv_tier_load_seconds_total memory"] > 0
    assert after["kv_tier_failures_total memory"] == 0
    per_block = after["kv_tier_stored_bytes_total memory"] / 6
    assert grown["kv_tier_loaded_bytes_total memory"] == 6 * per_block
    assert after["kv_tier_stored_bytes_total small"] == 6 * per_block
    assert after["kv_tier_used_bytes small"] == 4 * per_block


def test_without_a_connector_there_is_nothing_of_it(tmp_path):
    folder = write_scripted_model(tmp_path / "model")
    config = scripted_config(folder, {"stats": {"sinks": ["prometheus"]}})
    with LLM(config=config) as llm:
        llm.generate(PROMPT, ONE_TOKEN)
        assert "kv_tier" not in llm.metrics()
        assert figures(llm)["external_prefix_cache_queries_total"] == 0


def kept(events, medium):
    """Return the hashes that are kept after events; no event repeats an earlier one."""
    remaining = set()
    for event in events:
        if getattr(event, "medium", "") != medium:
            continue
        hashes = set(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not hashes & remaining
            remaining |= hashes
        else:
            assert hashes <= remaining
            remaining -= hashes
    return remaining


def kept_at_any_time(events, medium):
    """Return the hashes kept at any time, including removed ones."""
    stored = [event for event in events if isinstance(event, BlockStored)]
    return {block for event in stored if event.medium == medium for block in event.block_hashes}


def test_events_list_what_each_tier_keeps(opened):
    EVENTS.clear()
    publisher = "support.plugins.kv_event_list:EventList"
    llm = opened(["memory", SMALL], kv_events={"publishers": [publisher]})
    llm.generate(PROMPT, ONE_TOKEN)
    steps_until(llm, lambda: len(kept_at_any_time(EVENTS, "small")) == 6)
    device_events = [
        event for event in EVENTS if isinstance(event, BlockStored) and event.medium is None
    ]
    hashes = [block for event in device_events for block in event.block_hashes]
    assert kept(EVENTS, "memory") == set(hashes) == kept(EVENTS, None)
    small = kept(EVENTS, "small")
    assert len(small) == 4
    assert any(isinstance(event, BlockRemoved) for event in EVENTS)
    assert small < set(hashes)
    of_tiers = [event for event in EVENTS if getattr(event, "medium", None)]
    for event in of_tiers:
        if isinstance(event, BlockStored):
            assert (event.parent_hash, event.token_ids, event.block_size) == (None, [], BLOCK)
    count = len(of_tiers)
    llm.reset_prefix_cache()
    llm.generate(PROMPT, ONE_TOKEN)  # loaded from memory, where it was known to be
    llm.generate("y", ONE_TOKEN)
    assert len([event for event in EVENTS if getattr(event, "medium", None)]) == count


def test_what_is_promoted_is_published_and_what_has_gone_is_removed(opened):
    EVENTS.clear()
    publisher = "support.plugins.kv_event_list:EventList"
    llm = opened([SMALL, "memory"], kv_events={"publishers": [publisher]})
    llm.generate(PROMPT, ONE_TOKEN)
    steps_until(llm, lambda: len(kept(EVENTS, "memory")) == 6)
    steps_until(llm, lambda: len(kept(EVENTS, "small")) == 4)
    missing = kept(EVENTS, "memory") - kept(EVENTS, "small")
    before = len(EVENTS)
    llm.reset_prefix_cache()
    (again,) = llm.generate(PROMPT, ONE_TOKEN)
    assert again.num_cached_tokens == 24
    steps_until(llm, lambda: missing & kept_at_any_time(EVENTS[before:], "small"))
    assert len(kept(EVENTS, "memory")) == 6
    assert len(kept(EVENTS, "small")) == 4


def test_totals_go_on_after_a_sleep_that_releases_the_weights(opened):
    llm = opened(["memory"])
    llm.generate(PROMPT, ONE_TOKEN)
    steps_until(llm, lambda: llm.engines.scheduler_stats().kv_tiers["memory"].stored_blocks >= 6)
    before = llm.engines.scheduler_stats().kv_tiers["memory"]
    llm.sleep(2)
    llm.wake_up()
    assert llm.engines.scheduler_stats().kv_tiers["memory"].stored_blocks == before.stored_blocks
    llm.generate("another prompt of many tokens", ONE_TOKEN)
    steps_until(
        llm,
        lambda: (
            llm.engines.scheduler_stats().kv_tiers["memory"].stored_blocks
            >= before.stored_blocks + 7
        ),
    )


def num_saved(llm):
    tier = llm.engines.scheduler_stats().kv_tiers["memory"]
    return tier.stored_blocks + tier.dropped_blocks


@pytest.mark.parametrize("chunk", [8, 2048])
def test_prompts_that_do_not_fit_together_still_find_their_beginnings(opened, chunk):
    size = 48 * (128 + 8 * BLOCK)  # a header, and a token id per place
    llm = opened(
        ["memory"],
        plugin={"memory": {"size_bytes": size}},
        scheduler={"max_num_batched_tokens": chunk},
    )
    num_cached = []
    saved = 0
    for number in range(8):
        prompt = {"prompt_token_ids": [number % 2, *range(29 * BLOCK)]}
        (output,) = llm.generate([prompt], ONE_TOKEN)
        num_cached.append(output.num_cached_tokens)
        llm.reset_prefix_cache()
        saved += 29 - output.num_cached_tokens // BLOCK
        steps_until(llm, lambda saved=saved: num_saved(llm) >= saved)
    # Threads note uses, perhaps after the next prompt came: by age alone, none would be found.
    assert sum(num_cached[4:]) >= 4 * 8 * BLOCK, num_cached


@pytest.mark.parametrize(
    ("required", "message"),
    [
        (["redis"], r"plugin.stores.required: expected one of .*\(failing, memory\), got 'redis'"),
        (["memory"], None),
        (["memory", "failing"], r"plugin.stores.required: KV store 'failing': .*lookup.. failed: "),
    ],
)
def test_a_store_that_is_required_must_answer_at_start(opened, required, message):
    failing = {"use": "support.plugins.failing_store:FailingStore", "name": "failing"}
    settings = {"plugin": {"stores": {"required": required}}}
    if message is None:
        assert opened([failing, "memory"], **settings).generate("x", ONE_TOKEN)
    else:
        with pytest.raises(ConfigError, match=message):
            opened([failing, "memory"], **settings)


def test_blocks_of_an_engine_with_another_secret_are_computed(opened, tmp_path):
    secret = tmp_path / "secret"
    store = {"disk": {"path": str(tmp_path / "kv"), "size_bytes": 1 << 24}}

    def hits(text):
        secret.write_text(text * 32)
        secret.chmod(0o600)
        llm = opened(["disk"], plugin={"stores": {"mac_key_file": str(secret)}, **store})
        (output,) = llm.generate(PROMPT, ONE_TOKEN)
        llm.close()
        return output.num_cached_tokens

    assert [hits("a"), hits("a"), hits("b"), hits("b")] == [0, 24, 0, 24]
