"""Contents of outputs: log-probabilities, events, and ended requests, each reported once."""

from __future__ import annotations

import numpy as np
import pytest
from support.builtins.scheduler_harness import Connector, Simulator, next_token

from hardpoint.plugins import EngineCoreEventType, FinishReason, PrefillStats
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import TokenLogprobs


def entries(*positions):
    return [None if p == 0 else TokenLogprobs([p], [0.0], 1) for p in positions]


def positions(output):
    return [entry and entry.token_ids[0] for entry in output.prompt_logprobs or ()]


def test_logprobs_come_with_their_tokens():
    sim = Simulator()
    sim.add("a")
    sim.add("b")
    outputs = sim.update(sim.plan(), logprobs={"a": entries(7)})
    assert outputs["a"].logprobs == entries(7)
    assert outputs["b"].logprobs is None


def test_logprobs_of_tokens_that_are_thrown_away_are_thrown_away():
    sim = Simulator(num_draft_tokens=3)
    sim.add("a", prompt=[7, 7], max_tokens=2)
    sim.step()
    history = [7, 7, *sim.tokens["a"]]
    sim.scheduler.update_drafts({"a": [next_token(history)]})
    outputs = sim.update(sim.plan(), logprobs={"a": entries(5, 6)})
    assert len(outputs["a"].new_token_ids) == 1
    assert outputs["a"].logprobs == entries(5)


def test_logprobs_of_a_prompt_come_as_they_are_computed():
    sim = Simulator(max_num_batched_tokens=3)
    sim.add("a", prompt=7, params={"prompt_logprobs": 0})
    reported = []
    for chunk in ((0, 1, 2, 3), (4, 5, 6), ()):
        outputs = sim.update(sim.plan(), prompt_logprobs={"a": entries(*chunk)})
        reported.append(positions(outputs["a"]) if "a" in outputs else None)
    assert reported == [[None, 1, 2, 3], [4, 5, 6], []]


def test_logprobs_of_a_prompt_that_is_computed_again_are_reported_once():
    sim = Simulator(max_num_batched_tokens=4)
    sim.add("a", prompt=7, params={"prompt_logprobs": 0})
    outputs = sim.update(sim.plan(), prompt_logprobs={"a": entries(0, 1, 2, 3, 4)})
    assert positions(outputs["a"]) == [None, 1, 2, 3, 4]
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    assert sim.update(sim.plan(), prompt_logprobs={"a": entries(0, 1, 2, 3, 4)}) == {}
    outputs = sim.update(sim.plan(), prompt_logprobs={"a": entries(5, 6)})
    assert positions(outputs["a"]) == [5, 6]


def test_events_are_reported_once():
    sim = Simulator(context={"log_stats": True})
    sim.add("a")
    types = [[e.type for e in sim.update(sim.plan())["a"].events] for _ in range(2)]
    assert types == [[EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED], []]


def test_events_of_one_that_never_ran_come_with_its_end():
    sim = Simulator(context={"log_stats": True})
    sim.add("a")
    outputs = sim.abort("a", reason=FinishReason.ABORT)
    assert [event.type for event in outputs["a"].events] == [EngineCoreEventType.QUEUED]


def test_finished_ids_are_reported_to_a_client_once():
    sim = Simulator(context={"report_finished": True})
    sim.add("a", max_tokens=1)
    sim.add("b")
    reported = []
    for _ in range(2):
        plan = sim.plan()
        outputs = sim.scheduler.update(plan, sim.executor.execute(plan))
        reported.append(outputs[0].finished_requests)
    assert reported == [{"a"}, None]


def test_a_deadline_after_the_end_is_nothing():
    sim = Simulator()
    sim.add("a", max_tokens=1, timeout=5.0)
    sim.step()
    sim.clock.advance(100)
    sim.step()
    assert sim.records[-1].timed_out == []
    assert sim.ends["a"].finish_reason is FinishReason.LENGTH


# How a prompt was computed


