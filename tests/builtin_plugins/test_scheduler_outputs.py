"""What outputs carry: log-probabilities, events, and who ended, each told once."""

from __future__ import annotations

from scheduler_harness import Rig, next_token

from hardpoint.plugins import EngineCoreEventType, FinishReason, TokenLogprobs


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
