"""`StepCost`: the time of a step, and the number of tokens that fit into a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.plugins import StepCost

COST = StepCost(
    step=5, single_query=1, context_token=0.001, prompt=2, prompt_token=0.5, prompt_pair=0.01
)


def test_a_step_takes_the_sum_of_its_work():
    taken = COST.milliseconds(
        single_queries=3, context=1000, prompts=2, prompt_tokens=30, prompt_pairs=400
    )
    assert taken == 5 + 3 + 1 + 4 + 15 + 4
    assert COST.milliseconds() == 5


def test_a_token_of_a_prompt_attends_to_all_before_it():
    assert COST.prompt_milliseconds(20, computed=100) == 2 + 10 + 0.01 * 20 * 110


@given(
    st.floats(-10, 1e4),
    st.integers(0, 10_000),
    st.integers(1, 10_000),
    st.sampled_from([0, 1e-6, 0.01, 7.0]),
    st.sampled_from([0, 1e-6, 0.5, 7.0]),
)
def test_as_many_tokens_as_fit_into_the_time(milliseconds, computed, most, pair, token):
    cost = StepCost(prompt=2, prompt_token=token, prompt_pair=pair)
    fit = cost.prompt_tokens_within(milliseconds, computed, most)
    assert 0 <= fit <= most
    if fit:
        assert cost.prompt_milliseconds(fit, computed) <= milliseconds * (1 + 1e-9)
    if fit < most:
        assert cost.prompt_milliseconds(fit + 1, computed) >= milliseconds * (1 - 1e-9)


@pytest.mark.parametrize("cost", [StepCost(), StepCost(is_trained=True)])
def test_what_costs_nothing_fits_entirely(cost):
    assert cost.prompt_tokens_within(1, 0, 500) == 500
    assert cost.error is None
