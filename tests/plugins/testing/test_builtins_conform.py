"""Every built-in logits processor passes the public conformance kit."""

from __future__ import annotations

from hypothesis import strategies as st
from support.kit_suites import assert_tests_builtins
from support.searching import kit_examples

from hardpoint.builtin_plugins.logits.bias import LogitBias
from hardpoint.builtin_plugins.logits.callables import RequestCallables
from hardpoint.builtin_plugins.logits.masks import AllowedTokenIds, BadWords, MinTokens
from hardpoint.builtin_plugins.logits.penalties import Penalties
from hardpoint.builtin_plugins.logits.temperature import Temperature
from hardpoint.builtin_plugins.logits.thinking_budget import ThinkingBudget
from hardpoint.builtin_plugins.logits.truncation import MinP, TopK, TopP
from hardpoint.plugins import SamplingParams
from hardpoint.testing import LogitsProcessorSuite

pytest_plugins = ["hardpoint.testing"]

tokens = st.integers(0, 4) | st.integers(0, 130)


class TestMinP(LogitsProcessorSuite):
    examples = kit_examples()
    processor = MinP
    arguments = st.builds(MinP.Arguments, min_p=st.floats(0, 1))


class TestTopK(LogitsProcessorSuite):
    examples = kit_examples()
    processor = TopK
    arguments = st.builds(TopK.Arguments, top_k=st.integers(-1, 140))


class TestTopP(LogitsProcessorSuite):
    examples = kit_examples()
    processor = TopP
    arguments = st.builds(TopP.Arguments, top_p=st.floats(0, 1, exclude_min=True))
    vocab_size = 1100  # wider than the first two looks at the best tokens
    budget_us_per_row = 10_000.0  # in flat logits no token can be dropped, so all are sorted


class TestTemperature(LogitsProcessorSuite):
    examples = kit_examples()
    processor = Temperature
    arguments = st.builds(Temperature.Arguments, temperature=st.floats(0, 1e300))


class TestLogitBias(LogitsProcessorSuite):
    examples = kit_examples()
    processor = LogitBias
    arguments = st.builds(
        LogitBias.Arguments,
        logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=5),
    )


class TestPenalties(LogitsProcessorSuite):
    examples = kit_examples()
    processor = Penalties
    arguments = st.builds(
        Penalties.Arguments,
        presence_penalty=st.just(0.0) | st.floats(-2, 2),
        frequency_penalty=st.just(0.0) | st.floats(-2, 2),
        repetition_penalty=st.just(1.0) | st.floats(1e-30, 1e30),
    )


class TestAllowedTokenIds(LogitsProcessorSuite):
    examples = kit_examples()
    processor = AllowedTokenIds
    arguments = st.builds(
        AllowedTokenIds.Arguments, allowed_token_ids=st.lists(tokens, min_size=1, max_size=5)
    )


class TestBadWords(LogitsProcessorSuite):
    examples = kit_examples()
    processor = BadWords
    arguments = st.builds(
        BadWords.Arguments,
        sequences=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
    )


class TestMinTokens(LogitsProcessorSuite):
    examples = kit_examples()
    processor = MinTokens
    arguments = st.builds(MinTokens.Arguments, min_tokens=st.integers(0, 20))


class TestThinkingBudget(LogitsProcessorSuite):
    examples = kit_examples()
    processor = ThinkingBudget
    arguments = st.builds(
        ThinkingBudget.Arguments,
        thinking_token_budget=st.none() | st.integers(0, 8),
        start=st.sampled_from([[0], [0, 1], [1, 1]]),
        end=st.sampled_from([[2], [3, 0], [0, 3, 0]]),
    )


def repeat_less(prompt_ids, output_ids, logits):
    logits[[*prompt_ids[:1], *output_ids[-2:]]] -= 1.5
    return logits


def prefer_even(output_ids, logits):
    return logits + len(output_ids) % 2


class TestRequestCallables(LogitsProcessorSuite):
    examples = kit_examples()
    processor = RequestCallables
    params = st.builds(
        SamplingParams,
        max_tokens=st.none(),
        logits_processors=st.sampled_from([[repeat_less], [prefer_even, repeat_less]]),
    )


def test_every_builtin_has_a_suite():
    assert_tests_builtins("logits_processors", "processor", globals())
