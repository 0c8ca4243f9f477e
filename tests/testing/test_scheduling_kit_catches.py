"""Schedulers and policies with one mistake each fail their rule, and in words that help."""

from __future__ import annotations

import inspect
import re

import pytest
from support.broken import pauses, policies
from support.broken import schedulers as broken

from hardpoint.testing import EvictionPolicySuite, SchedulerSuite, SchedulingPolicySuite
from hardpoint.testing import suite as kit_suite

SEED = 20_240_601

# scheduler, test that it fails, rule, words of the message
SCHEDULERS = [
    (broken.NoContract, "contract", "the contract", "add `contract = 1` to its class body"),
    (broken.OverBudget, "limits", "limits", r"\d+ tokens are scheduled, max_num_batched_tokens is"),
    (broken.TooManyRun, "limits", "limits", r"\d requests run, max_num_seqs is \d"),
    (broken.SplitsPrompts, "limits", "limits", "chunked_prefill is off|gets . tokens in"),
    (broken.MisCounts, "limits", "the plan", "total_num_scheduled_tokens is ., the sum is"),
    (broken.SchedulesNothing, "limits", "the plan", "new and cached requests are"),
    (broken.SkipsPositions, "limits", "positions", "tokens of '.' are computed, the worker has"),
    (broken.HidesBlocks, "limits", "blocks", "but its blocks have room for"),
    (broken.Picky, "limits", "refusals", "can run is refused: max_tokens: expected anything but 3"),
    (broken.MisCountsLive, "limits", "counts", r"num_unfinished_requests is 2, \d requests"),
    (broken.KeepsNoRecord, "limits", "the step record", "was not recorded"),
    (broken.RecordsLate, "limits", "the step record", "record of step 2 says step = 1, not 2"),
    (broken.NeverWaits, "limits", "why it waits", "got no tokens, but has no reason"),
    (broken.Starves, "limits", "progress", r"after \d+ steps \['.'.*\] have not ended"),
    (broken.KeepsVictims, "blocks", "the plan", "are preempted, and scheduled as if they were not"),
    (broken.KeepsVictims, "victims", "the plan", "are preempted, and scheduled as if"),
    (broken.HidesVictims, "blocks", "the (batch|step)", "the worker has it already|plan does not"),
    (broken.FreesTwice, "blocks", "blocks", "are held by .* are free, but there are"),
    (broken.MixesSalts, "blocks", "content", "has cache salt '.', but|but the block holds"),
    (broken.OneClient, "outputs", "outputs", "which client 1 sent, goes to client 0"),
    (broken.SaysTwice, "outputs", "the end", "has ended, and gets another output"),
    (broken.LeaksOnAbort, "ends", "blocks", "blocks are still held|which holds blocks already"),
    (broken.RepeatsEnds, "ends", "the end", "ended: it was told before"),
    (broken.StandingClock, "ends", "the end", "are scheduled, but their deadline has passed"),
    (broken.ForgetsTheLast, "ends", "no crash", "(Index|Key)Error: .*finish_requests, line"),
    (broken.ForgetsFaults, "ends", "progress|why", "have not ended|which cannot be"),
    (broken.AcceptsAllDrafts, "drafts", "tokens", "alone it would get"),
    (broken.OldDrafts, "drafts", "the plan", "those handed in for its next step are"),
    (broken.DropsLateResults, "asynchronous", "tokens|progress|positions", ""),
    (broken.TrustsFailedLoads, "transfers", "content|tokens", "could not be loaded|got the tokens"),
    (broken.Impatient, "grammars", "grammars", "run, but their grammars are not ready"),
    (broken.EncodesTooMuch, "encoder", "limits", "encoder tokens are in one step"),
    (broken.AnyAdapters, "adapters", "limits", "are in one step, max_loras is 1"),
    (broken.ForgetsLostPlans, "lost_plans", "the (end|batch)", "ended before step|preempted, but"),
    (broken.ForgetsToRewind, "lost_plans", "content", "was ever written|holds anoth|of group"),
    (broken.KeepsComputed, "resets", "content", "nothing was ever written there"),
    (broken.SwapsInSecret, "policy_swap", "the policy", "are live, but|of which added"),
    (pauses.PausesNewAlone, "pauses", "pause", r"are scheduled in step \d+ under PAUSED_ALL"),
    (pauses.PausesAllAlone, "pauses", "pause", "under PAUSED_NEW, and have never begun"),
    (pauses.HoldsTheBegun, "pauses", "pause", r"False under PAUSED_NEW, but \[.*\] have begun"),
    (pauses.HoldsTheLoaded, "pauses", "pause", r"False under PAUSED_NEW, but \[.*\] have begun"),
    (pauses.NeverIdle, "pauses", "pause", r"has_requests\(\) is True, though nobody may have tok"),
    (pauses.StaysPaused, "pauses", "progress", r"after \d+ steps \['.'.*\] have not ended"),
    (pauses.StopsTheClock, "pauses", "pause|the end", "deadline (of .* )?has passed"),
    (pauses.ForgetsLoads, "pauses", "pause", "the KV connector has not ended what it loads or"),
    (pauses.PausesInSecret, "pauses", "why it waits", "PAUSED_ALL holds '.', but it has no reason"),
    (broken.TakesTheEndless, "refusals", "refusals", "of max_model_len tokens was not refused"),
    (broken.TakesEverybody, "refusals", "refusals", "a third request was taken, max_waiting is 2"),
    (broken.OverBudget, "together", "limits", r"\d+ tokens are scheduled, max_num_batched_tok"),
]  # fmt: skip

