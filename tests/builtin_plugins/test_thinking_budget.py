"""thinking_budget: names follow the checklist of the thinking budget."""

from __future__ import annotations

import copy

import pytest
import torch
from support.builtins.fake_rows import applied, request_of, rows_of, survivors
from support.builtins.thinking_harness import LONG_END, LONG_START, Request, markers, processor

from hardpoint.builtin_plugins.logits.thinking_budget import ThinkingBudget
from hardpoint.plugins import (
    Op,
    Phase,
    PrepareContext,
    ReasoningMarkers,
    SamplingParams,
)


class TestTracking:
    def test_without_a_budget_nothing_is_tracked(self):
        request = Request(prompt=[1], budget=None)
        assert request.state is None
        assert request.accept(7, 7, 7, 7).forced is None

    def test_an_empty_end_marker_disables_the_budget(self):
        request = Request(prompt=[1, 7, 7, 7, 7], end=[])
        assert request.state is None
        assert request.accept(7).forced is None

    def test_an_empty_start_marker_is_never_found(self):
        assert Request(prompt=[1, 7, 7, 7, 7], start=[]).accept(7).forced is None

    def test_a_marker_longer_than_the_text_is_not_found(self):
        assert Request(prompt=[3], budget=0, start=LONG_START).forced is None

    def test_the_last_start_after_the_last_end_begins_inside_thinking(self):
        assert Request(prompt=[1, 7, 2, 7, 1, 7], budget=2).drafted(7, 7) == [None, 2, 2]
        assert Request(prompt=[1, 7, 2, 7], budget=0).forced is None
        assert Request(prompt=[2, 1], budget=0).forced == 2

    def test_prompt_tokens_after_the_start_marker_count(self):
        request = Request(prompt=[1, 7, 7], budget=3)
        assert request.run(8, 8, 8) == [8, 2, 8]

    def test_of_several_start_markers_in_the_prompt_the_last_counts(self):
        assert Request(prompt=[1, 7, 7, 7, 7, 1, 7], budget=2).run(8, 8) == [8, 2]

    @pytest.mark.parametrize(("prompt", "budget"), [([1], 0), ([1, 7, 7], 2), ([1, 7, 7, 7, 7], 2)])
    def test_a_budget_used_up_by_the_prompt_begins_forced(self, prompt, budget):
        assert Request(prompt=prompt, budget=budget).forced == 2

    def test_without_prompt_ids_it_begins_outside_thinking(self):
        request = Request(prompt=[], budget=0)
        assert request.run(7, 1, 7, 7) == [7, 1, 2, 7]

    def test_markers_are_found_on_one_scale_across_prompt_and_output(self):
        request = Request(prompt=[7, 1], budget=1, start=LONG_START, end=LONG_END)
        assert request.run(3, 7, 7) == [3, 7, 2]
        inside = Request(prompt=[1, 3, 2, 4], budget=9, start=LONG_START, end=LONG_END)
        assert not inside.accept(2, 5).state.position.inside

    def test_a_preempted_request_goes_on_where_it_was(self):
        for tokens in ([1, 7], [1, 7, 7, 7, 2], [1, 7, 2, 1], [7, 1, 7, 7, 7]):
            went_on = Request(prompt=[8]).accept(*tokens)
            assert Request(prompt=[8], output=tokens).state == went_on.state

    def test_equal_bytes_across_tokens_are_no_marker(self):
        # As 64-bit message, 256 and 1 hold the bytes of 1 and of 2**56 a byte further on.
        assert Request(prompt=[256, 0], start=[1], budget=0).forced is None
        assert Request(prompt=[1, 256, 0], start=[1], budget=2).forced == 2

    def test_a_long_prompt_is_read_at_once(self):
        request = Request(prompt=[1, *[7] * 100_000, 2, 1, 7], budget=2)
        assert request.drafted(7) == [None, 2]


class TestStateMachine:
    def test_tokens_before_thinking_do_not_use_up_the_budget(self):
        assert Request(budget=1).run(7, 7, 7, 7, 1, 7, 7) == [7, 7, 7, 7, 1, 7, 2]

    def test_the_budget_is_the_number_of_free_tokens(self):
        assert Request(prompt=[1], budget=3).run(7, 8, 9, 7, 7) == [7, 8, 9, 2, 7]

    def test_budget_zero_ends_thinking_at_once(self):
        assert Request(budget=0).run(1, 7, 8) == [1, 2, 8]

    def test_natural_closing_forces_nothing(self):
        request = Request(prompt=[1], budget=3)
        assert request.run(7, 2, 7, 7, 7, 7) == [7, 2, 7, 7, 7, 7]

    def test_natural_closing_with_the_last_token_forces_nothing(self):
        assert Request(prompt=[1], budget=2).run(7, 2, 8, 8, 8) == [7, 2, 8, 8, 8]

    def test_a_second_block_gets_the_whole_budget_again(self):
        request = Request(prompt=[1], budget=2)
        assert request.run(7, 7, 0, 8, 1, 7, 7, 0, 8) == [7, 7, 2, 8, 1, 7, 7, 2, 8]

    def test_a_start_marker_inside_thinking_buys_no_more(self):
        assert Request(prompt=[1], budget=3).run(7, 1, 7, 7) == [7, 1, 7, 2]

    def test_a_multi_token_end_marker_is_forced_one_token_at_a_time(self):
        request = Request(prompt=[1], budget=1, end=LONG_END)
        assert request.run(7, 0, 0, 0, 0, 8) == [7, 2, 4, 2, 5, 8]

    def test_an_end_marker_already_begun_is_completed(self):
        request = Request(prompt=[1], budget=3, end=LONG_END)
        assert request.run(7, 2, 4, 0, 0, 8) == [7, 2, 4, 2, 5, 8]

    def test_a_mismatch_falls_back_to_the_longest_beginning(self):
        request = Request(prompt=[1], budget=3, end=LONG_END)  # 2 4 2 5
        assert request.accept(2, 4, 2).forced == 5
        assert request.accept(4).forced == 2  # 2 4 of the second try stay
        assert request.accept(9).forced == 2  # nothing stays
        assert request.accept(2).forced == 4

    def test_a_marker_that_overlaps_itself_is_found(self):
        request = Request(prompt=[1], budget=9, end=[2, 2, 5])
        assert not request.accept(2, 2, 2, 5).state.position.inside

    def test_the_longer_of_two_markers_that_end_together_counts(self):
        assert Request(prompt=[3, 2], start=[3, 2], end=[2], budget=0).forced == 2
        assert Request(start=[3, 2], end=[2], budget=0).accept(3, 2).forced == 2
        assert Request(prompt=[1, 3, 1], start=[1], end=[3, 1], budget=0).forced is None
        assert not Request(prompt=[1], start=[1], end=[3, 1]).accept(3, 1).state.position.inside


