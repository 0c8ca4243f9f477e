"""The worker half of the connector "stores" and other engines: delays among them."""

from __future__ import annotations

import threading

import pytest
from support.builtins.kv_store_fakes import ScriptedPeers, ScriptedStore, opened
from support.waiting import wait_until

from hardpoint.builtin_plugins.kv_connectors.jobs import BlockLoad, Renewal, Save, TransferSource

SIZES = (128, 48, 48)
SECRET = b"s" * 16
HASHES = [bytes([number]) * 32 for number in range(8)]
BLOCKS = list(range(8))
ONE_BUFFER = 1


@pytest.fixture
def gate():
    """A store that never returns, until the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def open_rank(**options):
    return opened(stores=[ScriptedStore(SIZES), ScriptedPeers(SIZES)], **options)


def load(name, peer=None, hashes=HASHES[:3], first=10):
    transfer = None if peer is None else TransferSource(peer, SECRET)
    blocks = list(range(first, first + len(hashes)))
    return BlockLoad(name, list(hashes), blocks, transfer=transfer)


def offer(rank, hashes=HASHES[:3]):
    """Offer blocks 0, 1 and so on, and wait until they are."""
    rank.step(Save(list(hashes), BLOCKS[: len(hashes)], SECRET))
    wait_until(lambda: len(rank.stores[1].offered) == len(hashes))


def test_a_peer_that_does_not_answer_delays_no_other_load(gate):
    with open_rank(threads=1) as rank:
        peers = rank.stores[1]
        peers.instead["fetch"] = gate.wait
        rank.until_saved(Save(HASHES[:3], BLOCKS[:3]), stores=2)
        offer(rank)
        rank.step(*(load(f"bad {number}", "bad") for number in range(5)))
        wait_until(lambda: "bad" in peers.fetched)
        assert rank.until_loaded(load("stored", first=10)) == set()
        assert rank.until_loaded(load("offered", "good", first=20)) == set()
        for first in (10, 20):
            assert rank.content(first + 2) == rank.content(2)
        assert peers.fetched.count("bad") == 1, "more threads than there may be for a peer"
        gate.set()


def test_without_its_first_block_a_load_asks_for_no_other():
    with open_rank() as rank:
        offer(rank, HASHES[1:4])
        assert rank.until_loaded(load("a", "good", HASHES[:4])) == {10, 11, 12, 13}
        assert rank.stores[1].fetched == ["good"]
        assert rank.until_loaded(load("b", "good", HASHES[1:4])) == set()
        assert rank.stores[1].fetched == ["good"] * 4


def test_renewals_are_one_call_for_each_peer_and_delay_nothing(gate):
    with open_rank(threads=1) as rank:
        peers = rank.stores[1]
        peers.instead["renew"] = peers.instead["fetch"] = gate.wait
        rank.until_saved(Save(HASHES[:3], BLOCKS[:3]), stores=2)
        rank.step(load("bad", "bad"))
        renewals = [
            Renewal(HASHES[:count], TransferSource(peer, SECRET))
            for peer in ("bad", "good", "")
            for count in (1, 2, 3)
        ]
        rank.step(*renewals)
        assert rank.until_loaded(load("stored")) == set()
        wait_until(lambda: len(peers.renewed) == 2)
        assert sorted(peers.renewed, key=str) == [("good", 6), (None, 6)]
        gate.set()
        wait_until(lambda: ("bad", 6) in peers.renewed)


def test_offers_have_room_of_their_own_and_go_first(gate):
    with open_rank(save_bytes=ONE_BUFFER, save_threads=1) as rank:
        rank.store.instead["store"] = lambda *_: gate.wait()
        offer(rank, HASHES)  # one after the other in the only buffer
        rank.step(Save(HASHES[:2], BLOCKS[:2]), Save(HASHES[:2], BLOCKS[:2], b"t" * 16))
        wait_until(lambda: len(rank.stores[1].offered) == len(HASHES) + 2)
        assert rank.answers().unsaved == HASHES[1:2], "a step waited for room for it"
        assert not rank.faults
        gate.set()


def test_blocks_for_which_there_is_no_buffer_are_named(gate):
    with open_rank(save_bytes=ONE_BUFFER, offer_wait_seconds=0.01) as rank:
        rank.stores[1].instead["offer"] = gate.wait
        rank.step(Save(HASHES[:4], BLOCKS[:4], SECRET))
        assert rank.answers().unoffered == [(SECRET, block) for block in HASHES[1:4]]
        gate.set()
        ((name, message),) = rank.faults
        assert name == "stores"
        assert message.startswith("no room to offer the blocks of a prompt to another engine: ")
        assert message.endswith("raise plugin.stores.save_bytes")


def test_blocks_that_the_store_refuses_are_named(gate):
    with open_rank(save_threads=1) as rank:
        rank.stores[1].instead["offer"] = lambda: False
        rank.step(Save(HASHES[:4], BLOCKS[:4], SECRET))
        refused = []
        wait_until(lambda: refused.extend(rank.answers().unoffered) or len(refused) == 4)
        assert refused == [(SECRET, block) for block in HASHES[:4]]
        assert "plugin.peers may have too little room" in rank.faults[0][1]
        gate.set()
