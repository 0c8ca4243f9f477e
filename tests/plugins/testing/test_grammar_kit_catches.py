"""Grammar backends with one mistake each fail their rule, with a message."""

from __future__ import annotations

from support.broken import grammars
from support.kit_suites import assert_fails, each_broken, messages_of, suite_tests
from support.searching import kit_examples

from hardpoint.testing import GrammarSample, GrammarSuite

# component, test that it fails, rule, pattern of the message
BROKEN = [
    (grammars.WithoutContract, "contract", "contract", "add `contract = 1` to its class body"),
    (grammars.StatesTooMuch, "formats", "formats", "compile raised ValueError: regex: expected"),
    (grammars.NoFormats, "formats", "formats", r"its formats are \(\)"),
    (grammars.AcceptsOtherFormats, "formats", "formats", "compiled, but regex is not in its form"),
    (grammars.TooWide, "mask", "mask", "it allows token .*, with which no valid text goes on"),
    (grammars.TooNarrow, "mask", "mask", "it does not allow token .*, with which a valid text"),
    (grammars.OneIdPerText, "mask", "mask", "it does not allow token"),
    (grammars.WholeCharacters, "mask", "mask", r"it does not allow token \d+ \(b.*xc3"),
    (grammars.Specials, "mask", "no text", "allows 2 .the special token '<eos>'"),
    (grammars.Beyond, "mask", "no text", r"allows \d+ \(beyond the vocabulary\)"),
    (grammars.AllowsEmpty, "mask", "no text", r"allows 0 \(b''\)"),
    (grammars.EndsTooLate, "mask", "end", "returned False; that is a whole text"),
    (grammars.EndsTooEarly, "mask", "end", "returned True; that is not a whole text"),
    (grammars.ReturnsNone, "mask", "end", "fill_bitmask returned None, no bool"),
    (grammars.TooWide, "bytes", "bytes", r"it allows token .*; its bytes one by one are not"),
    (grammars.TooNarrow, "bytes", "bytes", "does not allow token .*; its bytes one by one are"),
    (grammars.Disagrees, "advance", "advance", "returned True, and the mask does not allow it"),
    (grammars.RaisesInAdvance, "advance", "exceptions", "ValueError: the token is not allowed"),
    (grammars.RefusedChanges, "advance", "advance", "the mask has changed after|returned False"),
    (grammars.RefusedIsUndone, "advance", "advance", "after refused tokens and a rollback"),
    (grammars.TooNarrow, "texts", "texts", "it does not allow token .* of the valid text"),
    (grammars.EndsTooLate, "texts", "texts", "the text may not end; it is valid and whole"),
    (grammars.EndsTooEarly, "texts", "texts", "the text may end; it is invalid"),
    (grammars.RollbackOffByOne, "rollback", "rollback", "and a rollback of 1: "),
    (grammars.RollbackForgets, "rollback", "rollback", "and a rollback of"),
    (grammars.ForkShares, "fork", "fork", "its fork advanced"),
    (grammars.ForksAreOne, "fork", "fork", "in turns with other forks|its original advanced"),
    (grammars.FillChanges, "pure", "pure", "asked again: token"),
    (grammars.RollbackOnce, "walks", "walks", "forked and undone between them: "),
    (grammars.OneThread, "threads", "threads", "raised AssertionError: another thread"),
    (
        grammars.OneCurrent,
        "threads",
        "threads",
        "in one of 4 threads at once: |had other masks than alone",
    ),
    (grammars.RaisesTypeError, "refused", "refused", "compile raised TypeError.*expected ValueE"),
    (grammars.RefusesWithoutReason, "refused", "refused", "raised .* without the reason"),
    (grammars.AcceptsAnything, "refused", "refused", "it compiled, but it means nothing"),
    (grammars.TakesForever, "hostile", "hostile", "the first mask took more than 0.2 s"),
    (grammars.RaisesForLarge, "hostile", "hostile", "raised RecursionError: 'too large', expec"),
    (grammars.IgnoresKeywords, "keywords", "keywords", """minLength.*: it allows "a\""""),
    (grammars.RefusesLenient, "keywords", "keywords", "with lenient=True: compile raised ValueE"),
    (
        grammars.ValidatesNothing,
        "validate",
        "validate",
        "returned None, expected the mistake",
    ),
    (grammars.ValidatesWithBools, "validate", "validate", "returned True, expected text or None"),
    (grammars.RaisesInValidate, "validate", "validate", r"raised ValueError\('not JSON'\)"),
    (grammars.Cached, "memory", "memory", r"grew from \d+ to \d+ elements while \d+ grammars"),
    (grammars.LargeForks, "memory", "memory", r"have \d+ KiB each; the budget is 64"),
    (grammars.SlowMasks, "speed", "speed", r"a mask of 32000 tokens costs \d+\.\d ms"),
]

SAMPLES = [
    GrammarSample(
        {"choice": ["yes", "yes, sure", "no", "né"]},
        language=["yes", "yes, sure", "no", "né"],
        invalid=["ye", "no!"],
    ),
    GrammarSample({"json": {"enum": ["a<eos>b", "a"]}}, language=['"a<eos>b"', '"a"']),
]


def attributes(cls):
    seconds = 0.2 if cls is grammars.TakesForever else 10.0
    share = 4.0 if cls is grammars.RollbackOnce else 0.5  # few walks show it
    return {"grammar": cls, "samples": SAMPLES, "compile_seconds": seconds, "examples": share}


@each_broken(BROKEN)
def test_a_broken_backend_fails_its_rule(cls, test, rule, pattern):
    assert_fails(GrammarSuite, attributes(cls), test, rule, pattern)


def test_a_correct_backend_passes():
    brief = {**attributes(grammars.Finite), "examples": kit_examples()}
    assert messages_of(GrammarSuite, brief) == {}


def test_every_test_catches_a_backend():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(GrammarSuite)
