"""IO processors with one mistake each fail the rule that they break; right ones pass."""

from __future__ import annotations

import copy

import pytest
from support.broken import io_processors as broken
from support.kit_suites import (
    GENERAL,
    assert_fails,
    each_broken,
    label,
    messages_of,
    shorten,
    suite_tests,
)

from hardpoint.testing import IOProcessorSuite

# processor, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.NoRequest, "contract", "contract", "expected a class `Request` of the input"),
    (broken.NoAnswer, "samples", "exceptions", r"IndexError: .* \(in post_process"),
    (broken.Trusts, "refused", "refused", r"\{'rows': \[\]\} raised ValueError: need at least"),
    (broken.Lenient, "refused", "refused", "'nmae': 'x'} of `refused` was taken"),
    (broken.Vague, "refused", "named", "is refused by 'this is wrong'"),
    (broken.Texts, "prompts", "prompts", r"returned 'a text' at \[0\], expected a pair of"),
    (broken.TooLong, "prompts", "prompts", r"has 360 tokens, the model reads 1 to 128"),
    (broken.OutOfVocabulary, "prompts", "prompts", "has 300, expected token ids from 0 to 256"),
    (broken.TooLongLater, "prompts", "prompts", r"has 200 tokens, the model reads 1 to 128"),
    (broken.YieldsTexts, "prompts", "prompts", r"yielded 'a text' at \[0\], expected a pair of"),
    (broken.NeverReturns, "rounds", "rounds", "yielded prompts after 16 rounds, expected its outp"),
    (broken.GoesOn, "rounds", "rounds", "goes on after it was closed: generator ignored"),
    (broken.KeepsTheRound, "overlapping", "overlapping", "with 4 calls under way, .* another"),
    (broken.ChangesLater, "reads_only", "reads only", "changed outputs of the model in place"),
    (broken.KeepsTheName, "overlapping", "overlapping", "with 4 calls under way, .* another"),
    (
        broken.Sorts,
        "reads_only",
        "reads only",
        r"pre_process\(\) changed the input in place, which are",
    ),
    (
        broken.Scales,
        "reads_only",
        "reads only",
        r"changed outputs of the model in place, which are",
    ),
    (
        broken.SortsLists,
        "samples",
        "reads only",
        r"pre_process\(\) changed the input in place, whi",
    ),
    (
        broken.SortsLists,
        "reads_only",
        "reads only",
        r"pre_process\(\) changed the input in place, whi",
    ),
    (
        broken.Appends,
        "reads_only",
        "reads only",
        "changed outputs of the model in place, which are",
    ),
    (
        broken.Sleeps,
        "samples",
        "waits",
        r"pre_process\(.*\) waited 0.3 s without computing, expected",
    ),
    (
        broken.Sleeps,
        "speed",
        "waits",
        r"pre_process\(.*\) waited 0.3 s without computing, expected",
    ),
    (
        broken.SleepsForSeconds,
        "speed",
        "waits",
        r"waited 3 s .*, expected .* max_wait_seconds = 1",
    ),
    (
        broken.Slow,
        "speed",
        "speed",
        r"99th percentile .* is \d+ microseconds, expected at most bud",
    ),
    (
        broken.KeepsRequests,
        "resources",
        "resources",
        "elements of its attribute 'requests' grew by",
    ),
    (broken.LeavesFile, "resources", "resources", r"there are \d+ more open files and pipes after"),
    (broken.LeavesThread, "close", "close", "still are: thread 'io'; expected none"),
    (broken.LeavesFile, "close", "close", "still are: .*; expected none"),
    (
        broken.IgnoresTheModel,
        "effect",
        "effect",
        "2 samples have the same answers with 5 models, e",
    ),
    (broken.Counts, "response", "response", "has two different answers"),
    (broken.Objects, "response", "response", "no JSON: NotImplementedError: a object is no plain"),
    (broken.NotANumber, "response", "response", "which is no JSON: ValueError: Out of range float"),
]
LIMITED = {
    broken.Sleeps: {"max_wait_seconds": 0.1},
    broken.SleepsForSeconds: {"max_wait_seconds": 1.0},
    broken.Slow: {"budget_us_per_call": 1.0},
}


def attributes(cls):
    """Return the attributes of a suite for a processor, with samples of its own."""
    samples = copy.deepcopy([broken.SAMPLES, broken.REFUSED])
    attributes_of_kind = {"processor": cls, "samples": samples[0], "refused": samples[1]}
    return attributes_of_kind | LIMITED.get(cls, {})


@each_broken(BROKEN)
def test_a_broken_processor_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, {"general.suite._CLOSE_SECONDS": 0.2})
    assert_fails(IOProcessorSuite, attributes(cls), test, rule, pattern)


@pytest.mark.parametrize("cls", [broken.Rows, broken.ByHand, broken.Pairs], ids=label)
def test_correct_components_pass(cls):
    assert messages_of(IOProcessorSuite, attributes(cls)) == {}


def test_a_suite_without_samples_tests_nothing():
    message = messages_of(IOProcessorSuite, {"processor": broken.Rows}, ["samples"])["samples"]
    assert "`samples` has 0 inputs" in message
    assert "set `samples` to at least two" in message


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(IOProcessorSuite) | GENERAL