class TestForcingLogits:
    def rows(self, processor, *budgets, output=(7,)):
        requests = [
            request_of(processor, [1], output, markers=markers(), thinking_token_budget=budget)
            for budget in budgets
        ]
        return rows_of(processor, *requests)

    def test_it_runs_last_and_for_greedy_requests_too(self):
        assert ThinkingBudget.phase is Phase.FORCE
        assert not ThinkingBudget.argmax_invariant
        assert ThinkingBudget.params_fields == ("thinking_token_budget",)

    def test_only_the_forced_rows_and_token_change(self):
        it = processor()
        logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
        edits = it.edits(self.rows(it, 5, 1, None))
        result = applied(edits, logits)
        assert (edits.row, edits.token, edits.op) == ((1,), (2,), Op.SET)
        assert result[1, 2] == 1e9
        result[1, 2] = logits[1, 2]
        assert torch.equal(result, logits)

    def test_its_probability_is_one_in_float32_even_where_it_was_dropped(self):
        it = processor()
        logits = torch.full((1, 10), -torch.inf)
        logits[0, 7] = 100.0
        probs = applied(it.edits(self.rows(it, 0)), logits).softmax(-1)
        assert probs[0].tolist() == [float(token == 2) for token in range(10)]

    def test_with_no_request_ending_the_logits_are_untouched(self):
        it = processor()
        rows = self.rows(it, 5, None, 9)
        assert it.edits(rows) is None
        assert survivors(applied(it.edits(rows), torch.zeros(3, 10))) == [list(range(10))] * 3

    def test_forcing_never_leaks_into_the_next_step(self):
        it = processor()
        rows = self.rows(it, 1, 5)
        assert it.edits(rows).row == (0,)
        for request in rows.requests:
            request.state["thinking_budget"] = it.advance(request.state["thinking_budget"], 2)
        assert it.edits(rows) is None

    def test_edits_change_no_state(self):
        it = processor()
        rows = self.rows(it, 1, 5)
        before = copy.deepcopy(rows.states())
        first, second = it.edits(rows), it.edits(rows)
        assert (first.row, first.token) == (second.row, second.token)
        assert rows.states() == before


def thinker(start=(1,), end=(2,)):
    return ReasoningMarkers(start=(start,), end=(end,))


def prepare(reasoning=None, params=None, vocab_size=10, **arguments):
    context = PrepareContext(
        options=ThinkingBudget.Options(),
        params=params or SamplingParams(),
        prompt_token_ids=[1],
        stop_token_ids=[],
        vocab_size=vocab_size,
        tokenizer=None,
        reasoning=reasoning,
    )
    return ThinkingBudget.prepare(ThinkingBudget.Arguments(**arguments), context)


class TestPrepare:
    def test_takes_the_markers_of_the_reasoning_parser(self):
        arguments = prepare(thinker((1, 3), (4,)), thinking_token_budget=5)
        assert (arguments.thinking_token_budget, arguments.start) == (5, [])
        assert arguments.markers == thinker((1, 3), (4,))

    def test_without_a_parser_a_budget_is_refused(self):
        message = r"a budget of 5 needs .* set reasoning\.parser \(\"think_tags\", for example\)"
        with pytest.raises(ValueError, match=message):
            prepare(thinking_token_budget=5)

    def test_without_a_budget_no_parser_is_needed(self):
        assert prepare().markers == ReasoningMarkers()

    def test_markers_given_with_the_request_are_taken(self):
        arguments = prepare(thinker(), thinking_token_budget=5, start=[7], end=[8])
        assert arguments.markers == thinker((7,), (8,))
        assert prepare(thinking_token_budget=5, start=[7], end=[8]).markers == thinker((7,), (8,))

    def test_markers_outside_the_vocabulary_are_refused(self):
        with pytest.raises(ValueError, match=r"token ids under 10 \(the vocabulary\), got 10"):
            prepare(thinker(end=(2, 10)), thinking_token_budget=5)

    def test_equal_markers_are_refused(self):
        with pytest.raises(ValueError, match=r"an end marker other than the start .* got \[7\]"):
            prepare(thinking_token_budget=5, start=[7], end=[7])

    def test_an_end_marker_that_the_request_does_not_allow_is_refused(self):
        allowed = SamplingParams(allowed_token_ids=[3, 4])
        with pytest.raises(ValueError, match=r"end marker \[2\] is not among allowed_token_ids"):
            prepare(thinker(), allowed, thinking_token_budget=5)
        assert prepare(thinker(end=(3,)), allowed, thinking_token_budget=5).markers.end == ((3,),)
