"""KV stores with one mistake each fail their rule; correct ones pass."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest
from support.broken import kv_stores
from support.kit_suites import assert_fails, each_broken, messages_of, shorten, suite_tests
from support.searching import kit_examples

from hardpoint.builtin_plugins.kv_stores.disk import DiskStore
from hardpoint.testing import KVConnectorSuite, KVStoreSuite

pytest_plugins = ["hardpoint.testing"]


def in_folder(_suite, folder):
    """Give a store that keeps blocks in a place the folder's name."""
    return {"path": str(folder)}


# component, test that it fails, rule, pattern of the message
STORES = [
    (kv_stores.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (kv_stores.NoAbsentKeys, "lookup", "calls", "lookup of 1 keys raised KeyError"),
    (kv_stores.FindsAll, "lookup", "lookup", "found key 0, under which nothing was stored"),
    (kv_stores.FindsNone, "lookup", "lookup", r"lookup of .* \[False.*, and load finds key 0"),
    (kv_stores.StopsAtMiss, "lookup", "results", r"lookup of 1 keys returned \[\]"),
    (kv_stores.AnswersNone, "content", "results", "store of key 0 returned None"),
    (kv_stores.NeverDone, "content", "results", "future of load of key 0 was not done after 0.3"),
    (kv_stores.KeepsNothing, "kept", "kept", "False for each of 12 blocks, twice, in a new place"),
    (kv_stores.PromisesTooEarly, "content", "kept", "key 0 as kept, and load does not find it ri"),
    (kv_stores.ForgetsOld, "kept", "kept", "key 0 as kept, .* after all were stored"),
    (kv_stores.KeepsFirst, "replaced", "replaced", "version 1 of .* load gave version 0"),
    (kv_stores.FirstPartOnly, "content", "content", "of the block stored as 0, a wrong part 2"),
    (kv_stores.WritesNothing, "content", "content", "load of key 0 returned True, and wrote noth"),
    (kv_stores.ShortKeys, "content", "(content|lookup)", "found key|gave the block of key"),
    (kv_stores.TextKeys, "keys", "(content|lookup)", "found key|gave the block of key"),
    (kv_stores.FoldsCase, "keys", "(content|lookup)", "found key|gave the block of key"),
    (kv_stores.KeepsViews, "buffers", "content", "load of key 0 returned True, and wrote nothing"),
    (kv_stores.WritesToStored, "buffers", "borrowed", "store of key 0 raised TypeError: cannot mo"),
    (kv_stores.WritesOutside, "buffers", "borrowed", "wrote outside of its buffer"),
    (kv_stores.WritesLate, "buffers", "borrowed", "was written after the call had returned"),
    (kv_stores.TornBlocks, "threads", "content", r"part \d of \d+ bytes of the block stored as"),
    (kv_stores.OneScratch, "threads", "content", r"load of key \d gave the block of key \d"),
    (kv_stores.LosesLock, "content", "calls", "not returned after 0.4 s: "),
    (kv_stores.OneRank, "ranks", "(content|kept|lookup)", "load|lookup"),
    (kv_stores.AnySize, "ranks", "content", "loaded into a buffer of another size"),
    (kv_stores.NoLimit, "limit", "limit", "of 48 blocks 48 are there, and there is room for 8"),
    (kv_stores.DropsNewest, "limit", "kept", "does not find it right after, in a store that is"),
    (kv_stores.NotShared, "shared", "shared", r"lookup returned \[False\] and load did not find"),
    (kv_stores.NotDurable, "durable", "kept", "after drain, close and a new start"),
    (kv_stores.DrainWaits, "drain", "calls", r"not returned after 0.4 s: drain\(\)"),
    (kv_stores.LeavesThread, "close", "close", "after close there still are: thread 'leaf'"),
    (kv_stores.LeavesFile, "close", "close", "after close there still are: /"),
    (kv_stores.ReadsToLookUp, "speed", "speed", r"256 keys one cost \d+ microseconds, .* is 100"),
    (kv_stores.ReportsFaults, "content", "calls", "there was none: the block is there already"),
]  # fmt: skip


class TestRight(KVStoreSuite):
    store = kv_stores.Right
    examples = kit_examples(0.3)


class TestAnswersLater(KVStoreSuite):
    store = kv_stores.AnswersLater
    examples = kit_examples(0.3)


class TestInPlace(KVStoreSuite):
    store = kv_stores.InPlace
    shared = durable = True
    place_options = in_folder
    examples = kit_examples(0.3)


LIMITS = {
    kv_stores.LosesLock: {"kv.store_place._SLACK_SECONDS": 0.1},
    kv_stores.DrainWaits: {"kv.store_place._SLACK_SECONDS": 0.1},
    kv_stores.LeavesThread: {"reporting.calls._WAIT_SECONDS": 0.05},
    kv_stores.LeavesFile: {"reporting.calls._WAIT_SECONDS": 0.05},
}


@each_broken(STORES)
def test_a_broken_store_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, LIMITS.get(cls, {}))
    never_answers = cls in (kv_stores.NeverDone, kv_stores.LosesLock, kv_stores.DrainWaits)
    attributes = {"store": cls, "timeout_seconds": 0.3 if never_answers else 60.0}
    attributes |= {"shared": True, "durable": True}
    if issubclass(cls, kv_stores.InPlace):
        attributes["place_options"] = in_folder
    else:
        attributes["durable"] = False
    assert_fails(KVStoreSuite, attributes, test, rule, pattern)


