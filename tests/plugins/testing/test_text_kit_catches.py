"""Tokenizers, sinks and publishers with one mistake each fail their rule."""

from __future__ import annotations

import pytest
from support.broken import publishers, sinks, tokenizers
from support.kit_suites import (
    assert_fails,
    attributes_of,
    each_broken,
    label,
    messages_of,
    shorten,
    suite_tests,
)
from support.searching import kit_examples

from hardpoint.testing import (
    KVEventPublisherSuite,
    StatSinkSuite,
    TokenizerSuite,
)

# component, test that it fails, rule, pattern of the message
TOKENIZERS = [
    (tokenizers.WithoutContract, "contract", "contract", "add `contract = 1` to its class body"),
    (tokenizers.SmallVocabulary, "vocabulary", "vocabulary", r"token id 256, vocab_size is 100"),
    (tokenizers.OneTooFew, "vocabulary", "vocabulary", "token 256 is the text '<eos>': it is to"),
    (tokenizers.LargeVocabulary, "vocabulary", "vocabulary", "token 31999 has no text: it is to"),
    (tokenizers.ShiftsIds, "vocabulary", "vocabulary", r"encode\(.*\) has the token id \d+, voc"),
    (tokenizers.ReturnsBytes, "vocabulary", "vocabulary", r"returned b'.*, no list of whole numb"),
    (tokenizers.CharactersAsBytes, "token_bytes", "token bytes", r"token 128 is '\\x80' in vocab"),
    (tokenizers.ReversesBytes, "token_bytes", "token bytes", r"has the tokens \[.*; their byte"),
    (tokenizers.PaddedVocabulary, "token_bytes", "token bytes", "has 320 tokens, vocab_size is"),
    (tokenizers.NothingIsSpecial, "token_bytes", "token bytes", "token 256, .*, is not among the"),
    (tokenizers.TextIsSpecial, "token_bytes", "token bytes", "token 60, '<', is among the spec"),
    (tokenizers.Ascii, "round_trip", "round trip", "came back as"),
    (tokenizers.Strips, "round_trip", "round trip", "came back as"),
    (tokenizers.TokenByToken, "stream", "stream", "gave '�.*all of them are"),
    (tokenizers.IgnoresThePrompt, "stream", "stream", r"after the prompt \[.*, which is"),
    (tokenizers.RepeatsThePrompt, "stream", "stream", "all of them are"),
    (tokenizers.ShowsSpecials, "stream", "stream", "gave '.*<eos>.*=True"),
    (tokenizers.HidesSpecials, "stream", "stream", "are '.*<eos>.*=False"),
    (tokenizers.OneStream, "streams_apart", "streams apart", "streams that take turns, the one of"),
    (tokenizers.RaisesForUnknown, "unknown_tokens", "unknown tokens", "decode raised IndexError"),
    (tokenizers.ShowsUnknown, "unknown_tokens", "unknown tokens", r"decode made '.*' of \["),
    (tokenizers.Random, "deterministic", "deterministic", "it gave .*, (again|a new instance)"),
    (tokenizers.Buffered, "threads", "threads", "of 4 threads that use one tokenizer, one"),
    (tokenizers.RaisesForChat, "chat", "chat", r"for \[\{\}\] it raised KeyError: 'role'"),
    (tokenizers.ReturnsIdsForChat, "chat", "chat", r"it returned \[1, 2\]"),
    (tokenizers.EndsAtNewlines, "eos", "eos", r"token 10, which is the text '\\n' even where"),
    (tokenizers.EndsBeyond, "eos", "vocabulary", "eos_token_ids has the token id 300, vocab"),
    (tokenizers.ClearsIds, "reads_only", "reads only", "decode mutated its input"),
    (tokenizers.NamesText, "special_tokens", "special tokens", "as token 60; it is encoded as"),
    (tokenizers.JoinsPairs, "pairs", "pairs", r"encode_pair\(.*\) has the tokens .* alone"),
    (tokenizers.PairsAsLists, "pairs", "pairs", r"returned \[.*, expected an EncodedPair"),
    (tokenizers.FillsMessages, "reads_only", "reads only", "apply_chat_template mutated its "),
    (tokenizers.Remembers, "memory", "memory", r"grew from \d+ to \d+ elements while 100 texts"),
    (tokenizers.DecodesAllAgain, "speed", "speed", r"a token of a stream of 1000 cost \d+ micr"),
]  # fmt: skip

