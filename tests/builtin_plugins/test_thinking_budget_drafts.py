"""thinking_budget with draft tokens, and against a naive scan of the whole history."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st
from support.builtins.thinking_harness import LONG_END, Request, forced
from support.searching import examples


class TestDrafts:
    """Drafts are accepted by `advance` and tried on a `fork`."""

    def test_forcing_starts_where_the_budget_ends_among_the_drafts(self):
        request = Request(prompt=[1], budget=10).accept(*[7] * 8)
        assert request.drafted(7, 7, 7) == [None, None, 2, 2]

    def test_the_bonus_row_is_forced_when_the_budget_ends_with_the_drafts(self):
        request = Request(prompt=[1], budget=10).accept(*[7] * 7)
        assert request.drafted(7, 7, 7) == [None, None, None, 2]

    def test_drafts_that_reach_the_budget_change_nothing_until_accepted(self):
        request = Request(prompt=[1], budget=3).accept(7)
        before = copy.deepcopy(request.state)
        assert request.drafted(7, 7, 7) == [None, None, 2, 2]
        assert request.state == before
        assert request.forced is None

    def test_all_drafts_accepted_across_the_budgets_end(self):
        request = Request(prompt=[1], budget=2)
        assert request.drafted(7, 7, 2, 8) == [None, None, 2, None, None]
        assert request.accept(7, 7, 2, 8).drafted(9) == [None, None]

    def test_drafts_partly_accepted(self):
        request = Request(prompt=[1], budget=2)
        request.drafted(7, 7, 2)
        request.accept(8)  # the first draft was rejected and replaced
        assert request.drafted(7, 2) == [None, 2, None]

    def test_a_rejected_forced_end_is_forced_again_later(self):
        request = Request(prompt=[1], budget=2)
        assert request.drafted(7, 7, 2) == [None, None, 2, None]
        request.accept(7)  # verification stopped before the end marker
        assert request.forced is None
        assert request.accept(8).forced == 2

    def test_a_rejected_bonus_token_is_forced_again(self):
        request = Request(prompt=[1], budget=2)
        assert request.drafted(7, 7) == [None, None, 2]
        request.accept(7, 7)
        assert request.forced == 2
        request.accept(9)  # came from elsewhere
        assert request.forced == 2

    def test_drafts_that_match_the_marker_advance_it(self):
        request = Request(prompt=[1], budget=1, end=LONG_END).accept(7)
        assert request.drafted(2, 4, 9) == [2, 4, 2, 2]
        request.accept(2, 4)
        assert request.drafted(2, 5, 8) == [2, 5, None, None]

    def test_a_draft_that_closes_thinking_frees_the_rows_after_it(self):
        request = Request(prompt=[1], budget=2)
        assert request.drafted(2, 7, 7, 7) == [None] * 5

    def test_a_draft_that_opens_thinking_counts_those_after_it(self):
        assert Request(budget=1).drafted(1, 7, 7) == [None, None, 2, 2]

    def test_a_fork_is_independent(self):
        request = Request(prompt=[1], budget=1)
        forked = request.processor.advance(request.processor.fork(request.state), 7)
        other = request.processor.advance(request.processor.fork(request.state), 2)
        assert forced(request.processor, forked) == 2
        assert forced(request.processor, other) is None


def naive(prompt, output, start, end, budget):
    """Return the forced token, computed from the whole history."""
    history = [*prompt, *output]

    def ends(marker):
        size = len(marker)
        return [at for at in range(size, len(history) + 1) if history[at - size : at] == marker]

    opened, closed = ends(start), ends(end)
    both = set(opened) & set(closed)
    if len(start) > len(end):
        closed = [at for at in closed if at not in both]
    else:
        opened = [at for at in opened if at not in both]
    last_closed = max(closed, default=0)
    opened = [at for at in opened if at > last_closed]
    if not opened:
        return None
    in_prompt = [at for at in opened if at <= len(prompt)]
    if len(history) - (in_prompt[-1] if in_prompt else opened[0]) < budget:
        return None
    begun = max(n for n in range(len(end)) if history[len(history) - n :] == end[:n])
    return end[begun]


marker = st.lists(st.integers(0, 2), min_size=1, max_size=4)
text = st.lists(st.integers(0, 3), max_size=30)


@examples(8)
@given(marker, marker, st.integers(0, 5), text, text)
def test_agrees_with_a_scan_of_the_whole_history(start, end, budget, prompt, output):
    if start == end:
        return
    request = Request(prompt, budget=budget, start=start, end=end)
    for length in range(len(output) + 1):
        wanted = naive(prompt, output[:length], start, end, budget)
        assert request.forced == wanted
        assert Request(prompt, output[:length], budget, start, end).state == request.state
        if length < len(output):
            request.accept(output[length])


@examples(8)
@given(marker, marker, st.integers(0, 5), text, text, st.data())
def test_drafts_give_what_single_steps_give(start, end, budget, prompt, tokens, data):
    """Whatever is drafted and however much of it is accepted."""
    if start == end:
        return
    request = Request(prompt, budget=budget, start=start, end=end)
    seen = []
    while tokens:
        size = data.draw(st.integers(0, 4))
        drafts = [data.draw(st.sampled_from([token, 3])) for token in tokens[:size]]
        rows = request.drafted(*drafts)
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        for row in range(num_accepted + 1):
            assert rows[row] == naive(prompt, seen + tokens[:row], start, end, budget)
        seen += tokens[: num_accepted + 1]
        request.accept(*tokens[: num_accepted + 1])
        tokens = tokens[num_accepted + 1 :]
