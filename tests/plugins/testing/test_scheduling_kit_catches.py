"""Schedulers and policies with one mistake each fail their rule, with a helpful message."""

from __future__ import annotations

import pytest
from support.broken import pauses, policies
from support.broken import schedulers as broken
from support.kit_suites import (
    assert_fails,
    attributes_of,
    each_broken,
    label,
    messages_of,
    suite_tests,
)
from support.searching import kit_examples

from hardpoint.testing import EvictionPolicySuite, SchedulerSuite, SchedulingPolicySuite

# scheduler, test that it fails, rule, pattern of the message
SCHEDULERS = [
    (broken.NoContract, "contract", "contract", "add `contract = 2` to its class body"),
    (broken.AcceptsTooManyTokens, "rejections", "rejection", "beyond max_waiting_tokens, which is"),
    (broken.OverBudget, "limits", "limits", r"\d+ tokens are scheduled, max_num_batched_tokens is"),
    (broken.TooManyRun, "limits", "limits", r"\d requests are running, max_num_seqs is \d"),
    (broken.SplitsPrompts, "limits", "limits", "chunked_prefill is off|gets . tokens in"),
    (broken.MisCounts, "limits", "plan", "total_num_scheduled_tokens is ., the sum is"),
    (broken.SchedulesNothing, "limits", "plan", "new and cached requests are"),
    (broken.SkipsPositions, "limits", "positions", "computed tokens of '.', the worker has"),
    (broken.HidesBlocks, "limits", "blocks", "but its blocks have room for"),
    (broken.Picky, "limits", "rejection", "is rejected: max_tokens: expected anything but 3"),
    (broken.MisCountsLive, "limits", "counts", r"num_unfinished_requests is 2, but \d requests"),
    (broken.KeepsNoRecord, "limits", "step record", "was not recorded"),
    (broken.RecordsLate, "limits", "step record", "record of step 2 has step = 1, expected 2"),
    (broken.NeverWaits, "limits", "wait reason", "got no tokens, but has no reason"),
    (broken.Starves, "limits", "progress", r"after \d+ steps \['.'.*\] have not finished"),
    (broken.KeepsVictims, "blocks", "plan", "are preempted, and scheduled as cached requests"),
    (broken.KeepsVictims, "victims", "plan", "are preempted, and scheduled as cached"),
    (broken.HidesVictims, "blocks", "(batch|step)", "worker's batch already|the plan does not"),
    (broken.FreesTwice, "blocks", "blocks", "are held by .* are free, but there are"),
    (broken.MixesAdapters, "adapters", "KV content", "has adapter '.*', but|but the block holds"),
    (broken.MixesSalts, "blocks", "KV content", "has cache salt '.', but|but the block holds"),
    (broken.OneClient, "outputs", "outputs", "sent by client 1, goes to client 0"),
    (broken.RepeatsOutputs, "outputs", "finish", "has finished, but gets another output"),
    (broken.LeaksOnAbort, "ends", "blocks", "blocks are still held|which holds blocks already"),
    (broken.RepeatsFinished, "ends", "finish", "which was reported before"),
    (broken.FrozenClock, "ends", "finish", "are scheduled past their deadline"),
    (broken.AbortNeedsToken, "ends", "exceptions", "(Index|Key)Error: .*finish_requests, line"),
    (broken.ForgetsFaults, "ends", "progress|wait reason", "have not finished|which is impossible"),
    (broken.AcceptsAllDrafts, "drafts", "tokens", "alone it would get"),
    (broken.RepeatsDrafts, "drafts", "plan", "but the ones proposed for its next step are"),
    (broken.DropsLateResults, "asynchronous", "tokens|progress|positions", ""),
    (broken.LeavesPromptsNoTime, "step_time", "progress", r"\[.*\] have not finished"),
    (broken.TrustsFailedLoads, "transfers", "KV content|tokens", "could not be loaded|got the tok"),
    (broken.IgnoresReady, "grammars", "grammars", "are running, but their grammars are not ready"),
    (broken.HidesReleases, "releases", "releases", r"releases the columns \[\] of '.' before pos"),
    (broken.EncodesTooMuch, "encoder", "limits", "encoder tokens are scheduled in one step"),
    (broken.SplitsGroups, "groups", "groups", "last known token of some of|has an output"),
    (broken.ForgetsMembers, "groups", "groups", "at the end workers have"),
    (broken.ForgetsBegun, "forks", "batch", "with another source than it was added with"),
    (broken.SendsBegun, "forks", "tokens", "got the tokens .* after .*, alone it would get"),
    (broken.ForgetsLostPlans, "lost_plans", "(finish|batch)", "finished before st|preempted, but"),
    (broken.ForgetsToRewind, "lost_plans", "KV content", "was never written|holds anoth|to group"),
    (broken.KeepsComputed, "resets", "KV content", "is read, but was never written"),
    (broken.HidesAdded, "policy_swap", "policy calls", "are unfinished, but|without added"),
    (pauses.PausesNewAlone, "pauses", "pause", r"are scheduled in step \d+ under PAUSED_ALL"),
    (pauses.PausesAllAlone, "pauses", "pause", "under PAUSED_NEW, and never ran before"),
    (pauses.HoldsStarted, "pauses", "pause", r"False under PAUSED_NEW, but \[.*\] have begun"),
    (pauses.HoldsLoaded, "pauses", "pause", r"False under PAUSED_NEW, but \[.*\] have begun"),
    (pauses.NeverIdle, "pauses", "pause", r"has_requests\(\) is True, though no request may"),
    (pauses.StaysPaused, "pauses", "progress", r"after \d+ steps \['.'.*\] have not finished"),
    (pauses.StopsTheClock, "pauses", "pause|finish", "deadline of .* has passed|past their dead"),
    (pauses.ForgetsLoads, "pauses", "pause", "the KV connector has not completed its loads and"),
    (pauses.HidesReasons, "pauses", "wait reason", "PAUSED_ALL holds '.', but it has no reason"),
    (broken.AcceptsTooLong, "rejections", "rejection", "of max_model_len tokens was not rejected"),
    (broken.AcceptsTooMany, "rejections", "rejection", "request was accepted, max_waiting is 2"),
    (broken.OverBudget, "together", "limits", r"\d+ tokens are scheduled, max_num_batched_tok"),
]  # fmt: skip