# policy, test that it fails, rule, words
POLICIES = [
    (policies.PolicyWithoutContract, "contract", "the contract", "add `contract = 1`"),
    (policies.MixedKeys, "keys", "answers", "which do.* not compare: TypeError"),
    (policies.KeysOfNothing, "keys", "keys", "NaN is in no order"),
    (policies.KeysOfTime, "keys", "keys", "time and chance have no place in a key"),
    (policies.KeysOfChance, "keys", "keys", "time and chance have no place in a key"),
    (policies.KeysByCalls, "keys", "keys", "and asked again"),
    (policies.KeyFails, "keys", "answers", "raised KeyError: 'tenant'"),
    (policies.ListsAsGroups, "groups", "answers", "which does not hash"),
    (policies.GroupsOfChance, "groups", "groups", "of the same now"),
    (policies.NoVictim, "victim", "answers", "returned None, which does not run"),
    (policies.VictimOfChance, "victim", "victim", "decide by the requests"),
    (policies.PopsVictims, "victim", "victim|answers", "changed the sequence|which does not run"),
    (policies.SaysNo, "admit", "answers", "returned False, which is neither None nor words"),
    (policies.Meddles, "reads_only", "reading", "scheduled.. changed priority of <Request 'r0.0'"),
    (policies.RefusesAlways, "progress", "the policy", "hold nobody back for ever"),
    (policies.NoVictim, "progress", "answers", "which does not run"),
    (policies.LosesItself, "takes_over", "no crash", "KeyError: 'had'"),
    (policies.ForgetsBooks, "state", "books", "export all that group_key|takes over|had"),
    (policies.SecretBooks, "state", "books", "what is no plain data"),
    (policies.Hoards, "memory", "memory", "drop in finished.. what you noted of a request"),
    (policies.SlowKeys, "speed", "speed", "the budget is 100"),
]  # fmt: skip

# eviction policy, test that it fails, rule, words
EVICTIONS = [
    (policies.EvictionWithoutContract, "contract", "the contract", "add `contract = 1`"),
    (policies.ForgetsTaken, "candidates", "eviction", "is no candidate"),
    (policies.EvictsTwice, "candidates", "eviction", "with a block twice"),
    (policies.EvictsTooFew, "candidates", "eviction", r"evict\(\d\) returned .*: 3 blocks"),
    (policies.EvictsTooMany, "candidates", "eviction", r"evict\(\d\) returned .*: \d blocks"),
    (policies.EvictsNothing, "candidates", "eviction", "returned None: .* not iterable"),
    (policies.RaisesOnDepth, "candidates", "eviction", "released.*raised IndexError: depth"),
    (policies.KeepsOne, "everything", "eviction", "LookupError: the last one stays"),
    (policies.ForgetsTaken, "in_cache", "eviction", "which is no candidate"),
    (policies.EvictsTooMany, "in_cache", "eviction", r"returned more than \d blocks?"),
    (policies.RemembersAll, "memory", "memory", "drop a block in taken.. and in evict"),
    (policies.SortsAll, "speed", "speed", "do not look at all candidates in each call"),
]  # fmt: skip

RIGHT = [
    (SchedulingPolicySuite, "policy", policies.Fcfs),
    (EvictionPolicySuite, "eviction", policies.Oldest),
]


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    """A small case is for an author; here the first will do, so that speed decides nothing."""
    monkeypatch.setattr(kit_suite, "_SHRINKING_SECONDS", -1.0)


def outcome(suite, attribute, cls, test):
    """Return the message with which a test fails; None if it passes or has nothing to say."""
    attributes = {attribute: cls, "replay_seed": SEED}
    instance = type("TestBroken", (suite,), attributes)()
    try:
        getattr(instance, f"test_{test}")()
    except pytest.skip.Exception:
        return None
    except pytest.fail.Exception as failure:
        return str(failure)
    return None


def check(suite, attribute, cls, test, rule, words):
    message = outcome(suite, attribute, cls, test)
    assert message is not None, f"{test} let it pass"
    assert message.startswith(f"{cls.__module__}.{cls.__name__} breaks a rule.\n  rule: ")
    assert re.search(f"\n  rule: (?:{rule})", message), message
    assert re.search(words, message), message
    assert "\n  do: " in message


def name(value):
    return getattr(value, "__name__", None) or (value if str(value).isidentifier() else "")


@pytest.mark.parametrize(("cls", "test", "rule", "words"), SCHEDULERS, ids=name)
def test_a_broken_scheduler_fails_its_rule(cls, test, rule, words):
    check(SchedulerSuite, "scheduler", cls, test, rule, words)


@pytest.mark.parametrize(("cls", "test", "rule", "words"), POLICIES, ids=name)
def test_a_broken_policy_fails_its_rule(cls, test, rule, words):
    check(SchedulingPolicySuite, "policy", cls, test, rule, words)


@pytest.mark.parametrize(("cls", "test", "rule", "words"), EVICTIONS, ids=name)
def test_a_broken_eviction_policy_fails_its_rule(cls, test, rule, words):
    check(EvictionPolicySuite, "eviction", cls, test, rule, words)


@pytest.mark.parametrize(("suite", "attribute", "cls"), RIGHT, ids=name)
def test_the_right_ones_pass(suite, attribute, cls):
    tests = [test for test in dir(suite) if test.startswith("test_")]
    messages = {test: outcome(suite, attribute, cls, test[5:]) for test in tests}
    assert {test: message for test, message in messages.items() if message} == {}


@pytest.mark.parametrize(
    ("suite", "broken_ones"),
    [
        (SchedulerSuite, SCHEDULERS),
        (SchedulingPolicySuite, POLICIES),
        (EvictionPolicySuite, EVICTIONS),
    ],
)
def test_every_test_catches_somebody(suite, broken_ones):
    tests = {test for test, _ in inspect.getmembers(suite) if test.startswith("test_")}
    assert {f"test_{test}" for _, test, _, _ in broken_ones} == tests
