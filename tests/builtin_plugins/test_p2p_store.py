"""Blocks in the memory of other engines."""

from __future__ import annotations

import os
import socket
import threading
import time

import msgspec
import pytest
import zmq
from support.builtins.peers import BLOCK, Peers, block, holds, key, peer_context
from support.kv_stores import scripted_clock
from support.waiting import wait_until

from hardpoint.builtin_plugins.kv_stores.p2p import PeerToPeerStore
from hardpoint.builtin_plugins.kv_stores.p2p_client import PeerClient
from hardpoint.builtin_plugins.kv_stores.p2p_messages import Get, Has, Renew, Take, decode, encode
from hardpoint.builtin_plugins.kv_stores.p2p_pool import PeerBlocks
from hardpoint.plugins.kv_store import BlockBuffer


@pytest.fixture
def peers(tmp_path):
    peers = Peers(tmp_path)
    yield peers
    peers.close_all()


@pytest.fixture
def leases(monkeypatch):
    """A clock for leases alone."""
    return scripted_clock(monkeypatch, "kv_stores.p2p_pool")


def leave_socket(address):
    """Leave a socket without a listener, as an engine that was killed does."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address.removeprefix("ipc://"))


def server_threads():
    return [thread for thread in threading.enumerate() if thread.name == "KVPeerServer"]


class TestForAnybody:
    def test_what_one_stores_all_find(self, peers):
        a, b = peers.open("a"), peers.open("b")
        assert a.store(key(1), block(7))
        assert a.lookup([key(1), key(2)]) == b.lookup([key(1), key(2)]) == [True, False]
        for store in (a, b):
            buffer = block()
            assert store.load(key(1), buffer)
            assert holds(buffer, 7)
            assert not store.load(key(2), buffer)
        assert not peers.faults

    def test_those_that_were_not_used_for_longest_go_first(self, peers):
        a = peers.open("a", size_bytes=2 * BLOCK + 1)
        for number in (1, 2):
            a.store(key(number), block(number))
        assert a.load(key(1), block())
        a.store(key(3), block(3))
        assert a.lookup([key(1), key(2), key(3)]) == [True, False, True]

    def test_a_block_replaces_the_old_one(self, peers):
        a, b = peers.open("a", size_bytes=2 * BLOCK), peers.open("b")
        for number, fill in ((1, 1), (2, 2), (1, 5), (3, 3)):
            assert a.store(key(number), block(fill))
        assert b.lookup([key(1), key(2), key(3)]) == [True, False, True]
        buffer = block()
        assert b.load(key(1), buffer)
        assert holds(buffer, 5)

    def test_what_is_not_kept_any_more_is_reported(self, tmp_path):
        evicted = []
        options = {"listen": f"ipc://{tmp_path}/s/a", "size_bytes": 2 * BLOCK}
        a = PeerToPeerStore(peer_context("a", options, report_evicted=evicted.extend))
        for number in (1, 2, 1, 3):
            a.store(key(number), block(1))
        assert evicted == [key(2)]
        a.offer(key(4), block(1), 60.0)
        assert evicted == [key(2), key(1)]
        a.close()

    def test_many_keys_go_in_several_messages(self, peers):
        a, b = peers.open("a"), peers.open("b")
        for number in range(0, 3000, 7):
            a.store(key(number), block(1))
        results = b.lookup([key(number) for number in range(3000)])
        assert [number for number, is_there in enumerate(results) if is_there] == list(
            range(0, 3000, 7)
        )

    def test_threads_share_connections(self, peers):
        a, b = peers.open("a"), peers.open("b")
        for number in range(100):
            a.store(key(number), block(number))
        wrong = []

        def load(first):
            for number in range(first, 100, 8):
                buffer = block()
                if not b.load(key(number), buffer) or not holds(buffer, number):
                    wrong.append(number)

        threads = [threading.Thread(target=load, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestForOne:
    def test_a_block_is_fetched_once(self, peers):
        a, b = peers.open("a"), peers.open("b")
        assert b.peers == {"a"}
        assert a.offer(key(1), block(5), 60.0)
        buffer = block()
        assert b.fetch("a", key(1), buffer, 60.0)
        assert holds(buffer, 5)
        began = time.monotonic()
        assert not b.fetch("a", key(1), buffer, 60.0)
        assert time.monotonic() - began < 30.0, "it is known to be gone"
        assert a.lookup([key(1)]) == b.lookup([key(1)]) == [False], "it is for no one else"

    def test_fetch_waits_for_a_block_that_comes(self, peers):
        a, b = peers.open("a"), peers.open("b")
        timer = threading.Timer(0.1, a.offer, (key(1), block(5), 60.0))
        timer.start()
        buffer = block()
        assert b.fetch("a", key(1), buffer, 60.0)
        assert holds(buffer, 5)
        timer.join()

    def test_a_block_that_never_comes_is_awaited_until_the_time_limit(self, peers):
        peers.open("a")
        b = peers.open("b", wait_seconds=0.2)
        began = time.monotonic()
        assert not b.fetch("a", key(1), block(), 60.0)
        assert 0.15 < time.monotonic() - began < 30.0

    def test_after_its_lease_a_block_is_never_given(self, peers, leases):
        a, b = peers.open("a"), peers.open("b")
        a.offer(key(1), block(5), 10.0)
        leases.advance(10.1)
        buffer = block(9)
        assert not b.fetch("a", key(1), buffer, 60.0)
        assert holds(buffer, 9)

    def test_leases_end_without_a_question(self, peers, leases):
        a = peers.open("a", size_bytes=BLOCK)
        a.offer(key(1), block(5), 10.0)
        assert not a.store(key(2), block(2))
        leases.advance(10.1)
        wait_until(lambda: a.store(key(2), block(2)))

    def test_many_offers_do_not_slow_down_one(self):
        pool, small = PeerBlocks(10**5), BlockBuffer(memoryview(bytearray(16)), [16])
        began = time.thread_time()
        for number in range(20_000):
            assert pool.offer(key(number), small, 60.0)
        assert time.thread_time() - began < 5.0  # many times that if each looks at all others

    def test_both_sides_renew_leases(self, peers, leases, monkeypatch):
        renew, renewed = PeerBlocks.renew, []

        def recorded(pool, keys):
            renew(pool, keys)
            renewed.append(list(keys))

        monkeypatch.setattr(PeerBlocks, "renew", recorded)
        a, b = peers.open("a"), peers.open("b")
        for number in (1, 2, 3):
            a.offer(key(number), block(number), 10.0)
        for _ in range(3):
            leases.advance(6.0)
            a.renew([key(1)])
            b.renew([key(2), key(77)], "a")
            wait_until(lambda: renewed == [[key(1)], [key(2), key(77)]])
            renewed.clear()
        fetched = [b.fetch("a", key(number), block(), 60.0) for number in (1, 2, 3)]
        assert fetched == [True, True, False]

    def test_renewing_brings_nothing_back(self, peers, leases):
        a, b = peers.open("a"), peers.open("b")
        a.offer(key(1), block(5), 10.0)
        leases.advance(10.1)
        a.renew([key(1)])
        assert not b.fetch("a", key(1), block(), 60.0)

    def test_offers_are_not_evicted_and_have_no_more_than_the_room(self, peers):
        a, b = peers.open("a", size_bytes=2 * BLOCK), peers.open("b")
        assert a.store(key(9), block(9))
        assert a.offer(key(1), block(1), 60.0)
        assert a.offer(key(2), block(2), 60.0)
        assert not a.offer(key(3), block(3), 60.0)
        assert not a.store(key(4), block(4))
        assert a.lookup([key(9)]) == [False]
        assert b.fetch("a", key(1), block(), 60.0)
        wait_until(lambda: a.offer(key(3), block(3), 60.0))

    def test_two_peers_of_which_only_one_gets_it(self, peers):
        a, b = peers.open("a"), peers.open("b")
        results = []
        threads = [
            threading.Thread(
                target=lambda: results.append(b.fetch("a", key(1), block(), 60.0)), daemon=True
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        a.offer(key(1), block(1), 60.0)
        for thread in threads:
            thread.join(60)
        assert sorted(results) == [False, False, False, True]

    def test_blocks_of_another_model_are_a_fault(self, peers):
        a, b = peers.open("a", identity="other"), peers.open("b")
        a.offer(key(1), block(1), 60.0)
        for _ in range(2):
            assert not b.fetch("a", key(1), block(), 60.0)
        assert peers.faults == ["peer 'a': it has blocks of another model, or in another layout"]


class TestWithoutPeers:
    def test_who_is_not_there_is_asked_once_in_a_while(self, peers):
        b = peers.open("b", retry_seconds=0.3)
        began = time.monotonic()
        for _ in range(2):
            assert b.lookup([key(1)]) == [False]
        assert not b.load(key(1), block())
        assert time.monotonic() - began < 30.0
        a = peers.open("a")
        a.store(key(1), block(1))
        wait_until(lambda: b.lookup([key(1)]) == [True])

    def test_dead_ones_do_not_hide_others(self, peers, monkeypatch):
        b = peers.open("b")
        b.store(key(1), block(1))
        (peers.folder / "sockets" / "file.sock").write_text("")
        for number in range(12):
            leave_socket(peers.address(f"dead{number}"))
        names = ["file", *(f"dead{number}" for number in range(12)), "b"]
        addresses = {name: peers.address(name) for name in names}
        a = peers.open("a", peers=addresses, retry_seconds=3600.0)
        with monkeypatch.context() as patch:  # the time is over once the other one has answered
            clock, answered = scripted_clock(patch, "kv_stores.p2p_client"), PeerClient.answered
            patch.setattr(
                PeerClient, "answered", lambda client: (answered(client), clock.advance(61.0))
            )
            clock.now = time.monotonic()
            assert a.lookup([key(1), key(2)]) == [True, False]
        began = time.monotonic()
        assert a.lookup([key(1), key(2)]) == [True, False]
        assert time.monotonic() - began < 30.0
        assert a.load(key(1), block())
        assert len(peers.faults) == 13
        (of_file,) = (fault for fault in peers.faults if fault.startswith("peer 'file': "))
        assert "is no socket" in of_file
        assert sum("it does not answer" in fault for fault in peers.faults) == 12

    def test_the_first_one_that_has_a_block_is_asked_for_it(self, peers):
        names = {name: peers.address(name) for name in "abc"}
        for name in "abc":
            peers.open(name, peers=names)
        for number, (name, fill) in enumerate([("c", 3), ("b", 2)]):
            peers.stores[name].store(key(1), block(fill))
            buffer = block()
            assert peers.stores["a"].lookup([key(1)]) == [True]
            assert peers.stores["a"].load(key(1), buffer)
            assert holds(buffer, fill), number

    def test_a_block_is_loaded_without_a_lookup(self, peers):
        a, b = peers.open("a"), peers.open("b")
        a.store(key(1), block(7))
        buffer = block()
        assert b.load(key(1), buffer)
        assert holds(buffer, 7)

    def test_who_is_not_there_is_not_waited_for(self, peers):
        b = peers.open("b")
        began = time.monotonic()
        assert not b.fetch("a", key(1), block(), 60.0)
        assert b.lookup([key(1)]) == [False]
        assert time.monotonic() - began < 30.0

    def test_one_thread_at_a_time_waits_for_a_silent_one(self, peers):
        b = peers.open("b", retry_seconds=3600.0)
        leave_socket(peers.address("a"))
        assert not b.fetch("a", key(1), block(), 0.1)
        results = []

        def fetch():
            results.append(b.fetch("a", key(1), block(), 60.0))

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(results) == 3, 30.0)
        assert sum(thread.is_alive() for thread in threads) >= 1
        peers.close("b")
        for thread in threads:
            thread.join()
        assert results == [False] * 4

    def test_renewing_waits_for_no_answer(self, peers):
        b = peers.open("b")
        leave_socket(peers.address("a"))
        began = time.monotonic()
        for _ in range(20):
            b.renew([key(number) for number in range(5000)], "a")
        assert time.monotonic() - began < 30.0
        assert not peers.faults

    def test_closing_twice_is_closing_once(self, peers):
        a = peers.open("a")
        a.close()
        a.offer(key(1), block(1), 1.0)
        a.close()
        assert not list((peers.folder / "sockets").iterdir())

    def test_one_that_restarts_is_found_again_without_its_blocks(self, peers):
        a, b = peers.open("a"), peers.open("b", retry_seconds=0.1)
        a.store(key(1), block(1))
        a.offer(key(2), block(1), 60.0)
        assert b.lookup([key(1)]) == [True]
        peers.close("a")
        assert not b.fetch("a", key(2), block(), 0.5)
        a = peers.open("a")
        assert not b.fetch("a", key(2), block(), 0.5)
        assert not b.load(key(1), block())
        a.store(key(3), block(3))
        wait_until(lambda: b.lookup([key(1), key(3)]) == [False, True])

    def test_closing_does_not_wait_for_answers(self, peers):
        peers.open("a")
        b = peers.open("b")
        thread = threading.Thread(target=b.fetch, args=("a", key(1), block(), 60.0))
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        peers.close("b")
        thread.join(60)
        assert time.monotonic() - began < 30.0
        assert not thread.is_alive()

    def test_nothing_is_left_behind(self, peers):
        before, files = len(server_threads()), set(os.listdir("/proc/self/fd"))
        a, b = peers.open("a"), peers.open("b")
        a.store(key(1), block(1))
        assert b.load(key(1), block())
        peers.close_all()
        assert len(server_threads()) == before
        assert not list((peers.folder / "sockets").iterdir())
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(files) + 3)


class Stranger:
    """A client of a store with a socket of its own."""

    def __init__(self, address):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def send(self, *frames):
        self.socket.send_multipart(frames)

    def hears(self, seconds=0.3):
        return self.socket.recv_multipart() if self.socket.poll(seconds * 1000) else None

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
def stranger(peers):
    peers.open("a")
    stranger = Stranger(peers.address("a"))
    yield stranger
    stranger.close()


SERIAL = bytes(8)
NONSENSE = {
    "no frames": (b"",),
    "one frame": (SERIAL,),
    "many frames": (SERIAL, encode(Has([key(1)])), b"more"),
    "short serial": (b"1", encode(Has([key(1)]))),
    "no msgpack": (SERIAL, b"\xc1\xff"),
    "an unknown question": (SERIAL, msgspec.msgpack.encode(["Eval", "x"])),
    "no tag": (SERIAL, msgspec.msgpack.encode([[key(1)]])),
    "short key": (SERIAL, encode(Get(b"short"))),
    "text as a key": (SERIAL, msgspec.msgpack.encode(["Get", "x" * 32])),
    "too many keys": (SERIAL, encode(Has([key(1)] * 1025))),
    "negative time": (SERIAL, encode(Take(key(1), -1.0, "model"))),
    "endless time": (SERIAL, encode(Take(key(1), float("inf"), "model"))),
    "no number": (SERIAL, encode(Take(key(1), float("nan"), "model"))),
    "no text": (SERIAL, encode(Take(key(1), 1.0, "abc")).replace(b"abc", b"\xff\xfe\xfd")),
    "deep": (SERIAL, b"\x91" * 60_000 + b"\xc0"),
    "deep in a field": (SERIAL, b"\x92\xa3Get" + b"\x91" * 60_000 + b"\xc0"),
    "another field": (SERIAL, msgspec.msgpack.encode(["Get", key(1), 1])),
}


class TestHostilePeers:
    @pytest.mark.parametrize("frames", NONSENSE.values(), ids=NONSENSE)
    def test_nonsense_gets_no_answer_and_harms_no_other(self, peers, stranger, frames):
        b = peers.open("b")
        stranger.send(*frames)
        stranger.send(b"\1" * 8, encode(Has([key(1)])))
        assert stranger.hears(60.0) == [b"\1" * 8, b"\x01", b"\x00"], "and to this alone"
        peers.stores["a"].store(key(1), block(1))
        assert b.lookup([key(1)]) == [True]
        assert not peers.faults

    def test_who_sends_too_much_is_disconnected(self, peers, stranger):
        b = peers.open("b")
        stranger.send(SERIAL, bytes(1 << 20))
        assert stranger.hears(0.1) is None
        assert b.lookup([key(1)]) == [False]

        def hears_again():  # by a new connection: what went by the old one is lost
            stranger.send(SERIAL, encode(Has([key(1)])))
            return stranger.hears()

        wait_until(lambda: hears_again() == [SERIAL, b"\x01", b"\x00"])

    def test_waiting_for_too_many_blocks_is_refused_at_once(self, peers, stranger):
        for number in range(300):
            stranger.send(number.to_bytes(8, "big"), encode(Take(key(number), 3600.0, "model")))
        answers = [stranger.hears(60.0) for _ in range(300 - 256)]
        assert all(answer is not None and answer[1] == b"\x00" for answer in answers)
        assert stranger.hears(0.1) is None
        a, b = peers.stores["a"], peers.open("b")
        threading.Timer(0.1, a.offer, (key(1000), block(1), 60.0)).start()
        assert b.fetch("a", key(1000), block(), 60.0)

    def test_a_peer_that_does_not_read_delays_no_other(self, peers, stranger):
        a, b = peers.stores["a"], peers.open("b")
        a.store(key(1), block(1))
        question = encode(Get(key(1)))
        for _ in range(5000):
            stranger.send(SERIAL, question)
        began = time.monotonic()
        assert b.load(key(1), block())
        assert time.monotonic() - began < 30.0

    def test_renewing_a_million_keys_renews_nothing(self, peers, stranger, leases):
        a, b = peers.stores["a"], peers.open("b")
        a.offer(key(5), block(1), 10.0)
        leases.advance(5.0)
        for _ in range(100):
            stranger.send(SERIAL, encode(Renew([os.urandom(32) for _ in range(1024)])))
        stranger.send(SERIAL, encode(Has([key(1)])))
        assert stranger.hears(60.0)
        leases.advance(5.1)
        assert not b.fetch("a", key(5), block(), 60.0)


class TestLyingPeers:
    """Somebody listens at the address of a peer, and sends arbitrary answers."""

    @pytest.fixture
    def liar(self, peers):
        (peers.folder / "sockets").mkdir(mode=0o700)
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(peers.address("a"))
        yield socket
        context.destroy(linger=0)

    ANSWERS = {
        "short block": lambda serial: [serial, b"\x01", b"x" * 17],
        "long block": lambda serial: [serial, b"\x01", b"x" * (BLOCK + 1)],
        "no block": lambda serial: [serial, b"\x01"],
        "no status": lambda serial: [serial],
        "another status": lambda serial: [serial, b"\x09", b"x" * BLOCK],
        "another serial": lambda serial: [b"\xff" * 8, b"\x01", b"x" * BLOCK],
        "many frames": lambda serial: [serial, b"\x01", b"x", b"y"],
        "too large": lambda serial: [serial, b"\x01", b"x" * (BLOCK + 10_000)],
    }

    @pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
    def test_a_wrong_answer_is_none(self, peers, liar, answer):
        lied = threading.Event()

        def lie():
            client, serial, _ = liar.recv_multipart()
            liar.send_multipart([client, *answer(serial)])
            lied.set()

        thread = threading.Thread(target=lie, daemon=True)
        thread.start()
        b = peers.open("b")
        buffer = block(3)
        while not lied.is_set():  # it may connect too late
            assert not b.fetch("a", key(1), buffer, 0.2)
        assert holds(buffer, 3)
        thread.join()

    def test_flags_of_other_keys_are_no_answer(self, peers, liar):
        def lie():
            client, serial, _ = liar.recv_multipart()
            liar.send_multipart([client, serial, b"\x01", b"\x01\x01\x01"])

        thread = threading.Thread(target=lie, daemon=True)
        thread.start()
        assert peers.open("b").lookup([key(1), key(2)]) == [False, False]
        thread.join(60)

    def test_late_answers_are_ignored(self, peers, liar):
        held = []

        def lie():
            number = 1
            while number < 3:
                client, serial, body = liar.recv_multipart()
                number = int.from_bytes(decode(body).key, "big")
                held.append([client, serial, b"\x01", bytes([number]) * BLOCK])
                if number > 1:
                    for message in held:
                        liar.send_multipart(message)

        thread = threading.Thread(target=lie, daemon=True)
        thread.start()
        b = peers.open("b")
        buffer = block(9)
        while not held:  # it may connect too late
            assert not b.fetch("a", key(1), buffer, 0.3)
        assert b.fetch("a", key(2), buffer, 60.0)
        assert holds(buffer, 2)
        assert b.fetch("a", key(3), buffer, 60.0)
        assert holds(buffer, 3)
        thread.join(60)


class TestPeersThatAreGone:
    def test_one_that_never_listened_is_reported_each_time_that_it_is_tried(
        self, peers, monkeypatch
    ):
        clock = scripted_clock(monkeypatch, "kv_stores.p2p_client")
        b = peers.open("b", retry_seconds=5.0)
        for _ in range(3):
            assert not b.fetch("a", key(1), block(), 60.0)
        told = "peer 'a': no engine listens at its address; its blocks are computed here"
        assert peers.faults == [told]
        clock.advance(5.1)
        assert b.lookup([key(1)]) == [False]
        assert peers.faults == [told] * 2

    def test_one_that_hangs_is_reported_and_no_more_once_it_answers(self, peers):
        """A socket that accepts and does not speak, as of a stopped process."""
        address = peers.address("a").removeprefix("ipc://")
        os.makedirs(os.path.dirname(address), mode=0o700)
        b = peers.open("b", retry_seconds=3600.0, connect_seconds=0.2)
        with socket.socket(socket.AF_UNIX) as hung:
            hung.bind(address)
            hung.listen()
            for _ in range(2):
                assert not b.fetch("a", key(1), block(), 0.4)
        assert peers.faults == ["peer 'a': it does not answer; its blocks are computed here"]
        os.unlink(address)
        a = peers.open("a")
        a.offer(key(1), block(5), 3600.0)
        wait_until(lambda: b.fetch("a", key(1), block(), 60.0))
        assert len(peers.faults) <= 2
