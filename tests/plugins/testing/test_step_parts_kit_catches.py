"""Step parts with one mistake each fail their rule, with a helpful message."""

from __future__ import annotations

import pytest
from support.broken import media_parts, verifiers
from support.broken import step_part_amounts as amounts
from support.broken import step_parts as broken
from support.kit_suites import GENERAL, assert_fails, each_broken, messages_of, shorten, suite_tests
from support.plugins import releasing

from hardpoint.testing import StepPartSuite

# step part, test that it fails, rule, pattern of the message
STEP_PARTS = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.GivesNoHalf, "contract", "contract", "returned None, expected an EngineHalf"),
    (broken.MasksOthers, "steps", "masks", r"has rows of \['other'\], of the plan only"),
    (broken.WrongShape, "steps", "masks", r"bitmask is int32 \(\d, 9\), expected int32 \(\d, 10"),
    (broken.WrongType, "steps", "masks", "bitmask is int64"),
    (broken.OneRowEach, "steps", "masks", "has 1 rows of the mask, expected [23] in sequence"),
    (broken.AllowsNothing, "steps", "masks", "row . of 'r.' allows no token"),
    (broken.ChangingCost, "steps", "costs", r"returned \{'slots': .\}, and when asked again"),
    (broken.UnknownResource, "steps", "costs", r"names 'seats', capacity has \['slots'\]"),
    (broken.NeverReady, "steps", "ready", r"still returns 'any moment now'"),
    (broken.GateRaises, "steps", "gate", "gate.. raised ValueError: no"),
    (broken.GateGivesBool, "steps", "gate", "gate.. returned (True|False)"),
    (broken.UsesGivesPrompt, "steps", "uses", r"uses.. returned \[.*\], expected a bool"),
    (broken.UsesNone, "steps", "requests", "override requests.. with a strategy"),
    (broken.AlwaysData, "steps", "data", "0 bytes for a plan without requests that use"),
    (broken.TextAsData, "steps", "data", "expected bytes or None"),
    (broken.EndsOthers, "steps", "result", "result.. ends 'other'"),
    (broken.UpdatedRaises, "steps", "result", "updated.. raised KeyError: 1"),
    (broken.FaultAsText, "steps", "result", "returned 'it is over' for 'r.'"),
    (broken.DraftsForOthers, "steps", "drafts", "names 'other', of the live requests only"),
    (broken.TooManyDrafts, "steps", "drafts", r"\[1, 2, 3\] for 'r.', expected at most 2 tokens"),
    (broken.NoSuchToken, "steps", "drafts", r"the token 300 for 'r.', .* in 0..299"),
    (broken.LimitsOthers, "steps", "limited drafts", "names 'other', it was given drafts of"),
    (broken.AddsDrafts, "steps", "limited drafts", r"for 'r.', expected a number from 0 to [12]"),
    (broken.FiguresAsBytes, "steps", "figures", r"figures.. returned \{'state': b'r.*"),
    (broken.AnswersAll, "calls", "calls", r"'no such method', {}. returned \[\], expected Request"),
    (broken.AnswersObjects, "calls", "calls", r"call.'live', {}. raised TypeError"),
    (broken.UsesOtherFields, "contract", "contract", r"request_fields.. returned \['priority'\]"),
    (broken.NoNumberOfDrafts, "contract", "contract", "num_draft_tokens is None, expected a num"),
    (broken.LacksRows, "steps", "worker", r"hidden.. returned a tensor .*, expected a tensor"),
    (broken.WritesInput, "steps", "worker reads only", "linear.. mutated an input that"),
    (broken.TextAsReport, "steps", "worker", "report.. returned 'r.*, expected bytes or None"),
    (broken.BeginRaises, "steps", "worker", "begin.. of the worker half raised KeyError"),
    (broken.NotFinite, "steps", "worker", "embedded.. returned values that are not finite"),
    (broken.WrongLayer, "steps", "worker", "called the attention of layer 0 in layer 1"),
    (broken.SkipsByNumber, "steps", "worker", r"skips.. returned torch.float32 \[\d+\], expected"),
    (broken.SkipsByPlace, "alone_as_together", "alone as", "changes its skipped tokens of layer"),
    (broken.AddsOne, "steps", "worker", "added.. returned one tensor, expected a tuple of two ten"),
    (broken.AddsInPlace, "steps", "worker reads only", "added.. mutated its input"),
    (broken.ByPosition, "alone_as_together", "alone as", "changes its logits in step . to"),
    (broken.WritesTokens, "reads_only", "worker reads only", "sampled.. mutated its input"),
    (broken.RaisesInLost, "lost_plans", "lost plans", "lost.. raised KeyError"),
    (
        broken.CountsPlans,
        "lost_plans",
        "lost plans",
        "is another one when its lost plan is planned",
    ),
    (broken.SharedPosition, "alone_as_together", "alone as", "step . is another one alone than"),
    (broken.CountsResults, "forks", "forks", "step 1 is another one of a request that has sampled"),
    (broken.KnowsByUser, "forks", "forks", "is another one of a (request|source)"),
    (broken.GateTakesNew, "forks", "gate", "gate.. raised ValueError: it has outputs"),
    (broken.Remembers, "ids_used_again", "ended", "in a new part than after one of its id"),
    (broken.ForgetsLate, "ids_used_again", "(ended|gate)", "it runs already"),
    (broken.WritesPlan, "reads_only", "reads only", "begin.. mutated its input"),
    (broken.WritesResult, "reads_only", "reads only", "result.. mutated its input"),
    (broken.Grows, "memory", "memory", "its attributes grew from"),
    (broken.KeepsEnded, "memory", "memory", "its attributes grew from"),
    (broken.ClosesOnce, "close", "close", "raised AttributeError"),
    (broken.PrepareRaises, "frontend", "frontend", "prepare.. raised KeyError: 'reasons'"),
    (broken.Renames, "frontend", "frontend", "changed request_id from 'r0' to 'r0-mine'"),
    (broken.CompletesTwice, "frontend", "frontend", "gave priority 1, and when called again 2"),
    (broken.ReadsByText, "frontend", "answers", "reads_answer.. returned 'yes', expected a bool"),
    (broken.FlawAsList, "frontend", "answers", r"validate.. returned \['wrong'\], expected text"),
    (broken.ValidateRaises, "frontend", "answers", "raised ValueError: no JSON"),
    (broken.FormatAsText, "frontend", "formats", "output_format.. returned 'json', expected an"),
    (broken.FormatRaises, "frontend", "formats", "output_format.. raised KeyError: 'format'"),
    (broken.OpensDict, "frontend", "formats", r"open.. returned \{\}, expected an OutputReader"),
    (broken.ReadsBytes, "frontend", "formats", "complete.. set content to b'.*', expected text"),
    (broken.ReadsStop, "frontend", "formats", "complete.. raised AttributeError"),
    (broken.ShowsNothing, "frontend", "formats", "result.. returned None, expected an output"),
    (broken.ShowsText, "frontend", "formats", "result.. returned '.*', expected an output"),
    (broken.NeverCombines, "groups", "groups", r"1 prompts, and no worker half has combine\(\)"),
    (broken.CombinesRows, "groups", "groups", r"combine.. gave \[2, 300\], expected a tensor"),
    (broken.CombinesByChance, "groups", "groups", "combine.. gave other logits for equal rows"),
    (broken.Good, "prompts", "prompts", r"prompt_keys are \(\), and the suite has 1 prompts"),
    (broken.ReadsIntoList, "prompts", "prompts", r"read_prompt.. returned \[97, 97, 97\]"),
    (broken.CutsNothing, "prompts", "prompts", r"cut\(2\) returned 3 ids"),
    (broken.ReadsNoToken, "prompts", "prompts", r"read_prompt.. returned GivenPrompt.*\[-1\]"),
    (broken.ReadsFieldsOfOthers, "prompts", "prompts", r"gave the fields \['resumable'\]"),
    (broken.RefusesWhatItReads, "prompts", "prompts", "prepare.. rejected .*: not this one"),
    (broken.ReadPromptRaises, "prompts", "prompts", "raised KeyError: 'letter'"),
    (broken.NoFrontendHalf, "frontend", "contract", r"gave \{\}, expected a FrontendHalf or"),
    (broken.Slow, "speed", "speed", "times as long for 8 requests, times_plain is"),
]