def prefills(sim, limit=50):
    """Prompt log-probabilities in outputs until all requests have ended, by request."""
    reported = {}
    for _ in range(limit):
        if not sim.scheduler.has_requests():
            return reported
        for name, output in sim.update(sim.plan()).items():
            if output.prefill_stats is not None:
                assert output.num_cached_tokens == output.prefill_stats.num_cached_tokens
                reported.setdefault(name, []).append((output.prefill_stats, sim.tokens[name][:]))
    raise AssertionError("it does not end")


def test_a_prompt_in_one_step():
    sim = Simulator()
    sim.add("a", prompt=9, max_tokens=3)
    ((stats, tokens),) = prefills(sim)["a"]
    assert stats == PrefillStats(9, 0, 0)
    assert len(tokens) == 1


def test_a_prompt_in_chunks_is_reported_with_the_last_one():
    sim = Simulator(max_num_batched_tokens=4)
    sim.add("a", prompt=10, max_tokens=3)
    for _ in range(2):
        assert sim.update(sim.plan()) == {}
    assert [stats for stats, _ in prefills(sim)["a"]] == [PrefillStats(10, 0, 0)]


def test_cached_tokens_are_counted():
    sim = Simulator()
    for name in ("a", "b"):
        sim.add(name, prompt=list(range(10)), max_tokens=2)
        ((stats, _),) = prefills(sim)[name]
    assert stats == PrefillStats(10, 8, 0)


@pytest.mark.parametrize("steps", [1, 4])
def test_preemption_does_not_make_it_reported_twice(steps):
    sim = Simulator(max_num_batched_tokens=4)
    sim.add("a", prompt=10, max_tokens=5)
    reported = []
    for _ in range(steps):
        reported += [o.prefill_stats for o in sim.update(sim.plan()).values()]
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    reported += [stats for stats, _ in prefills(sim).get("a", [])]
    assert [stats for stats in reported if stats] == [PrefillStats(10, 0, 0)]


def connected(**matches):
    return Simulator(context={"transfers": Connector(**matches)})


def fill(sim, name, num_tokens):
    request = sim.live(name)
    sim.executor.fill(request, sim.cache.block_ids(request), num_tokens)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tokens_that_a_connector_brought_are_counted(asynchronous):
    sim = connected(a=(8, asynchronous))
    sim.add("a", prompt=list(range(10)), max_tokens=2)
    plan = sim.plan()
    fill(sim, "a", 8)
    outputs = sim.update(plan, kv_loaded=frozenset({"a"} if asynchronous else ()))
    outputs = outputs or sim.update(sim.plan())
    assert outputs["a"].prefill_stats == PrefillStats(10, 8, 8)


def test_tokens_that_were_not_brought_after_all_are_not():
    sim = connected(a=(8, False))
    sim.add("a", prompt=list(range(10)), max_tokens=2)
    plan = sim.plan()
    fill(sim, "a", 8)
    second = sim.cache.block_ids(sim.live("a"))[0][1]
    assert sim.update(plan, invalid_block_ids=frozenset({second})) == {}
    ((stats, _),) = prefills(sim)["a"]
    assert stats == PrefillStats(10, 4, 4)


# Other reports of workers


def test_trace_headers_come_with_the_last_output():
    sim = Simulator()
    headers = {"traceparent": "00-1"}
    sim.add("a", max_tokens=2, trace_headers=headers)
    sim.add("b", max_tokens=2)
    sim.add("c", trace_headers=headers)
    outputs = sim.update(sim.plan())
    assert [outputs[name].trace_headers for name in "abc"] == [None, None, None]
    assert sim.update(sim.plan())["a"].trace_headers == headers
    assert sim.abort("c", reason=FinishReason.ABORT)["c"].trace_headers == headers


def test_damaged_logits_come_with_the_tokens():
    sim = Simulator()
    sim.add("a")
    sim.add("b")
    outputs = sim.update(sim.plan(), num_nans_in_logits={"a": 3})
    assert [outputs[name].num_nans_in_logits for name in "ab"] == [3, 0]
    assert sim.update(sim.plan())["a"].num_nans_in_logits == 0