# policy, test that it fails, rule, pattern
POLICIES = [
    (policies.PolicyWithoutContract, "contract", "contract", "add `contract = 1`"),
    (policies.MixedKeys, "keys", "return values", "which has no order: TypeError"),
    (policies.NanKeys, "keys", "return values", "nan, which is not equal to itself"),
    (policies.KeysFromClock, "keys", "keys", "not on time or chance"),
    (policies.DeniesPriority, "keys", "keys", "uses_priority is False, and key"),
    (policies.RandomKeys, "keys", "keys", "not on time or chance"),
    (policies.KeysByCalls, "keys", "keys", "returned .*, then "),
    (policies.KeyFails, "keys", "return values", "raised KeyError: 'tenant'"),
    (policies.ListsAsGroups, "groups", "return values", "expected something hashable that is"),
    (policies.RandomGroupKeys, "groups", "groups", "for the same now"),
    (policies.NoVictim, "victim", "return values", "returned None, which is not running"),
    (policies.RandomVictim, "victim", "victim", "decide by the requests"),
    (policies.PopsVictims, "victim", "victim|return values", "changed the sequence|is not running"),
    (policies.AdmitsFalse, "admit", "return values", "False, expected None or the reason"),
    (policies.WritesRequest, "reads_only", "read-only", "scheduled.. changed priority of <Req"),
    (policies.AdmitsNone, "progress", "policy calls", "admit at least one request when none"),
    (policies.NoVictim, "progress", "return values", "which is not running"),
    (policies.ImportFails, "replacement", "exceptions", "KeyError: 'had'"),
    (policies.ForgetsState, "state", "state", "export all that group_key|takes over|had"),
    (policies.ExportsItself, "state", "state", "did not return plain data"),
    (policies.Hoards, "memory", "memory", "in finished.., drop the notes on the request"),
    (policies.OneKindOnly, "keys", "return values", "raised KeyError: 'chat'"),
    (policies.OneKindOnly, "progress", "return values", "raised KeyError: 'chat'"),
    (policies.PrepareFails, "keys", "keys", "is refused: plugin 'prepare_fails' .*: its prepare f"),
    (policies.NeedsAnArgument, "contract", "contract", "its Arguments.kind needs a default"),
    (policies.SlowKeys, "speed", "speed", "the budget is 100"),
]  # fmt: skip