# of amounts, drafts and effects; tests and rules as above
AMOUNTS = [
    (
        amounts.ReturnsOnPreemption,
        "amounts",
        "amounts",
        "pass the gate at once is .* preempted",
    ),
    (amounts.CountsPlans, "amounts", "amounts", "is .* every other plan is lost, expected"),
    (
        amounts.ForgetsOnPreemption,
        "amounts",
        "amounts",
        "figure 'used' of .* at its end is",
    ),
    (
        amounts.SubtractsOnPreemption,
        "amounts",
        "amounts",
        "is .* where requests are preempted",
    ),
    (amounts.ChargesPlans, "amounts", "amounts", "at once is .* every other plan is lost"),
    (
        amounts.CountsLostTwice,
        "amounts",
        "amounts",
        "(statistic|answer) .* plan is lost",
    ),
    (amounts.ResumedMask, "amounts", "amounts", "mask of output token . is another one with one"),
    (
        amounts.AddsPlans,
        "amounts",
        "amounts",
        "its logits in step . to other values",
    ),
    (amounts.LeavesFiles, "resources", "resources", "more open files"),
    (amounts.LeavesThread, "close", "close", "there still are: thread 'watcher'"),
    (
        amounts.FirstRowAlone,
        "drafts",
        "draft rows",
        "leaves them as they are with drafts",
    ),
    (amounts.LastRowAlone, "drafts", "draft rows", "leaves them as they are with drafts"),
    (amounts.RowByRequest, "drafts", "draft rows", "position . .* with drafts"),
    (
        amounts.SkipsDraftTokens,
        "drafts",
        "draft rows",
        "hidden states of position . without",
    ),
    (
        amounts.CountsRows,
        "drafts",
        "draft rows",
        "logits of position . to other values",
    ),
    (
        amounts.MasksDraftsAlike,
        "drafts",
        "draft rows",
        "mask of output token . is another one with",
    ),
    (amounts.DoesNothing, "effect", "effect", "no half has a method of its own"),
    (
        amounts.NumbersSampled,
        "steps",
        "arrays",
        r"position . as 'x', expected positions in 0",
    ),
    (
        amounts.GrowingRows,
        "steps",
        "arrays",
        r"rows of float64 \[2\] as 'x', expected",
    ),
    (amounts.FewerRows, "steps", "arrays", "as 'x', expected a PartArray of ascending int64"),
]

