"""Drafts: verification, acceptance, rejection and counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import Simulator, next_token, reference
from support.searching import examples

from hardpoint.plugins import FinishReason


def guess(history, count):
    """Return the tokens that really follow."""
    tokens = list(history)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(history) :]


def drafting(prompt=4, **fields):
    sim = Simulator(num_draft_tokens=4)
    sim.add("a", prompt=[7] * prompt, **fields)
    sim.step()
    return sim, [7] * prompt + sim.tokens["a"]


def test_right_drafts_are_all_accepted_and_one_token_more_is_sampled():
    sim, history = drafting()
    drafts = guess(history, 3)
    sim.scheduler.update_drafts({"a": drafts})
    outputs = sim.update(sim.plan())
    assert outputs["a"].new_token_ids == guess(history, 4)
    live = sim.live("a")
    assert (live.num_tokens, live.num_computed_tokens) == (9, 8)


def test_positions_of_rejected_drafts_are_computed_again():
    sim, history = drafting()
    first = guess(history, 1)
    sim.scheduler.update_drafts({"a": [*first, -1, -2]})
    outputs = sim.update(sim.plan())
    assert outputs["a"].new_token_ids == guess(history, 2)
    assert sim.live("a").num_computed_tokens == 6
    plan = sim.plan()
    assert plan.cached_requests.num_computed_tokens == [6]
    assert plan.num_scheduled_tokens == {"a": 1}


def test_drafts_are_counted():
    sim, history = drafting()
    sim.scheduler.update_drafts({"a": [*guess(history, 1), -1, -2]})
    sim.step()
    stats = sim.scheduler.stats()
    assert (stats.num_drafts, stats.num_accepted_drafts) == (3, 1)
    assert (stats.num_verified_drafts, stats.num_accepted_by_position) == (1, [1])
    history = [7] * 4 + sim.tokens["a"]
    sim.scheduler.update_drafts({"a": guess(history, 2)})
    sim.step()
    sim.scheduler.update_drafts({"a": [-1]})
    sim.step()
    stats = sim.scheduler.stats()
    assert (stats.num_drafts, stats.num_accepted_drafts) == (6, 3)
    assert (stats.num_verified_drafts, stats.num_accepted_by_position) == (3, [2, 1])


def test_there_are_no_more_drafts_than_allowed():
    sim, _ = drafting()
    sim.scheduler.update_drafts({"a": [1, 2, 3, 4, 5, 6]})
    assert sim.step().draft_token_ids == {"a": [1, 2, 3, 4]}


def test_drafts_are_for_one_step():
    sim, _ = drafting()
    sim.scheduler.update_drafts({"a": [1, 2]})
    sim.step()
    assert sim.step().draft_token_ids == {}


def test_an_unfinished_prompt_takes_no_drafts():
    sim = Simulator(num_draft_tokens=4, max_num_batched_tokens=4)
    sim.add("a", prompt=10)
    sim.step()
    sim.scheduler.update_drafts({"a": [1, 2]})
    assert sim.step().num_scheduled_tokens == {"a": 4}


def test_a_waiting_request_takes_no_drafts():
    sim = Simulator(num_draft_tokens=4, max_num_seqs=1)
    sim.add("a")
    sim.add("b")
    sim.step()
    sim.scheduler.update_drafts({"b": [1, 2]})
    assert sim.live("b").draft_token_ids == []


def test_accepted_drafts_beyond_the_end_are_thrown_away():
    sim, history = drafting(max_tokens=3)
    sim.scheduler.update_drafts({"a": guess(history, 4)})
    outputs = sim.update(sim.plan())
    assert outputs["a"].new_token_ids == guess(history, 2)
    assert outputs["a"].finish_reason is FinishReason.LENGTH


def test_a_stop_token_among_the_accepted_ends_it_there():
    history = [7, 7, 7, 7]
    stop = guess(history, 3)[2]
    sim = Simulator(num_draft_tokens=4)
    sim.add("a", prompt=history, eos_token_ids=[stop])
    sim.step()
    sim.scheduler.update_drafts({"a": guess([*history, *sim.tokens["a"]], 4)})
    outputs = sim.update(sim.plan())
    assert outputs["a"].new_token_ids == guess(history, 3)[1:]
    assert outputs["a"].finish_reason is FinishReason.STOP


def test_rejected_drafts_leave_nothing_in_the_prefix_cache():
    sim = Simulator(num_draft_tokens=4, block_size=4)
    sim.add("a", prompt=[7] * 5, max_tokens=4)
    sim.step()
    sim.scheduler.update_drafts({"a": [1, 2, 3]})  # would fill the second block
    sim.step()
    sim.run()
    sim.add("b", prompt=[*[7] * 5, *sim.tokens["a"][:1], 1, 2, 3, 4])
    assert sim.step().new_requests[0].num_computed_tokens == 4


@examples(8)
@given(st.lists(st.integers(0, 4), min_size=1), st.lists(st.booleans(), min_size=1), st.booleans())
def test_tokens_are_the_same_with_any_drafts_accepted_or_not(counts, right, tight):
    sim = Simulator(
        num_draft_tokens=4,
        num_lookahead_tokens=2,
        blocks=7 if tight else 64,
        block_size=4,
        max_num_batched_tokens=9,
    )
    adds = [(name, {"prompt": [i] * (5 + i), "max_tokens": 9}) for i, name in enumerate("abc")]
    for name, fields in adds:
        sim.add(name, **fields)
    for i in range(200):
        if not sim.scheduler.has_requests():
            break
        sim.step()
        drafts = {}
        for name in "abc":
            if live := sim.live(name):
                history = live.token_ids(0, live.num_tokens)
                drafts[name] = guess(history, counts[i % len(counts)])
                if drafts[name] and not right[i % len(right)]:
                    drafts[name][-1] = -5
        sim.scheduler.update_drafts(drafts)
    assert sim.tokens == reference(*adds)
    assert sim.cache.num_free_blocks == sim.cache.num_blocks
