"""KV events over real sockets: in order, replayable, and never in the engine's way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time

import msgspec
import pytest
import zmq
from support.builtins.kv_events_harness import Subscriber, answers, ask, batch, replay, sent
from support.waiting import wait_until

from hardpoint.builtin_plugins.kv_cache import event_stream as kv_event_stream
from hardpoint.plugins import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


@pytest.fixture(params=["tcp", "ipc"])
def publisher(request, open_publisher, tmp_path):
    if request.param == "tcp":
        return open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    return open_publisher(endpoint=live, replay_endpoint=replay)


# The live stream


def test_a_subscriber_gets_every_batch_in_order(context, publisher):
    subscriber = Subscriber(context, publisher)
    first = subscriber.has_all(publisher) + 1
    for number in range(first, first + 200):
        publisher.publish(batch(number))
    assert [subscriber.read() for _ in range(200)] == [
        (number, batch(number)) for number in range(first, first + 200)
    ]


def test_every_kind_of_event_arrives_whole(context, publisher):
    events = [
        BlockStored([b"\x01" * 32, b"\x02" * 32], b"\x00" * 32, [1, 2, 3, 4], 2, "poet", 1),
        BlockRemoved([b"\x01" * 32], 1),
        BlockStored([b"\x03" * 32], None, [], 2, medium="disk"),
        BlockRemoved([b"\x03" * 32], medium="disk"),
        AllBlocksCleared(),
    ]
    publisher.publish(KVEventBatch(12.5, events, data_parallel_rank=3))
    assert replay(context, publisher, 0) == [(0, KVEventBatch(12.5, events, 3))]


def test_the_payload_is_plain_msgpack_with_names_of_events(context, open_publisher):
    publisher = open_publisher()
    subscriber = Subscriber(context, publisher)
    subscriber.has_all(publisher)
    publisher.publish(KVEventBatch(1.0, [BlockStored([b"h"], None, [5, 6], 2), AllBlocksCleared()]))
    payload = subscriber.socket.recv_multipart()[2]
    stored = ["BlockStored", [b"h"], None, [5, 6], 2, None, 0, None]
    assert msgspec.msgpack.decode(payload) == [1.0, [stored, ["AllBlocksCleared"]], 0]


def test_a_topic_is_filtered_by(context, open_publisher):
    publisher = open_publisher(topic="kv@a")
    other = Subscriber(context, publisher, topic="kv@b")
    subscriber = Subscriber(context, publisher, topic="kv@")
    subscriber.is_there(publisher)
    assert subscriber.topic == b"kv@a"
    assert not other.socket.poll(100)


def test_without_subscribers_batches_are_dropped_and_no_caller_waits(open_publisher):
    publisher = open_publisher()
    for number in range(1000):
        publisher.publish(batch(number))
    publisher.close()
    assert publisher.replay_endpoint is None


def test_a_subscriber_that_does_not_read_loses_batches_and_no_caller_waits(context, open_publisher):
    publisher = open_publisher(hwm=1, replay_endpoint="tcp://127.0.0.1:*", buffer_steps=20_000)
    slow = Subscriber(context, publisher, hwm=1)
    slow.is_there(publisher)
    last = slow.published + 3000
    start = time.monotonic()
    for number in range(last - 2999, last + 1):
        publisher.publish(batch(number, tokens=2000))
    assert time.monotonic() - start < 60
    assert [number for number, _ in replay(context, publisher, last)] == [last]  # all are sent
    numbers = []

    def goes_on():
        """It has read its part of them, and gets later ones."""
        publisher.publish(batch(0))
        while slow.socket.poll(10):
            numbers.append(slow.read()[0])
        return numbers and numbers[-1] > last

    wait_until(goes_on)
    missing = set(range(numbers[0], numbers[-1])) - set(numbers)
    assert missing  # and it sees it in the numbers
    received = dict(replay(context, publisher, min(missing)))
    assert missing <= set(received)


def test_when_the_thread_lags_the_oldest_batches_go(context, open_publisher, monkeypatch):
    held = threading.Event()
    send = kv_event_stream.KVEventStream._send_live
    monkeypatch.setattr(
        kv_event_stream.KVEventStream, "_send_live", lambda self: (held.wait(), send(self))
    )
    publisher = open_publisher(max_queue=5, replay_endpoint="tcp://127.0.0.1:*")
    for number in range(20):
        publisher.publish(batch(number))
    assert publisher.num_dropped == 15
    held.set()
    received = replay(context, publisher, 3)
    assert [number for number, _ in received] == [15, 16, 17, 18, 19]  # the gap shows


# Replay


def test_a_late_subscriber_gets_what_it_missed_and_has_no_gap(context, publisher):
    sent(context, publisher, 50)
    subscriber = Subscriber(context, publisher)
    first = subscriber.is_there(publisher, first=50)
    received = dict(replay(context, publisher, 0))
    assert first in received  # what is live before a replay is asked for is in it
    for number in range(1000, 1010):
        publisher.publish(batch(number))
    live = subscriber.read_up_to(subscriber.published + 10)
    numbers = {first} | {number for number, _ in live}
    assert set(received) | numbers == set(range(max(numbers) + 1))
    assert [received[number] for number in range(50)] == [batch(number) for number in range(50)]


@pytest.mark.parametrize(("start", "count"), [(0, 8), (5, 3), (7, 1), (8, 0), (2**64 - 1, 0)])
def test_a_replay_begins_where_it_was_asked_to(context, publisher, start, count):
    sent(context, publisher, 8)
    assert replay(context, publisher, start) == [(n, batch(n)) for n in range(8 - count, 8)]


def test_only_the_newest_batches_can_be_had_again(context, open_publisher):
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*", buffer_steps=3)
    sent(context, publisher, 10)
    assert [number for number, _ in replay(context, publisher, 0)] == [7, 8, 9]


def test_a_long_replay_arrives_whole_during_the_live_stream(context, open_publisher):
    """More messages than ZeroMQ keeps for a client: a plain send would drop some."""
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    sent(context, publisher, 8000)
    subscriber = Subscriber(context, publisher)
    subscriber.is_there(publisher, first=8000)
    client = ask(context, publisher, b"", (0).to_bytes(8, "big"))
    time.sleep(0.2)  # while its queue is full
    publisher.publish(batch(9000))
    assert subscriber.read_up_to(subscriber.published + 1)[-1][1] == batch(9000)
    numbers = [number for number, _ in answers(client)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 8000


def test_what_is_published_before_a_replay_is_asked_for_is_in_it(context, publisher):
    client = context.socket(zmq.DEALER)
    client.connect(publisher.replay_endpoint)
    for number in range(300):
        publisher.publish(batch(number))
        client.send_multipart([b"", number.to_bytes(8, "big")])
        assert [sequence for sequence, _ in answers(client)] == [number]


def test_a_request_without_the_empty_frame_is_understood(context, publisher):
    sent(context, publisher, 3)
    client = ask(context, publisher, (1).to_bytes(8, "big"))
    assert [number for number, _ in answers(client)] == [1, 2]


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"", b""),
        (b"", b"1234567"),
        (b"", b"123456789"),
        (b"", b"\0" * 8, b"\0" * 8),
        (b"replay", b"from", b"the beginning"),
        (b"", b"\0" * 1000),
    ],
)
def test_a_request_that_makes_no_sense_gets_the_end_alone(context, publisher, frames):
    sent(context, publisher, 3)
    assert answers(ask(context, publisher, *frames)) == []
    assert len(replay(context, publisher, 0)) == 3


def test_a_flood_and_bytes_that_are_not_zeromq_do_no_harm(context, open_publisher):
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    sent(context, publisher, 3)
    ask(context, publisher, b"", b"x" * 1_000_000)  # disconnected for its length
    port = int(publisher.replay_endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    for _ in range(300):
        ask(context, publisher, b"", (0).to_bytes(8, "big")).close(linger=0)
    assert len(replay(context, publisher, 0)) == 3


def test_a_client_that_reads_nothing_is_given_up(context, open_publisher, monkeypatch):
    monkeypatch.setattr(kv_event_stream, "_REPLAY_TIMEOUT_S", 0.1)
    turns, send = [], kv_event_stream.KVEventStream._continue_replay

    def noted(self, identity, replay):
        turns.append((send(self, identity, replay), replay.stalled))
        return turns[-1][0]

    monkeypatch.setattr(kv_event_stream.KVEventStream, "_continue_replay", noted)
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    for number in range(3000):
        publisher.publish(batch(number, tokens=2000))
    client = ask(context, publisher, b"", (0).to_bytes(8, "big"), hwm=1)
    wait_until(lambda: (False, True) in turns)
    wait_until(lambda: publisher._stream._replays == {})
    client.close(linger=0)
    assert len(replay(context, publisher, 2990)) == 10


def listen(live, replay_endpoint, ready):
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(live)
    subscriber.subscribe("")
    client = context.socket(zmq.DEALER)
    client.connect(replay_endpoint)
    client.send_multipart([b"", (0).to_bytes(8, "big")])
    subscriber.recv_multipart()
    client.recv_multipart()
    ready.send(True)
    time.sleep(60)


def test_a_subscriber_that_is_killed_in_a_replay_does_no_harm(context, publisher):
    sent(context, publisher, 6000)
    survivor = Subscriber(context, publisher)
    survivor.is_there(publisher, first=6000)
    ours, theirs = multiprocessing.Pipe()
    endpoints = (publisher.endpoint, publisher.replay_endpoint)
    victim = multiprocessing.get_context("spawn").Process(target=listen, args=(*endpoints, theirs))
    victim.start()
    while not ours.poll(0.02):
        publisher.publish(batch(7000))
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    for number in range(20):
        publisher.publish(batch(8000 + number))
    read = [survivor.read()[1]]
    while read[-1] != batch(8019):
        read.append(survivor.read()[1])
    assert read[-20:] == [batch(8000 + number) for number in range(20)]
    assert len(replay(context, publisher, 0)) >= 6000
