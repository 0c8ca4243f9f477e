"""What outputs carry: log-probabilities, events, and who ended, each told once."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Connector, Rig, next_token

from hardpoint.plugins import EngineCoreEventType, FinishReason, PrefillStats
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import TokenLogprobs


def entries(*positions):
    return [None if p == 0 else TokenLogprobs([p], [0.0], 1) for p in positions]


def positions(output):
    return [entry and entry.token_ids[0] for entry in output.prompt_logprobs or ()]


def test_logprobs_come_with_their_tokens():
    rig = Rig()
    rig.add("a")
    rig.add("b")
    outputs = rig.update(rig.plan(), logprobs={"a": entries(7)})
    assert outputs["a"].logprobs == entries(7)
    assert outputs["b"].logprobs is None


def test_logprobs_of_tokens_that_are_thrown_away_are_thrown_away():
    rig = Rig(num_draft_tokens=3)
    rig.add("a", prompt=[7, 7], max_tokens=2)
    rig.step()
    history = [7, 7, *rig.tokens["a"]]
    rig.scheduler.update_drafts({"a": [next_token(history)]})
    outputs = rig.update(rig.plan(), logprobs={"a": entries(5, 6)})
    assert len(outputs["a"].new_token_ids) == 1
    assert outputs["a"].logprobs == entries(5)


def test_logprobs_of_a_prompt_come_as_they_are_computed():
    rig = Rig(max_num_batched_tokens=3)
    rig.add("a", prompt=7, params={"prompt_logprobs": 0})
    told = []
    for chunk in ((0, 1, 2, 3), (4, 5, 6), ()):
        outputs = rig.update(rig.plan(), prompt_logprobs={"a": entries(*chunk)})
        told.append(positions(outputs["a"]) if "a" in outputs else None)
    assert told == [[None, 1, 2, 3], [4, 5, 6], []]


def test_logprobs_of_a_prompt_that_is_computed_again_are_told_once():
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", prompt=7, params={"prompt_logprobs": 0})
    outputs = rig.update(rig.plan(), prompt_logprobs={"a": entries(0, 1, 2, 3, 4)})
    assert positions(outputs["a"]) == [None, 1, 2, 3, 4]
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    assert rig.update(rig.plan(), prompt_logprobs={"a": entries(0, 1, 2, 3, 4)}) == {}
    outputs = rig.update(rig.plan(), prompt_logprobs={"a": entries(5, 6)})
    assert positions(outputs["a"]) == [5, 6]


def test_events_are_told_once():
    rig = Rig(surroundings={"log_stats": True})
    rig.add("a")
    types = [[e.type for e in rig.update(rig.plan())["a"].events] for _ in range(2)]
    assert types == [[EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED], []]


def test_events_of_one_that_never_ran_come_with_its_end():
    rig = Rig(surroundings={"log_stats": True})
    rig.add("a")
    outputs = rig.abort("a", reason=FinishReason.ABORT)
    assert [event.type for event in outputs["a"].events] == [EngineCoreEventType.QUEUED]


def test_finished_ids_are_told_to_a_client_once():
    rig = Rig(surroundings={"report_finished": True})
    rig.add("a", max_tokens=1)
    rig.add("b")
    told = []
    for _ in range(2):
        plan = rig.plan()
        outputs = rig.scheduler.update(plan, rig.executor.execute(plan))
        told.append(outputs[0].finished_requests)
    assert told == [{"a"}, None]


def test_a_deadline_after_the_end_is_nothing():
    rig = Rig()
    rig.add("a", max_tokens=1, timeout=5.0)
    rig.step()
    rig.clock.advance(100)
    rig.step()
    assert rig.records[-1].timed_out == []
    assert rig.ends["a"].finish_reason is FinishReason.LENGTH


# How a prompt was computed


def prefills(rig, most=50):
    """What outputs tell of prompts until everybody has ended, by request."""
    told = {}
    for _ in range(most):
        if not rig.scheduler.has_requests():
            return told
        for name, output in rig.update(rig.plan()).items():
            if output.prefill_stats is not None:
                assert output.num_cached_tokens == output.prefill_stats.num_cached_tokens
                told.setdefault(name, []).append((output.prefill_stats, rig.tokens[name][:]))
    raise AssertionError("it does not end")


def test_a_prompt_in_one_step():
    rig = Rig()
    rig.add("a", prompt=9, max_tokens=3)
    ((stats, tokens),) = prefills(rig)["a"]
    assert stats == PrefillStats(9, 0, 0)
    assert len(tokens) == 1


def test_a_prompt_in_chunks_is_told_of_with_the_last_one():
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", prompt=10, max_tokens=3)
    for _ in range(2):
        assert rig.update(rig.plan()) == {}
    assert [stats for stats, _ in prefills(rig)["a"]] == [PrefillStats(10, 0, 0)]


def test_cached_tokens_are_counted():
    rig = Rig()
    for name in ("a", "b"):
        rig.add(name, prompt=list(range(10)), max_tokens=2)
        ((stats, _),) = prefills(rig)[name]
    assert stats == PrefillStats(10, 8, 0)


@pytest.mark.parametrize("steps", [1, 4])
def test_preemption_does_not_make_it_told_twice(steps):
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", prompt=10, max_tokens=5)
    told = []
    for _ in range(steps):
        told += [o.prefill_stats for o in rig.update(rig.plan()).values()]
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    told += [stats for stats, _ in prefills(rig).get("a", [])]
    assert [stats for stats in told if stats] == [PrefillStats(10, 0, 0)]


def connected(**found):
    return Rig(surroundings={"connector": Connector(**found)})


def fill(rig, name, num_tokens):
    request = rig.live(name)
    rig.executor.fill(request, rig.cache.block_ids(request), num_tokens)


@pytest.mark.parametrize("beside", [True, False])
def test_tokens_that_a_connector_brought_are_counted(beside):
    rig = connected(a=(8, beside))
    rig.add("a", prompt=list(range(10)), max_tokens=2)
    plan = rig.plan()
    fill(rig, "a", 8)
    outputs = rig.update(plan, kv_loaded=frozenset({"a"} if beside else ()))
    outputs = outputs or rig.update(rig.plan())
    assert outputs["a"].prefill_stats == PrefillStats(10, 8, 8)


def test_tokens_that_were_not_brought_after_all_are_not():
    rig = connected(a=(8, False))
    rig.add("a", prompt=list(range(10)), max_tokens=2)
    plan = rig.plan()
    fill(rig, "a", 8)
    second = rig.cache.block_ids(rig.live("a"))[0][1]
    assert rig.update(plan, invalid_block_ids=frozenset({second})) == {}
    ((stats, _),) = prefills(rig)["a"]
    assert stats == PrefillStats(10, 4, 4)


# What else workers tell


def test_trace_headers_come_with_the_last_output():
    rig = Rig()
    headers = {"traceparent": "00-1"}
    rig.add("a", max_tokens=2, trace_headers=headers)
    rig.add("b", max_tokens=2)
    rig.add("c", trace_headers=headers)
    outputs = rig.update(rig.plan())
    assert [outputs[name].trace_headers for name in "abc"] == [None, None, None]
    assert rig.update(rig.plan())["a"].trace_headers == headers
    assert rig.abort("c", reason=FinishReason.ABORT)["c"].trace_headers == headers


def test_damaged_logits_and_chosen_experts_come_with_the_tokens():
    rig = Rig()
    rig.add("a")
    rig.add("b")
    outputs = rig.update(rig.plan(), num_nans_in_logits={"a": 3}, routed_experts={"b": [[1, 2]]})
    assert [outputs[name].num_nans_in_logits for name in "ab"] == [3, 0]
    assert [outputs[name].routed_experts for name in "ab"] == [None, [[1, 2]]]
    outputs = rig.update(rig.plan())
    assert (outputs["a"].num_nans_in_logits, outputs["b"].routed_experts) == (0, None)


def test_a_request_that_pools_ends_with_what_came_of_it_and_no_token():
    rig = Rig(surroundings={"log_stats": True}, max_num_batched_tokens=8)
    rig.add("p", prompt=6, pooling_params=PoolingParams(task="embed"))
    rig.add("a", prompt=6, max_tokens=2)
    plan = rig.plan()
    result = rig.executor.execute(plan)
    del result.sampled_token_ids["p"]
    outputs = rig.update(plan, result, pooler_output={"p": [0.5, 1.5]})
    output = outputs["p"]
    assert (output.pooling_output, output.new_token_ids) == ([0.5, 1.5], [])
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None
    assert output.prefill_stats == PrefillStats(6, 0, 0)
    assert [event.type for event in output.events] == [1, 2]
    assert rig.live("p") is None
    rig.run()
    assert len(rig.tokens["a"]) == 2
    assert rig.tokens["p"] == []


# Results that were not taken whole


class Breaks(dict):
    """Is interrupted when it is asked for "b"."""

    def get(self, key, default=None):
        if key == "b":
            raise KeyboardInterrupt
        return super().get(key, default)


def test_a_plan_may_be_given_up_in_the_middle_of_its_results():
    rig = Rig()
    rig.add("a", max_tokens=3)
    rig.add("b", max_tokens=3)
    plan = rig.plan()
    result = rig.executor.execute(plan)
    result.sampled_token_ids = Breaks(result.sampled_token_ids)
    with pytest.raises(KeyboardInterrupt):
        rig.scheduler.update(plan, result)
    rig.scheduler.plan_lost(plan)
    rig.run()
    assert [len(rig.tokens[name]) for name in "ab"] == [2, 3]  # one output of "a" went with it
    assert {str(end.finish_reason) for end in rig.ends.values()} == {"length"}


def test_giving_up_a_plan_whose_results_were_taken_changes_nothing():
    rig = Rig()
    rig.add("a", max_tokens=3)
    plan = rig.step()
    rig.scheduler.plan_lost(plan)
    assert rig.step().num_scheduled_tokens == {"a": 1}
    assert len(rig.run()["a"]) == 3
    assert rig.scheduler.stats().num_preemptions == 0
