"""KV connectors with one mistake each fail their rule; a right one passes."""

from __future__ import annotations

import random

import pytest
from support.broken import kv_connectors as broken
from support.kit_suites import assert_fails, each_broken, messages_of, shorten, suite_tests

from hardpoint.testing import KVConnectorSuite
from hardpoint.testing.kv.storage import FAULTS, damage_files

OTHER = r"slot \d of block \d+, it holds keys and values of another history"

# connector, test that it fails, rule, pattern of the message
CONNECTORS = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.LoadsNothing, "loads", "loads", "cache was reset, 0 tokens of a prompt of 37"),
    (broken.LeavesTheLastBlock, "loads", "loads", "32 tokens of a prompt of 37 .* expected 36"),
    (broken.LoadsOneBlockEverywhere, "tokens", "slots", OTHER),
    (broken.ForgetsTheLocalPrefix, "tokens", "slots", "it holds"),
    (broken.SavesBeforeTheStep, "tokens", "slots", "it holds"),
    (broken.SavesUnfinishedBlocks, "tokens", "slots", "it holds nothing"),
    (broken.RaisesForUnknownRequests, "tokens", "raises", r"request_finished\(\) raised KeyError"),
    (broken.SendsObjects, "loads", "data", r"build_connector_meta\(\) returned .* does not come"),
    (broken.ForgetsTheTypeOfMetadata, "loads", "data", "comes through as {'loads': .* Metadata is"),
    (broken.FinishesWithNone, "loads", "results", r"request_finished\(\) returned \(None, None\)"),
    (broken.NamesNoLoad, "loads", "faultless", r"load of request '.*' took more than 0.4 s"),
    (broken.SaysTooSoon, "tokens", "slots", "it holds"),
    (broken.NeverKnows, "tokens", "faultless", "did not know how much of request"),
    (broken.KeepsBlocks, "tokens", "faultless", r"(?s)did not report within .* in get_finished"),
    (broken.HidesFailedLoads, "storage", "slots|tokens", "over storage that .*: (for|a) "),
    (broken.SavesAfterAFailedLoad, "storage", "slots", f"over storage that .* {OTHER}"),
    (broken.SavesOthersAfterAFailedLoad, "storage", "slots", f"over storage that .* {OTHER}"),
    (broken.TrustsStorage, "storage", "slots", "over storage that returns .*, it holds"),
    (broken.RaisesForLostBlocks, "storage", "raises", r"start_load_kv\(\) raised \w+Error"),
    (broken.KeysWithoutIdentity, "foreign", "foreign", r"an engine with .* loaded \d+ tokens"),
    (broken.LooksUpSlowly, "time", "time", r"get_num_new_matched_tokens\(\) took 0\.\d+ s"),
    (broken.SavesSlowly, "time", "time", r"wait_for_save\(\) took 0\.\d+ s, at most 0.1"),
    (broken.LeavesAThread, "release", "release", "these threads are left: Endless"),
    (broken.RemembersRequests, "memory", "memory", "referenced by a RemembersRequests grew from"),
]  # fmt: skip

RANKS = [
    (broken.Shared, "ranks", "ranks", "parallel.tensor = 2 .* 0 tokens of a prompt"),
]


_STORE = {"kv.connector_suite._STORE_SECONDS": 0.1}
_QUIET = {"kv.connector_session._QUIET_SECONDS": 0.4}
LIMITS = {
    broken.LoadsNothing: _STORE,
    broken.LeavesTheLastBlock: _STORE,
    broken.LeavesAThread: {"kv.connector_suite._THREAD_SECONDS": 0.1},
    **dict.fromkeys((broken.NamesNoLoad, broken.SaysTooSoon, broken.NeverKnows), _QUIET),
    broken.KeepsBlocks: _QUIET,
}


@each_broken(CONNECTORS)
def test_a_broken_connector_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, {"kv.connector_suite._ATTEMPTS": 1, **LIMITS.get(cls, {})})
    attributes = {"connector": cls, "options": {"path": "{folder}"}}
    assert_fails(KVConnectorSuite, attributes, test, rule, pattern)


@pytest.mark.nightly
@each_broken(RANKS)
def test_a_broken_connector_of_several_processes_fails_its_rule(
    cls, test, rule, pattern, monkeypatch
):
    shorten(monkeypatch, _STORE)  # what does not come at once never does
    attributes = {"connector": cls, "options": {"path": "{folder}"}}
    assert_fails(KVConnectorSuite, attributes, test, rule, pattern)


def test_a_right_connector_passes():
    attributes = {"connector": broken.Shelf, "options": {"path": "{folder}"}}
    assert messages_of(KVConnectorSuite, attributes, ["contract", "loads", "foreign"]) == {}


def test_a_connector_that_cannot_be_imported_is_reported():
    class Here(broken.Shelf):
        contract = 1

    attributes = {"connector": Here, "options": {"path": "{folder}"}}
    message = messages_of(KVConnectorSuite, attributes, ["contract"])["contract"]
    assert "no engine can be opened with it" in message
    assert "put the class into a module that can be imported" in message


def test_storage_that_nothing_disturbs_is_reported(tmp_path, monkeypatch):
    shorten(monkeypatch, _STORE)
    attributes = {"connector": broken.Shelf, "options": {"path": str(tmp_path)}}
    message = messages_of(KVConnectorSuite, attributes, ["storage"])["storage"]
    assert "the storage was never disturbed: no files are in {folder}" in message
    assert "fix: override disturb" in message


@pytest.mark.parametrize("fault", FAULTS)
def test_files_may_go_while_they_are_damaged(tmp_path, fault):
    class Renaming(random.Random):
        def randrange(self, *limits):
            (tmp_path / "a").unlink(missing_ok=True)
            return 1

    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 9)
    damage_files(tmp_path, fault, Renaming())
    other = tmp_path / "b"
    is_as_before = other.is_file() and other.read_bytes() == b"b" * 9
    assert is_as_before == (fault in ("slow", "dead"))


def test_every_test_catches_a_connector():
    assert {test for _, test, _, _ in CONNECTORS + RANKS} == suite_tests(KVConnectorSuite)