def test_a_store_that_grows_with_its_uses_is_caught():
    pattern = "elements of its attribute 'loads' grew by"
    attributes = {"store": kv_stores.KeepsLoads, "examples": 0.4}
    assert_fails(KVStoreSuite, attributes, "resources", "resources", pattern)
    assert messages_of(KVStoreSuite, attributes | {"store": kv_stores.Right}, ["resources"]) == {}


def test_every_test_catches_a_store():
    assert {test for _, test, _, _ in STORES} == suite_tests(KVStoreSuite)


def test_a_replaced_test_and_wrong_options_are_named():
    attributes = {"store": kv_stores.Right, "test_kept": lambda self: None}
    messages = messages_of(KVStoreSuite, attributes, ["contract"])
    assert "replaces test_kept" in messages["contract"]
    attributes = {"store": kv_stores.Right, "place_options": lambda _suite, _folder: None}
    messages = messages_of(KVStoreSuite, attributes, ["contract"])
    assert "place_options returned no mapping" in messages["contract"]


@pytest.mark.parametrize(("options", "observed"), [({}, "path: missing"), ({"pth": ""}, "pth: ")])
def test_options_that_are_missing_or_misspelt_are_named(options, observed):
    attributes = {"store": DiskStore, "options": options}
    message = messages_of(KVStoreSuite, attributes, ["contract"])["contract"]
    assert "rule: options: the options of the suite are valid" in message
    assert f".{observed}" in message
    assert "fix: set the suite's `options`, or the result of place_options, as an op" in message


@pytest.mark.parametrize(
    ("suite", "attribute", "interface", "test"),
    [
        (KVStoreSuite, "store", "KVStore", "limit"),
        (KVConnectorSuite, "connector", "KVConnector", "tokens"),
    ],
)
def test_a_class_under_test_that_is_none_is_named(suite, attribute, interface, test):
    for wrong in ({}, {attribute: "a.b:C"}, {attribute: dict}):
        messages = messages_of(suite, wrong, ["contract", test])
        expected = f"TestComponent.{attribute}: expected the class under test, which derives from"
        expected += f" {interface}, got {wrong.get(attribute)!r}"
        assert messages == {"contract": expected, test: expected}


def test_what_writes_after_close_is_reported(monkeypatch):
    cleanup, failed = tempfile.TemporaryDirectory.cleanup, []

    def failing(folder):
        if folder.name not in failed:
            failed.append(folder.name)
            raise OSError(errno.ENOTEMPTY, "Directory not empty", "kept")
        cleanup(folder)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", failing)
    message = messages_of(KVStoreSuite, {"store": kv_stores.Right}, ["contract"])["contract"]
    assert "rule: release: nothing is written after close" in message
    assert "something wrote to the test's folder after close, when it was deleted" in message
    assert "fix: join the threads that write in close()" in message
    assert failed
    assert not any(map(os.path.exists, failed))
