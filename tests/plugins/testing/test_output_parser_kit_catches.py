"""Output parsers with one mistake each fail their rule, with a message."""

from __future__ import annotations

import pytest
from support.broken import output_parsers as parsers
from support.kit_suites import assert_fails, each_broken, label, messages_of, suite_tests
from support.searching import kit_examples

from hardpoint.testing import OutputParserSuite, OutputSample


class OnlyReasoning(parsers.Right):
    contract = 1
    roles = ("reasoning",)


# component, test that it fails, rule, pattern of the message
BROKEN = [
    (parsers.WithoutContract, "contract", "contract", "add `contract = 2` to its class body"),
    (parsers.OtherTags, "samples", "samples", "became .*stated is"),
    (parsers.LosesCalls, "samples", "samples", "became .*stated is"),
    (parsers.MarkersInStrings, "samples", "samples", "became .*stated is"),
    (parsers.NoMarkersOverPieces, "splits", "splits", "in the pieces .* became"),
    (parsers.SplitsWords, "splits", "splits", "in the pieces .* became"),
    (parsers.RaisesForBadJson, "any_text", "any text", "raised ValueError: bad JSON"),
    (parsers.GivesText, "any_text", "any text", "gave 'end', which is no event"),
    (parsers.EndsCallsTwice, "samples", "calls", "a call ended with the arguments None"),
    (parsers.RaisesAtTheEnd, "cuts", "any text", "raised AssertionError: open call"),
    (parsers.EndsCutCalls, "cuts", "calls", "cut after .* a call ended with the arguments"),
    (parsers.EarlyEnd, "cuts", "calls", "a call ended with the arguments"),
    (parsers.GuessesEarly, "cuts", "cuts", "before its end, and the whole one"),
    (parsers.OneState, "independent", "independent", "in turns with another output became"),
    (parsers.SharesTheBuffer, "independent", "independent", "in turns with another output became"),
    (parsers.TypedTokens, "tokens", "tokens", "as a text without special tokens became"),
    (parsers.IgnoresRoles, "roles", "roles", "with the role 'reasoning' alone became"),
    (parsers.OtherMarkers, "markers", "markers", "by the markers .* outside of reasoning, by"),
    (parsers.FormatAsText, "call_format", "call format", "returned '<tool_call>.*, no Format"),
    (parsers.FormatOfNoToken, "call_format", "call format", "has not among its special tokens"),
    (parsers.NeedsParallelCalls, "call_format", "call format", "parallel=False. raised KeyError"),
    (parsers.ParsesAllAgain, "linear", "linear", "it had taken more than 5 microseconds"),
    (parsers.Remembers, "memory", "memory", r"grew from \d+ to \d+ elements while 400 outputs"),
]


def attributes(cls):
    special = (parsers.START, parsers.END) if cls is parsers.TypedTokens else ()
    return {"parser": cls, "samples": parsers.SAMPLES, "special_tokens": special, "examples": 0.3}


@each_broken(BROKEN)
def test_a_broken_parser_fails_its_rule(cls, test, rule, pattern):
    assert_fails(OutputParserSuite, attributes(cls), test, rule, pattern)


def test_a_call_that_ends_reasoning_is_among_the_markers():
    attributes_of_suite = attributes(parsers.UnnamedCalls) | {
        "special_tokens": (parsers.START, parsers.END, "<tool_call>"),
        "samples": (
            parsers.OutputSample(
                f"{parsers.START}So<tool_call>",
                "So",
                "<tool_call>",
                malformed=True,
                tools={"f": {}},
            ),
        ),
    }
    assert_fails(
        OutputParserSuite,
        attributes_of_suite,
        "markers",
        "markers",
        "it is inside reasoning, by in_r",
    )


@pytest.mark.parametrize("cls", [parsers.Right, parsers.RightWrapped], ids=label)
def test_correct_parsers_pass(cls):
    assert messages_of(OutputParserSuite, {**attributes(cls), "examples": kit_examples()}) == {}


def test_every_test_catches_a_parser():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(OutputParserSuite)


@pytest.mark.parametrize(
    ("cls", "test", "reason"),
    [
        (parsers.Right, "call_format", "call_format gives no grammar"),
        (parsers.Right, "tokens", "token_ids is empty"),
        (OnlyReasoning, "call_format", "its roles have no tools"),
        (OnlyReasoning, "roles", "its only role is 'reasoning'"),
    ],
    ids=label,
)
def test_what_a_parser_does_not_declare_is_left_out(cls, test, reason):
    attributes_of_suite = {"parser": cls, "samples": (OutputSample("Hello", content="Hello"),)}
    instance = type("TestParser", (OutputParserSuite,), attributes_of_suite)()
    with pytest.raises(pytest.skip.Exception, match=reason):
        getattr(instance, f"test_{test}")()
