"""Processors with one mistake each fail the rule that they break, with a helpful message."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from support.broken import processors as broken
from support.kit_suites import (
    assert_fails,
    each_broken,
    label,
    messages_of,
    suite_tests,
    untimed_tests,
)
from support.searching import kit_examples

from hardpoint.testing import LogitsProcessorSuite

ANY = st.builds(broken.Bias.Arguments, by=st.floats(-5, 20))
LARGE_IDS = st.builds(broken.PromptAndOutput.Arguments, token=st.integers(20, 130))
SCALE = st.builds(broken.Counter.Arguments, scale=st.floats(-2, 2))

# processor, arguments, {test that it fails: pattern of the message}
BROKEN = [
    (broken.NoContract, ANY, {"contract": "add `contract = 1` to its class body"}),
    (broken.PreparesNothing, ANY, {"contract": "prepare returned NoneType"}),
    (broken.PrepareCrashes, ANY, {"contract": "prepare raised ZeroDivisionError: float"}),
    (broken.RejectsAll, ANY, {"contract": "from `arguments`, the last .* 'by: not today'"}),
    (broken.NoPickle, st.just({}), {"contract": "do not survive pickle"}),
    (broken.FailsToBuild, ANY, {"contract": "the constructor, .*raised KeyError: 'weights'"}),
    (broken.CachesByCount, ANY, {
        "history": "a row's result may depend on nothing but its own request",
        "pure": "called again on the same row, gave another result",
    }),
    (broken.MixesRows, ANY, {
        "history": "instead of",
        "swaps": "after the swaps",
        "advance": "advanced over",
        "drafts": "after the drafts",
        "pure": "gave another result",
    }),
    (broken.Rounds, ANY, {
        "history": "mere rounding: an operation here rounds differently",
        "swaps": "rounding",
        "advance": "rounding",
        "drafts": "rounding",
        "pure": "rounding",
        "reads": None,
    }),
    (broken.IgnoresMoves, ANY, {"history": "follow every BatchUpdate"}),
    (broken.SwapsOneWay, ANY, {"swaps": "a move of direction SWAP exchanges both rows"}),
    (broken.BiasesAllRows, ANY, {"bystanders": "does not use the processor, and changed"}),
    (broken.CrashesOnUpdate, ANY, {"history": "update_state raised KeyError"}),
    (broken.DropsTheBest, None, {
        "argmax_claim": "the most likely token changed from",
        "valid_logits": None,
    }),
    (broken.DropsTies, None, {"argmax_claim": "nor drop any token that equals it"}),
    (broken.CountsCalls, SCALE, {
        "pure": "edits changed the state of a request",
        "history": None, "swaps": None, "advance": None, "fork": None, "drafts": None,
    }),
    (broken.AppendsOutputs, SCALE, {
        "pure": "edits changed the list of a request's output ids",
        "history": None, "swaps": None, "advance": None, "drafts": None,
    }),
    (broken.Sticky, ANY, {
        "pure": "apply, called again on the same row, gave another result",
        "history": None, "swaps": None, "advance": None, "fork": None,
    }),
    (broken.ForgetsOutputs, SCALE, {
        "advance": "let start count request.output_token_ids exactly as advance counts",
        "history": None, "swaps": None, "drafts": None,
    }),
    (broken.SharesForks, SCALE, {
        "fork": "let fork copy everything that advance changes",
        "drafts": "after the drafts",
    }),
    (broken.EndsByBatch, None, {"ends": "it ends after \\d+ tokens, and alone"}),
    (broken.DraftsGoOn, None, {"ends": "the same token as a draft does not"}),
    (broken.LooksPastDrafts, ANY, {"drafts": "of the row itself"}),
    (broken.DeviceForgets, None, {
        "advance": "likewise start_row and advance_rows",
        "history": None, "swaps": None, "drafts": None,
    }),
    (broken.Noisy, ANY, {
        "deterministic": "two new instances gave different logits",
        "history": None, "swaps": None, "advance": None, "fork": None, "drafts": None,
        "pure": None, "resources": None,
    }),
    (broken.Divides, ANY, {"valid_logits": "it made a row with NaN", "masks_stay": None}),
    (broken.DropsAll, ANY, {"valid_logits": "it made a row with no token that can be chosen"}),
    (broken.ReturnsNothing, ANY, {"valid_logits": "apply failed: TypeError: expected a tensor"}),
    (broken.Double, ANY, {"valid_logits": "expected logits of dtype torch.float32"}),
    (broken.EditsOutOfRange, SCALE, {"valid_logits": "edits failed: .*tokens outside 0..256"}),
    (broken.ReadsSecretly, ANY, {
        "reads": "Reads.LOGITS is declared, but output_token_ids was read",
        "history": None, "swaps": None, "advance": None, "drafts": None, "pure": None,
    }),
    (broken.AdvancesSecretly, SCALE, {"reads": "defines advance, which gets ids on the host"}),
    (broken.ReadsDeviceValues, ANY, {"no_sync": "reads values by .item\\(\\), float\\(\\)"}),
    (broken.Hoards, ANY, {
        "memory": "finished requests are still referenced, by list", "resources": None,
    }),
    (broken.Grows, ANY, {
        "memory": "grew from \\d+ to \\d+ elements while", "resources": None,
    }),
    (broken.Sleeps, ANY, {"speed": "the budget is 500"}),
    (broken.ChangesNothing, ANY, {"effect": "ChangesNothing changed no logit, in none of the"}),
    (broken.Bias, st.just({"by": 0.0}), {"effect": "Bias changed no logit.*\n  fix: draw other"}),
    (broken.NeverUsed, None, {
        "effect": r"NeverUsed never ran: .* uses\(\) returned False",
        "bystanders": None,
    }),
    (broken.NeverSparse, None, {"effect": r"NeverSparse never ran: .* uses\(\) returned False"}),
    (broken.UsedWithoutArguments, ANY, {
        "contract": r"uses\(\) returned True .*used_without_arguments.by: missing",
        "history": None, "swaps": None,
    }),
    (broken.UsedWhenGreedy, ANY, {
        "history": r"uses\(\) returned True .*used_when_greedy.by: missing",
        "bystanders": None, "swaps": None,
    }),
    (broken.UsesCrashes, ANY, {
        "contract": r"uses\(\) raised KeyError: 'bias'",
        "bystanders": r"uses\(\) raised KeyError: 'bias'",
        "history": None, "swaps": None,
    }),
    (broken.IgnoresItsState, ANY, {"effect": "declares state .* but apply or edits never read"}),
    (broken.Repeated, st.builds(broken.Repeated.Arguments), {
        "advance": "let start count request.output_token_ids exactly as advance counts",
        "history": None, "swaps": None, "drafts": None,
    }),
    (broken.PromptAndOutput, LARGE_IDS, {
        "advance": "let start count request.output_token_ids exactly as advance counts",
        "history": None, "swaps": None, "drafts": None,
    }),
    (broken.ForksLate, LARGE_IDS, {
        "fork": "let fork copy everything that advance changes",
        "drafts": None,
    }),
    (broken.Unmasks, SCALE, {
        "masks_stay": "was masked \\(-inf\\) and became 5", "effect": None,
    }),
    (broken.KeepsOnSelf, ANY, {
        "history": "observe, if it depends on logits",
        "swaps": None, "effect": None,
    }),
    (broken.OutgrowsItsBound, ANY, {"history": "expected a state of at most max_state_bytes"}),
    (broken.ObservesInPlace, ANY, {"drafts": "changed the request's own state", "effect": None}),
    (broken.RemembersLogits, ANY, {"resume": "another engine has the state"}),
    (broken.ObservesNothing, ANY, {"history": "expected a state of type State, got NoneType"}),
]  # fmt: skip
CRASHING = {"PrepareCrashes", "RejectsAll", "FailsToBuild", "PreparesNothing", "NoContract"} | {
    "ReturnsNothing", "Double", "EditsOutOfRange", "CrashesOnUpdate", "OutgrowsItsBound",
    "ObservesNothing",
}  # fmt: skip

RIGHT = [(broken.Bias, ANY), (broken.Counter, SCALE), (broken.BatchBias, ANY)]
RIGHT += [(broken.UsedByAll, ANY)]
RIGHT += [(broken.DeviceCounter, None), (broken.Observer, ANY), (broken.EndsLate, None)]


def attributes(cls, arguments, **more):
    budget = {"budget_us_per_row": 500.0, "budget_vocab_size": 1000}
    return {"processor": cls, "arguments": arguments, **budget, **more}


@each_broken(
    [
        (arguments, cls, test, "", pattern)
        for cls, arguments, fails in BROKEN
        for test, pattern in fails.items()
        if pattern is not None
    ],
    ("arguments", "cls", "test", "rule", "pattern"),
)
def test_a_broken_processor_fails_its_rule(arguments, cls, test, rule, pattern):
    assert_fails(LogitsProcessorSuite, attributes(cls, arguments), test, rule, pattern)


@pytest.mark.nightly  # each processor with each other rule
@pytest.mark.parametrize(
    ("cls", "arguments", "fails"), [b for b in BROKEN if b[0].__name__ not in CRASHING], ids=label
)
def test_a_broken_processor_passes_the_other_rules(cls, arguments, fails):
    others = untimed_tests(LogitsProcessorSuite) - fails.keys()
    brief = attributes(cls, arguments, examples=kit_examples(0.2))
    assert messages_of(LogitsProcessorSuite, brief, others) == {}


@pytest.mark.parametrize(("cls", "arguments"), RIGHT, ids=label)
def test_correct_components_pass(cls, arguments):
    brief = attributes(cls, arguments, examples=kit_examples())
    assert messages_of(LogitsProcessorSuite, brief) == {}


def test_every_rule_catches_a_processor():
    assert {
        test for _, _, fails in BROKEN for test, pattern in fails.items() if pattern
    } == suite_tests(LogitsProcessorSuite)
