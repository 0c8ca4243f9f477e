"""Peer KV stores with one mistake each fail their rule; a correct one passes."""

from __future__ import annotations

from support.broken import kv_stores, peer_kv_stores
from support.kit_suites import assert_fails, each_broken, shorten, suite_tests
from support.searching import kit_examples

from hardpoint.testing import KVStoreSuite, PeerKVStoreSuite

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
    (peer_kv_stores.RenewsOwnOnly, "leases", "leases", r"gone that the engine that \w+ it r"),
    (peer_kv_stores.RenewsMissing, "leases", "calls", "renew of key . raised KeyError"),
    (peer_kv_stores.NeverWaits, "waits", "waits", "offered 0.1 s after the fetch, .* was not fou"),
    (peer_kv_stores.WaitsLonger, "waits", "waits", r"which had 0.1 s, returned False after "),
]  # fmt: skip


class TestRightPeer(PeerKVStoreSuite):
    store = peer_kv_stores.RightPeer
    peer_options = in_pair
    examples = kit_examples(0.2)


@each_broken(STORES)
def test_a_broken_store_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    waits_longer = cls is peer_kv_stores.WaitsLonger
    shorten(monkeypatch, {"kv.peer_suite._SHORT": 0.1})
    shorten(monkeypatch, {"kv.peer_suite._SLACK_SECONDS": 0.2} if waits_longer else {})
    attributes = {"store": cls, "timeout_seconds": 60.0, "peer_options": in_pair}
    assert_fails(PeerKVStoreSuite, attributes, test, rule, pattern)


def test_every_test_catches_a_store():
    own_tests = suite_tests(PeerKVStoreSuite) - suite_tests(KVStoreSuite)
    assert {test for _, test, _, _ in STORES} == own_tests
