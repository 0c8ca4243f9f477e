"""A misbehaving plugin of each phase is found by reading a trace."""

from __future__ import annotations

import pytest
from support.planted import FORCED, WANTED

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config
from hardpoint.toolkit.trace import Trace, trace_of

PLANTED = ["WrongSign", "Harsh", "Inverted", "KeepsOne", "Forces", "Bans", "Raises", "Digits"]


@pytest.fixture(scope="module")
def llm(scripted):
    enable = [f"support.planted:{name}" for name in PLANTED]
    with LLM(config=scripted_config(scripted, {"plugins": {"enable": enable}})) as opened:
        yield opened


def trace(llm, plugin_args=None, **fields):
    arguments = {"temperature": 0.0, "max_tokens": 4, "plugin_args": plugin_args or {}, **fields}
    (completion,) = llm.debug.trace("say abc", SamplingParams(**arguments)).completions
    return completion


def who_dropped_the_best(token):
    """The change after which the model's likeliest token is no longer the likeliest."""
    best = max(token.candidates, key=lambda candidate: candidate.logit)
    for place, change in enumerate(token.changes):
        values = {candidate.token_id: candidate.logits[place] for candidate in token.candidates}
        if values[best.token_id] is None or values[best.token_id] < max(
            value for value in values.values() if value is not None
        ):
            return change
    return None


def test_without_changes_there_is_nobody_to_find(llm):
    traced = trace(llm)
    assert traced.text == " abc"
    assert [token.changes for token in traced.tokens] == [[]] * 4
    assert [token.rank for token in traced.tokens] == [1] * 4
    assert all(token.draw.greedy and token.draw.sampler == "default" for token in traced.tokens)


def test_a_bias_of_the_wrong_sign(llm):
    traced = trace(llm, {"wrong_sign": {"amount": 200.0}})
    assert traced.text == " abc"  # an x was to come
    (change,) = traced.tokens[0].changes
    assert (change.phase, change.plugin) == ("bias", "wrong_sign")
    assert change.package == "module support.planted"
    (moved,) = change.tokens
    assert (moved.token_id, moved.text) == (WANTED, "x")
    assert moved.after == pytest.approx(moved.before - 200, abs=0.01)
    assert change.num_changed == 1


def test_a_penalty_that_is_too_harsh(llm):
    traced = trace(llm, {"harsh": {}}, max_tokens=6)
    assert traced.text[:4] == " abc"
    assert traced.text[4] != " "
    token = traced.tokens[4]
    change = who_dropped_the_best(token)
    assert (change.phase, change.plugin, change.num_changed) == ("penalty", "harsh", 4)
    assert {changed.text for changed in change.tokens} == {" ", "a", "b", "c"}
    assert token.rank > 1


def test_a_temperature_that_turns_logits_round(llm):
    traced = trace(llm, {"inverted": {}}, temperature=0.7, seed=1)
    change = who_dropped_the_best(traced.tokens[0])
    assert (change.phase, change.plugin) == ("temperature", "inverted")
    assert change.num_changed == 257
    assert traced.tokens[0].draw.seed == 1


def test_a_truncation_that_keeps_one(llm):
    traced = trace(llm, {"keeps_one": {}})
    assert traced.text != " abc"
    change = who_dropped_the_best(traced.tokens[0])
    assert (change.phase, change.plugin) == ("truncate", "keeps_one")
    assert (change.num_removed, change.num_left) == (256, 1)
    assert change.tokens[0].text == " "
    assert change.tokens[0].after is None
    assert [candidate.probability for candidate in traced.tokens[0].candidates][:2] == [1.0, 0.0]
    assert traced.tokens[0].rank == 2


def test_a_forced_token(llm):
    traced = trace(llm, {"forces": {}})
    assert traced.text == "zzzz"
    change = who_dropped_the_best(traced.tokens[0])
    assert (change.phase, change.plugin, change.num_left) == ("force", "forces", 1)
    assert traced.tokens[0].token_id == FORCED


def test_a_mask_names_the_part_that_made_it(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2)
    (traced,) = llm.debug.trace("say abc", params, tags={"only": "digits"}).completions
    assert traced.text.isdigit()
    change = who_dropped_the_best(traced.tokens[0])
    assert (change.phase, change.plugin, change.num_left) == ("mask", "digits", 10)
    assert change.package == "module support.planted"


def test_a_grammar_is_named(llm):
    traced = trace(llm, structured={"choice": ["yes", "no"]})
    change = who_dropped_the_best(traced.tokens[0])
    assert (change.phase, change.plugin) == ("mask", "structured_output")
    assert change.package.startswith("hardpoint ")
    assert change.num_left == 2


def test_changes_come_in_the_order_in_which_they_were_made(llm):
    traced = trace(
        llm,
        {"wrong_sign": {"amount": 1.0}, "forces": {}},
        temperature=0.5,
        seed=3,
        top_k=5,
        structured={"regex": "[a-z ]+"},
        presence_penalty=0.5,
        logit_bias={FORCED: 100.0},
    )
    names = [change.plugin for change in traced.tokens[1].changes]
    assert (names[0], set(names[1:3])) == ("structured_output", {"wrong_sign", "logit_bias"})
    assert names[3:] == ["penalties", "temperature", "top_k", "forces"]


def test_a_request_that_ends_with_an_error_shows_what_led_to_it(llm):
    traced = trace(llm, {"bans": {}})
    assert traced.finish_reason == "error"
    assert "it left no token to choose" in traced.error
    (token,) = traced.tokens
    assert token.token_id is None
    (change,) = token.changes
    assert (change.phase, change.plugin, change.num_left) == ("mask", "bans", 0)
    assert "no token was chosen" in Trace(completions=[traced]).table()


def test_a_fault_costs_the_trace_of_others_nothing(llm):
    plain = SamplingParams(temperature=0.0, max_tokens=4, include=["trace"])
    failing = SamplingParams(
        temperature=0.0, max_tokens=4, include=["trace"], plugin_args={"raises": {}}
    )
    first, second = llm.generate(["say abc", "say abc"], [plain, failing])
    (good,), (bad,) = trace_of(first).completions, trace_of(second).completions
    assert first.outputs[0].text == " abc"
    assert [token.changes for token in good.tokens] == [[]] * 4
    assert "two is too many" in bad.error
    assert [token.token_id for token in bad.tokens][:2] == second.outputs[0].token_ids[:2]
    assert bad.tokens[2].token_id is None
    assert [change.plugin for change in bad.tokens[0].changes] == ["raises"]