def test_experts_of_each_position_come_once_and_in_order():
    sim = Simulator(max_num_batched_tokens=8)
    sim.add("a", prompt=20)
    sent = []

    def step():
        plan = sim.plan()
        (start,) = [new.num_computed_tokens for new in plan.new_requests] or [
            *plan.cached_requests.num_computed_tokens
        ]
        count = plan.num_scheduled_tokens["a"]
        rows = np.arange(start, start + count, dtype=np.int32).reshape(count, 1, 1)
        output = sim.update(plan, routed_experts={"a": rows}).get("a")
        if output is not None and output.routed_experts is not None:
            sent.append(output.routed_experts.flatten().tolist())

    step()
    assert sent == [list(range(8))]
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    step()
    step()
    step()
    assert sent == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    step()
    assert sent[3:] == [[20]]


def test_rejected_drafts_have_no_experts():
    sim = Simulator(num_draft_tokens=4)
    sim.add("a", prompt=[1, 2, 3])
    sim.step()
    right = next_token([1, 2, 3, *sim.tokens["a"]])
    sim.scheduler.update_drafts({"a": [right, -1, -2]})
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"a": 4}
    rows = np.arange(4, dtype=np.int32).reshape(4, 1, 1)
    output = sim.update(plan, routed_experts={"a": rows})["a"]
    assert len(output.new_token_ids) == 2
    # The three of the prompt were not handed in.
    assert output.routed_experts.flatten().tolist() == [-1, -1, -1, 0, 1]


def test_positions_from_the_cache_have_no_experts():
    sim = Simulator()
    sim.add("a", prompt=list(range(20)), max_tokens=1)
    sim.update(sim.plan())
    sim.add("b", prompt=list(range(20)), max_tokens=1)
    plan = sim.plan()
    cached = plan.new_requests[0].num_computed_tokens
    assert cached
    rows = np.full((20 - cached, 2, 3), 5, np.int32)
    routed = sim.update(plan, routed_experts={"b": rows})["b"].routed_experts
    assert routed.shape == (20, 2, 3)
    assert (routed[:cached] == -1).all()
    assert (routed[cached:] == 5).all()


def test_a_request_that_pools_ends_with_what_came_of_it_and_no_token():
    sim = Simulator(context={"log_stats": True}, max_num_batched_tokens=8)
    sim.add("p", prompt=6, pooling_params=PoolingParams(task="embed"))
    sim.add("a", prompt=6, max_tokens=2)
    plan = sim.plan()
    result = sim.executor.execute(plan)
    del result.sampled_token_ids["p"]
    outputs = sim.update(plan, result, pooler_output={"p": [0.5, 1.5]})
    output = outputs["p"]
    assert (output.pooling_output, output.new_token_ids) == ([0.5, 1.5], [])
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None
    assert output.prefill_stats == PrefillStats(6, 0, 0)
    assert [event.type for event in output.events] == [1, 2]
    assert sim.live("p") is None
    sim.run()
    assert len(sim.tokens["a"]) == 2
    assert sim.tokens["p"] == []


# Results that were not taken whole


class Breaks(dict):
    """Is interrupted when it is asked for "b"."""

    def get(self, key, default=None):
        if key == "b":
            raise KeyboardInterrupt
        return super().get(key, default)


def test_a_plan_may_be_given_up_in_the_middle_of_its_results():
    sim = Simulator()
    sim.add("a", max_tokens=3)
    sim.add("b", max_tokens=3)
    plan = sim.plan()
    result = sim.executor.execute(plan)
    result.sampled_token_ids = Breaks(result.sampled_token_ids)
    with pytest.raises(KeyboardInterrupt):
        sim.scheduler.update(plan, result)
    sim.lose(plan)
    sim.run()
    assert [len(sim.tokens[name]) for name in "ab"] == [2, 3]  # one output of "a" went with it
    assert {str(end.finish_reason) for end in sim.ends.values()} == {"length"}


def test_giving_up_a_plan_whose_results_were_taken_changes_nothing():
    sim = Simulator()
    sim.add("a", max_tokens=3)
    plan = sim.step()
    sim.scheduler.plan_lost(plan)
    assert sim.step().num_scheduled_tokens == {"a": 1}
    assert len(sim.run()["a"]) == 3
    assert sim.scheduler.stats().num_preemptions == 0
