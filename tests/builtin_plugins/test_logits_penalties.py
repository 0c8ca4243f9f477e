"""penalties, against the definitions written out per token."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.fake_rows import build, prepared, request_of, rows_of
from support.searching import examples

from hardpoint.builtin_plugins.logits.penalties import Penalties, TokenCounts
from hardpoint.plugins import Phase

VOCAB = 10
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalty = st.floats(-2, 2, width=32)


def naive(logits, prompt, output, presence, frequency, repetition):
    """CTRL's repetition penalty, then OpenAI's two, one token at a time."""
    result, counted = list(logits), Counter(output)
    for token in range(len(result)):
        if token in counted or token in prompt:
            value = result[token]
            result[token] = value / repetition if value > 0 else value * repetition
        if token in counted:
            result[token] -= counted[token] * frequency + presence
    return result


@given(
    cases=st.lists(
        st.tuples(
            tokens, tokens, penalty, penalty, st.floats(0.25, 4, width=32) | st.just(1.0), tokens
        ),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_equals_the_definition_and_advance_equals_start(cases, data):
    """Rows of several requests, each first started, then advanced by more tokens."""
    value = st.floats(-30, 30, width=32) | st.just(-math.inf)
    logits = [data.draw(st.lists(value, min_size=VOCAB, max_size=VOCAB)) for _ in cases]
    processor = build(Penalties, "penalties", VOCAB)
    requests, expected = [], []
    for prompt, output, presence, frequency, repetition, _ in cases:
        requests.append(
            request_of(
                processor,
                prompt,
                output,
                presence_penalty=presence,
                frequency_penalty=frequency,
                repetition_penalty=repetition,
            )
        )
    rows = rows_of(processor, *requests)
    for row, request, (prompt, output, presence, frequency, repetition, more) in zip(
        logits, requests, cases, strict=True
    ):
        for token in more:
            request.state["penalties"] = processor.advance(request.state["penalties"], token)
        expected.append(naive(row, prompt, output + more, presence, frequency, repetition))
    got = processor.apply(torch.tensor(logits), rows)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_apply_does_not_change_state():
    processor = build(Penalties, "penalties", VOCAB)
    rows = rows_of(processor, request_of(processor, [1], [2, 2], frequency_penalty=1.0))
    once = processor.apply(torch.ones(1, VOCAB), rows)
    assert torch.equal(processor.apply(torch.ones(1, VOCAB), rows), once)
    assert once[0, 2] == -1.0


def test_without_a_repetition_penalty_the_prompt_is_not_even_counted():
    processor = build(Penalties, "penalties", VOCAB)
    state = processor.start(request_of(processor, [1, 3], [2], presence_penalty=1.0))
    assert state.tokens.tolist() == [2]
    state = processor.start(request_of(processor, [1, 3], [2], repetition_penalty=2.0))
    assert state.tokens.tolist() == [1, 3, 2]
    assert state.counts.tolist() == [0, 0, 1]


def test_rows_without_any_token_stay_as_they_are():
    processor = build(Penalties, "penalties", VOCAB)
    rows = rows_of(processor, request_of(processor, presence_penalty=1.0))
    assert torch.equal(processor.apply(torch.ones(1, VOCAB), rows), torch.ones(1, VOCAB))


@given(prompt=tokens, output=st.lists(st.integers(0, 300), max_size=400))
@examples(8)
def test_counts_equal_counting_again(prompt, output):
    grown = TokenCounts(prompt, [])
    for token in output:
        grown.add(token)
    fresh = TokenCounts(prompt, output)
    assert dict(zip(grown.tokens.tolist(), grown.counts.tolist(), strict=True)) == dict(
        zip(fresh.tokens.tolist(), fresh.counts.tolist(), strict=True)
    )


@pytest.mark.parametrize("value", [1e-31, 1e31, 5e-324])
def test_refuses_a_repetition_penalty_that_float32_cannot_hold(value):
    with pytest.raises(ValueError, match="expected a repetition_penalty from 1e-30 to 1e"):
        prepared(Penalties, repetition_penalty=value)


@pytest.mark.parametrize("value", [1e-30, 1.2, 1e30])
def test_allowed_repetition_penalties_stay_finite(value):
    processor = build(Penalties, "penalties", 3)
    arguments = prepared(Penalties, repetition_penalty=value)
    assert arguments.repetition_penalty == value
    rows = rows_of(processor, request_of(processor, [0, 1, 2], repetition_penalty=value))
    result = processor.apply(torch.tensor([[50.0, -50.0, -math.inf]]), rows)
    assert result[0, :2].isfinite().all()
    assert result[0, 2] == -math.inf


def test_runs_in_its_phase():
    assert Penalties.phase is Phase.PENALTY
    assert Penalties.params_fields == (
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