# eviction policy, test that it fails, rule, pattern
EVICTIONS = [
    (policies.EvictionWithoutContract, "contract", "contract", "add `contract = 2`"),
    (policies.EvictsTakenBlocks, "candidates", "eviction", "is no candidate"),
    (policies.EvictsDroppedBlocks, "candidates", "eviction", "is no candidate"),
    (policies.AsksLate, "candidates", "eviction", r"call context.history\(\) in the constructor"),
    (policies.EvictsTwice, "candidates", "eviction", "with a block twice"),
    (policies.EvictsTooFew, "candidates", "eviction", r"evict\(\d\) returned .*: 3 blocks"),
    (policies.EvictsTooMany, "candidates", "eviction", r"evict\(\d\) returned .*: \d blocks"),
    (policies.EvictsNothing, "candidates", "eviction", "returned None: .* not iterable"),
    (policies.RaisesOnDepth, "candidates", "eviction", "released.*raised IndexError: depth"),
    (policies.KeepsOne, "evict_all", "eviction", "LookupError: the last one stays"),
    (policies.EvictsTakenBlocks, "in_cache", "eviction", "which is no candidate"),
    (policies.EvictsTooMany, "in_cache", "eviction", r"returned more than \d blocks?"),
    (policies.RemembersBlockIds, "block_ids", "block ids", "but with other block ids"),
    (policies.LowestBlockId, "block_ids", "block ids", "same contents, evict.* chose the contents"),
    (policies.RemembersHashes, "memory", "memory", "a few times context.blocks.num_blocks hashes"),
    (policies.RemembersAll, "memory", "memory", "drop a block in taken.., dropped.. and evict"),
    (policies.SortsAll, "speed", "speed", "do not iterate over all candidates in each call"),
]  # fmt: skip

RIGHT = [
    (SchedulingPolicySuite, "policy", policies.Fcfs),
    (EvictionPolicySuite, "eviction", policies.Oldest),
]


@each_broken(SCHEDULERS)
def test_a_broken_scheduler_fails_its_rule(cls, test, rule, pattern):
    assert_fails(SchedulerSuite, attributes_of("scheduler", cls), test, rule, pattern)


@each_broken(POLICIES)
def test_a_broken_policy_fails_its_rule(cls, test, rule, pattern):
    assert_fails(SchedulingPolicySuite, attributes_of("policy", cls), test, rule, pattern)


@each_broken(EVICTIONS)
def test_a_broken_eviction_policy_fails_its_rule(cls, test, rule, pattern):
    assert_fails(EvictionPolicySuite, attributes_of("eviction", cls), test, rule, pattern)


@pytest.mark.parametrize(("suite", "attribute", "cls"), RIGHT, ids=label)
def test_correct_components_pass(suite, attribute, cls):
    assert messages_of(suite, {**attributes_of(attribute, cls), "examples": kit_examples()}) == {}


@pytest.mark.parametrize(
    ("suite", "broken_ones"),
    [
        (SchedulerSuite, SCHEDULERS),
        (SchedulingPolicySuite, POLICIES),
        (EvictionPolicySuite, EVICTIONS),
    ],
)
def test_every_test_catches_a_component(suite, broken_ones):
    assert {test for _, test, _, _ in broken_ones} == suite_tests(suite)


def test_a_policy_that_exports_no_state_proves_nothing_of_it():
    class Stateless(policies.Fcfs):
        contract = 1
        state_format = "nothing"

    suite = type("TestStateless", (SchedulingPolicySuite,), {"policy": Stateless, "examples": 0.2})
    with pytest.raises(pytest.skip.Exception, match="export_state is not overridden"):
        suite().test_state()