SINKS = [
    (sinks.WithoutContract, "contract", "contract", "add `contract = 1` to its class body"),
    (sinks.Averages, "statistics", "statistics", r"record\(.*\) raised ZeroDivisionError: div"),
    (sinks.NeedsScheduler, "statistics", "statistics", "raised AttributeError: 'NoneType' object"),
    (sinks.AddsNone, "statistics", "statistics", "raised TypeError: unsupported operand"),
    (sinks.AddsSizes, "statistics", "statistics", "raised TypeError: unsupported operand"),
    (sinks.Rates, "statistics", "statistics", r"report\(\) raised ZeroDivisionError"),
    (sinks.ExportsNothing, "exposition", "exposition", r"exposition\(\) returned None: expected"),
    (sinks.ExportsMeans, "exposition", "exposition", r"exposition\(.*\) raised ZeroDivisionErr"),
    (sinks.ExportsRawLabels, "exposition", "exposition", "the text cannot be read: ValueError: "),
    (sinks.ExportsTwice, "exposition", "exposition", r"tokens_total{} is there twice"),
    (sinks.ExportsSinceLast, "exposition", "exposition", "the same report gave another text"),
    (sinks.ExportsTotalsOfTheEngine, "exposition", "exposition", r"queried_total{} fell from \d"),
    (sinks.ExportsKnownPlugins, "exposition", "exposition", r"number='0'} is no longer there"),
    (sinks.ExportsAfterClose, "close", "close", r"exposition\(.*\) raised ValueError: I/O oper"),
    (sinks.Drains, "reads_only", "reads only", "raised TypeError: this list is read-only"),
    (sinks.Normalizes, "reads_only", "reads only", "immutable type: 'SchedulerStats'"),
    (sinks.Database, "threads", "threads", "raised ProgrammingError: SQLite objects created in"),
    (sinks.Keeps, "memory", "memory", r"its attributes grew from \d+ to \d+ objects in 1000"),
    (sinks.KeepsElsewhere, "memory", "memory", "its references to inputs grew from"),
    (sinks.KeepsIds, "memory", "memory", "its attributes grew"),
    (sinks.ClosesOnce, "close", "close", r"close\(\) raised AttributeError"),
    (sinks.WritesAfterClose, "close", "close", "raised ValueError: I/O operation on closed file"),
    (sinks.LeavesAThread, "close", "close", "after close there still are: thread 'sink'"),
    (sinks.LeavesTheFile, "close", "close", "after close there still are: /"),
    (sinks.CannotClose, "close", "close", r"close\(\) raised AttributeError: .* 'first'"),
    (sinks.Sleeps, "speed", "speed", r"a call of record took \d+ microseconds, the budget is 5000"),
    (sinks.SleepsInReports, "speed", "speed", r"a call of report took \d+ microseconds"),
]  # fmt: skip

PUBLISHERS = [
    (publishers.WithoutContract, "contract", "contract", "add `contract = 1` to its class body"),
    (publishers.StoredOnly, "events", "events", "raised AttributeError: .* 'token_ids'"),
    (publishers.NeedsParent, "events", "events", "raised AttributeError: 'NoneType' object"),
    (publishers.Drops, "delivery", "delivery", r"of 200 batches \d+ did not come, the first"),
    (publishers.Repeats, "delivery", "delivery", "batch number 49 came 2 times"),
    (publishers.Reorders, "delivery", "delivery", "batch number 49 came in place 48"),
    (publishers.Truncates, "delivery", "delivery", r"the batch .* came as"),
    (publishers.SendsNothing, "delivery", "delivery", "nothing came within 0.1 s of batches"),
    (publishers.Sorts, "reads_only", "reads only", "raised TypeError: this list is read-only"),
    (publishers.Keeps, "memory", "memory", r"its attributes grew from \d+ to \d+ objects"),
    (publishers.LeavesTheThread, "close", "close", "after close there still are: thread"),
    (publishers.LeavesTheSocket, "close", "close", "after close there still are: socket"),
    (publishers.ClosesOnce, "close", "close", r"close\(\) raised AttributeError"),
    (publishers.HoldsTheOptions, "close", "close", "constructor raised OSError: Address already"),
    (publishers.Sleeps, "speed", "speed", r"a call of publish took \d+ microseconds, the budget"),
]  # fmt: skip


class Subscribed(KVEventPublisherSuite):
    """Listens in the same process."""

    def subscribe(self, publisher):
        batches = []
        publisher.listeners.append(batches)

        def received():
            new = batches[:]
            del batches[: len(new)]
            return new

        return received


SUITES = [
    (TokenizerSuite, "tokenizer", TOKENIZERS),
    (StatSinkSuite, "sink", SINKS),
    (Subscribed, "publisher", PUBLISHERS),
]
BROKEN = [(suite, attribute, *sample) for suite, attribute, samples in SUITES for sample in samples]

RIGHT = [
    (TokenizerSuite, "tokenizer", tokenizers.Bytes),
    (StatSinkSuite, "sink", sinks.Totals),
    (StatSinkSuite, "sink", sinks.Exports),
    (Subscribed, "publisher", publishers.Queued),
]


LIMITS = {
    publishers.SendsNothing: {"reporting.publisher_suite._FIRST_SECONDS": 0.1},
    publishers.Drops: {"reporting.publisher_suite._QUIET_SECONDS": 0.1},
}


@each_broken(BROKEN, ("suite", "attribute", "cls", "test", "rule", "pattern"))
def test_a_broken_component_fails_its_rule(suite, attribute, cls, test, rule, pattern, monkeypatch):
    if test in ("memory", "close"):
        shorten(monkeypatch, {"reporting.calls._WAIT_SECONDS": 0.1})
    shorten(monkeypatch, LIMITS.get(cls, {}))
    assert_fails(suite, attributes_of(attribute, cls), test, rule, pattern)


@pytest.mark.parametrize(("suite", "attribute", "cls"), RIGHT, ids=label)
def test_correct_components_pass(suite, attribute, cls):
    assert messages_of(suite, {**attributes_of(attribute, cls), "examples": kit_examples()}) == {}


@pytest.mark.parametrize(("suite", "attribute", "broken"), SUITES, ids=label)
def test_every_test_catches_a_component(suite, attribute, broken):
    assert {test for _, test, _, _ in broken} == suite_tests(suite)