# of verified drafts; tests and rules as above
VERIFIERS = [
    (verifiers.AcceptsAll, "drafts", "verified drafts", r"accepted \d of the drafts \[.*, and sam"),
    (verifiers.SkipsLastRow, "drafts", "verified drafts", r"sampled \[.*None\] in their rows"),
    (verifiers.SamplesNothing, "drafts", "verified drafts", r"and sampled \[None\] in their rows"),
    (verifiers.NumbersById, "drafts", "verified drafts", r"returned \{'r.*\} for \d requests"),
    (verifiers.RowTooMany, "drafts", "worker", r"raised IndexError: the row .* with \d drafts"),
]

# of media; tests and rules as above
MEDIA = [
    (media_parts.GivesTokens, "media", "placed", r"returned \[5, 1, 1, .*, expected a GivenPr"),
    (media_parts.LeavesOneOut, "media", "placed", r"features of \['image'\] for items of \['im"),
    (media_parts.TakesItems, "media", "placed", "read_prompt.. mutated its input"),
    (media_parts.TakesSmells, "media", "placed", "with media of an unknown modality returned Giv"),
    (media_parts.TakesAnyNumber, "media", "placed", "an item less than placeholders returned Giv"),
    (media_parts.AddsItems, "media", "placed", "raised TypeError: unsupported operand"),
    (media_parts.NamesByIndex, "media", "placed", "of different data have the identifier 'x0'"),
    (media_parts.NamesNothing, "media", "placed", r"features\[0\] has the identifier ''"),
    (media_parts.CountsItems, "media", "placed", "and for an equal prompt _Placed"),
    (media_parts.CoversOthers, "media", "placed", r"\[0\] covers the token 7, which is none of"),
    (media_parts.TokenBeyond, "media", "placed", "gave the token 300, expected .* 0..299"),
    (media_parts.PastTheEnd, "media", "placed", "covers 10 to 13 of a prompt of 8 tokens, after"),
    (media_parts.TokensAlone, "media", "placed", r"\{'image': \(1,\)\}, and there is no read_"),
    (media_parts.TokensWithoutKey, "media", "placed", "or no such key in prompt_keys"),
    (media_parts.TokensOfNothing, "media", "placed", r"\{'image': \(\)\}, expected token ids by"),
    (
        media_parts.RefusesPlaced,
        "media",
        "placed",
        "check.. rejected the result of read_prompt.*: not",
    ),
    (media_parts.UsesNoMedia, "media", "placed", "uses.. is False for a request with placed"),
    (media_parts.NoLimit, "contract", "encoder cache", "max_encoder_tokens is 0, expected a numb"),
    (media_parts.NoCache, "contract", "encoder cache", "is 8, expected 0, as encoder_cache is No"),
    (media_parts.CacheAsDict, "contract", "encoder cache", r"is \{\}, which has no holds"),
    (media_parts.NobodyEncodes, "contract", "encoder cache", "no worker half has `encodes = True"),
    (media_parts.FreesHeld, "steps", "encoder cache", "returned 'x.', which 'r.' holds"),
    (
        media_parts.FreesAgain,
        "steps",
        "encoder cache",
        "'x.', which (was not|'r.' holds)",
    ),
    (media_parts.FreesNone, "steps", "encoder cache", "take_freed.. returned None, expected ident"),
    (media_parts.HoldsAll, "steps", "encoder cache", "holds.. returned True for 'x.', which was"),
    (media_parts.HoldsNothing, "steps", "encoder cache", "returned False for 'x.', which 'r.' hol"),
    (media_parts.HoldsOne, "steps", "encoder cache", "holds.. returned 1, expected a bool"),
    (media_parts.HasNoRoom, "steps", "encoder cache", "for a feature of 3 tokens, .* no request"),
    (media_parts.AllocateRaises, "steps", "encoder cache", "raised KeyError: 0"),
    (media_parts.BelievesSent, "weights_changed", "worker", "embedded.. of .* raised KeyError: 'x"),
    (media_parts.WeightsRaise, "weights_changed", "weights changed", "RuntimeError: no weights"),
    (
        media_parts.KeepsEmbeddings,
        "weights_changed",
        "weights changed",
        "embedded tokens in step 1 to other values in new halves than after other weights",
    ),
]


