"""Peer KV stores with one mistake each fail their rule; a correct one passes."""

from __future__ import annotations

import pytest
from support.broken import kv_stores, peer_kv_stores
from support.kit_suites import assert_fails, label, stop_at_first_failure, suite_tests
from support.searching import kit_examples

from hardpoint.testing import KVStoreSuite, PeerKVStoreSuite
from hardpoint.testing.kv import peer_suite, store_place

pytest_plugins = ["hardpoint.testing"]


def in_pair(_suite, folder, _engine_id, peer):
    """Give two stores the same folder."""
    return {"folder": str(folder), "peer": peer}


# component, test that it fails, rule, pattern of the message
STORES = [
    (kv_stores.Right, "offers", "offers", "Right is no PeerKVStore"),
    (peer_kv_stores.NamesItself, "peers", "offers", r"engine 'one' are .*, expected frozenset"),
    (peer_kv_stores.FetchedTwice, "offers", "offers", "key 0 could be fetched twice"),
    (peer_kv_stores.LooksUpOffers, "offers", "lookup", "key 0, under which nothing was stored"),
    (peer_kv_stores.PopsLate, "offers", "offers", "of 4 threads, [234] fetched one block"),
    (peer_kv_stores.NeverEnds, "leases", "leases", r"offered for 0.1 s was there after 0.2 s"),
    (peer_kv_stores.RenewsOwnOnly, "leases", "leases", "gone that the engine that fetches it r"),
    (peer_kv_stores.RenewsMissing, "leases", "calls", "renew of key . raised KeyError"),
    (peer_kv_stores.NeverWaits, "waits", "waits", "offered 0.1 s after the fetch, .* was not fou"),
    (peer_kv_stores.WaitsLonger, "waits", "waits", r"which had 0.1 s, returned False after [0-9.]+ s"),
]  # fmt: skip


@pytest.fixture
def brief(monkeypatch):
    """Wait little, and stop at the first failing case instead of shrinking it."""
    stop_at_first_failure(monkeypatch)
    monkeypatch.setattr(store_place, "_SLACK_SECONDS", 1.0)
    monkeypatch.setattr(peer_suite, "_SHORT", 0.1)
    monkeypatch.setattr(peer_suite, "_SLACK_SECONDS", 0.2)


class TestRightPeer(PeerKVStoreSuite):
    store = peer_kv_stores.RightPeer
    peer_options = in_pair
    examples = kit_examples(0.2)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("cls", "test", "rule", "pattern"), STORES, ids=label)
def test_a_broken_store_fails_its_rule(cls, test, rule, pattern):
    attributes = {"store": cls, "timeout_seconds": 1.0, "peer_options": in_pair}
    assert_fails(PeerKVStoreSuite, attributes, test, rule, pattern)


def test_every_test_catches_a_store():
    own = suite_tests(PeerKVStoreSuite) - suite_tests(KVStoreSuite)
    assert {test for _, test, _, _ in STORES} == own
