"""Parts that draft tokens: errors at the start, and errors that fail only their own requests."""

from __future__ import annotations

import re

import pytest
from support.driving import FINAL, alone, drafting, run

from hardpoint import PluginError, SamplingParams
from hardpoint.plugins import ConfigError, EngineHalf
from hardpoint.testing import ScriptedDrafts, scripted_engine

HERE = "support.plugins.drafted"
DRAFTS = "hardpoint.testing:ScriptedDrafts"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **FINAL)

REFUSED = {
    "a batch-level processor": (
        {"plugins": {"enable": [DRAFTS, "support.plugins.faulty:Whole"]}},
        PluginError,
        "'whole'.*does not declare supports_drafts.* together with speculation",
    ),
    "a scheduler": (
        {"scheduler": {"use": f"{HERE}:TakesNoDrafts"}},
        ConfigError,
        "takes_no_drafts.* takes no drafts, which .*'scripted_drafts'",
    ),
}


@pytest.mark.parametrize(("extra", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_with_drafts_is_refused_at_the_start_by_name(
    scripted, extra, error, message
):
    with pytest.raises(error, match=message):
        scripted_engine(scripted, {"plugins": {"enable": [DRAFTS]}} | extra)


BROKEN = {
    "DraftsForOthers": r"its drafts\(\) gave drafts of 'other', which does not use it",
    "TooManyDrafts": r"its drafts\(\) gave 3 drafts of 'used-.+', expected at most 2",
    "NoSuchToken": r"its drafts\(\) gave the draft 257 of 'used-.+', expected token ids in 0..256",
}


@pytest.mark.parametrize(("name", "message"), BROKEN.items())
def test_wrong_drafts_end_the_requests_of_their_part_alone(open_engine, name, message):
    plain = open_engine()
    expected = run(plain, [("other one", [5], GREEDY)])
    plain.close()
    reference = f"support.broken.step_parts:{name}"
    engine = open_engine({"plugins": {"enable": [reference]}})
    for request_id, prompt in (("used", [2]), ("other one", [5])):
        engine.add_request(request_id, prompt, GREEDY)
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    (failed,) = ended["used"].outputs
    assert failed.finish_reason == "error"
    assert reference in failed.error
    assert re.search(message, failed.error), failed.error
    assert ended["other one"].outputs[0].token_ids == expected["other one"][0][0][1]


@pytest.mark.parametrize("fails_in", ["advance", "apply", "choice"])
def test_wrong_drafts_for_which_a_processor_fails_end_no_request(open_engine, fails_in):
    strict = f"{HERE}:Strict"
    jobs = [("strict", [1, 2], GREEDY), ("plain", [7, 8], GREEDY)]
    engine = open_engine()
    expected = alone(engine, jobs)
    engine.close()
    tokens = expected["strict"][0][0][1]
    arguments = {"strict": {"known": tokens, "fails_in": fails_in}}
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, plugin_args=arguments, **FINAL
    )
    config = drafting(jobs, expected, [strict], right=0.6)
    engine = open_engine(config)
    assert run(engine, [("strict", [1, 2], params), jobs[1]]) == expected
    stats = engine.call_utility("scheduler_stats")
    assert 0 < stats.num_accepted_drafts < stats.num_drafts


def test_of_two_parts_the_first_drafts_are_used(scripted):
    jobs = [("r", [3, 4], GREEDY)]
    engine = scripted_engine(scripted)
    expected = alone(engine, jobs)
    engine.close()
    accepted = {}
    for order in (("right", "wrong"), ("wrong", "right")):
        enable = [{"use": DRAFTS, "name": name} for name in order]
        (options,) = drafting(jobs, expected)["plugin"].values()
        plugin = {"right": options | {"right": 1.0, "count": 2}, "wrong": options | {"right": 0.0}}
        engine = scripted_engine(scripted, {"plugins": {"enable": enable}, "plugin": plugin})
        assert run(engine, jobs) == expected
        accepted[order[0]] = engine.call_utility("scheduler_stats").num_accepted_drafts
        engine.close()
    assert accepted["wrong"] == 0
    assert accepted["right"] >= 6


class Idle(EngineHalf):
    def drafts(self):
        raise AssertionError("asked, though num_draft_tokens is 0")


def test_a_part_that_declares_no_drafts_is_not_asked(open_engine, monkeypatch):
    monkeypatch.setattr(ScriptedDrafts, "engine_half", lambda self, context: Idle())
    engine = open_engine({"plugins": {"enable": [DRAFTS]}})
    assert run(engine, [("r", [3, 4], GREEDY)])["r"][0][0][3] == "length"
    assert engine.call_utility("scheduler_stats").num_drafts == 0


def test_a_part_may_verify_the_drafts_of_others(open_engine):
    jobs = [("r", [3, 4], GREEDY), ("s", [5], GREEDY)]
    expected = alone(open_engine(), jobs)
    accepted = {}
    for enable in ([], [f"{HERE}:FirstDraft"]):
        engine = open_engine(drafting(jobs, expected, enable, right=1.0, count=3))
        assert run(engine, jobs) == expected
        stats = engine.call_utility("scheduler_stats")
        accepted[len(enable)] = stats.num_accepted_drafts / stats.num_drafts
    assert accepted[0] > 0.7
    assert 0.2 < accepted[1] < 0.4


def test_a_part_that_accepts_wrong_drafts_is_named(open_engine):
    jobs = [("r", [3, 4], GREEDY)]
    expected = alone(open_engine(), jobs)
    config = drafting(jobs, expected, [f"{HERE}:FirstDraft"], right=0.0)
    config["plugin"]["first_draft"] = {"wrong": True}
    engine = open_engine(config)
    message = r"first_draft.*: its verify_drafts\(\) gave \[1\], expected drafts that equal the tok"
    with pytest.raises(PluginError, match=message):
        run(engine, jobs)


def test_drafts_need_a_part_that_verifies_them(open_engine):
    plugins = {"enable": [DRAFTS], "disable": ["speculation"]}
    with pytest.raises(ConfigError, match="drafts tokens, and none verifies drafts; .*speculation"):
        open_engine({"plugins": plugins})