@each_broken(STEP_PARTS)
def test_a_broken_step_part_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    if test in ("memory", "close"):
        shorten(monkeypatch, {"reporting.calls._WAIT_SECONDS": 0.1})
    attributes = {"part": cls, "calls": [("live", {})]}
    if cls is broken.NeverReady:
        attributes["ready_seconds"] = 0.05
    if cls is broken.Slow:
        attributes["times_plain"] = 100.0
    attributes["prompts"] = [{"letters": 3}]
    assert_fails(StepPartSuite, attributes, test, rule, pattern)


@each_broken(AMOUNTS)
def test_a_part_with_wrong_amounts_or_rows_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    attributes = {"part": cls}
    if test == "close":
        shorten(monkeypatch, {"general.suite._CLOSE_SECONDS": 0.1})
    if issubclass(cls, amounts.Budget):
        attributes["calls"] = [("total", {})]
    assert_fails(StepPartSuite, attributes, test, rule, pattern)


@each_broken(VERIFIERS)
def test_a_part_that_verifies_drafts_wrongly_fails_its_rule(cls, test, rule, pattern):
    assert_fails(StepPartSuite, {"part": cls}, test, rule, pattern)


@pytest.mark.parametrize(
    "cls", [amounts.Budget, amounts.Numbers, broken.GoodWorker, verifiers.Verifier]
)
def test_parts_with_right_amounts_and_rows_pass(cls):
    calls = {"calls": [("total", {})]} if cls is amounts.Budget else {}
    tests = ["steps", "amounts", "drafts", "effect", "lost_plans", "calls"]
    assert messages_of(StepPartSuite, {"part": cls, **calls}, tests) == {}


def test_steps_end_where_a_part_releases_blocks():
    releasing.Borders.num_ends = 0
    tests = ["steps", "alone_as_together", "lost_plans"]
    assert messages_of(StepPartSuite, {"part": releasing.Borders}, tests) == {}
    assert releasing.Borders.num_ends > 20


def test_an_effect_outside_of_the_engine_is_not_proved():
    test = type("TestLogs", (StepPartSuite,), {"part": amounts.Logs, "replay_seed": 1})()
    with pytest.raises(pytest.skip.Exception, match="undecidable with these requests: none"):
        test.test_effect()


@each_broken(MEDIA)
def test_a_broken_part_of_media_fails_its_rule(cls, test, rule, pattern):
    assert_fails(StepPartSuite, {"part": cls, **media_parts.SUITE}, test, rule, pattern)


@pytest.mark.nightly
def test_a_part_that_places_and_encodes_media_passes():
    attributes = {"part": media_parts.GoodMedia, **media_parts.SUITE, "examples": 0.1}
    assert messages_of(StepPartSuite, attributes) == {}


def test_a_part_that_places_media_has_to_have_samples():
    attributes = {"part": media_parts.GoodMedia, **media_parts.SUITE, "media": []}
    pattern = r"media_tokens are \{'image': \(1,\)\}, and the suite has 0 prompts in `media`"
    assert_fails(StepPartSuite, attributes, "media", "placed", pattern)


def test_every_test_catches_a_step_part():
    tests = suite_tests(StepPartSuite) | GENERAL
    assert {test for _, test, _, _ in STEP_PARTS + AMOUNTS + MEDIA} == tests


def test_a_part_that_reads_prompts_passes():
    attributes = {"part": broken.ReadsLetters, "prompts": [{"letters": 3}]}
    assert messages_of(StepPartSuite, attributes, ["prompts"]) == {}


def test_a_part_that_divides_something_may_set_shares():
    attributes = {"part": broken.SharedPosition, "shares": True, "examples": 0.2}
    assert messages_of(StepPartSuite, attributes, ["alone_as_together"]) == {}
