"""Publishers of KV events and the clients that listen to them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import msgspec
import zmq

from hardpoint.builtin_plugins.kv_cache.event_stream import END_OF_REPLAY
from hardpoint.builtin_plugins.kv_cache.events import ZmqPublisher
from hardpoint.plugins import BlockStored, KVEventBatch, PublisherContext
from hardpoint.typed import convert
from support.waiting import PATIENCE_S

THREAD = "hardpoint-kv-events"


def batch(number, *, tokens=2):
    hashes = [number.to_bytes(32, "big")]
    return KVEventBatch(100.0 + number, [BlockStored(hashes, None, [70_000] * tokens, tokens)])


def decoded(payload):
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@contextlib.contextmanager
def clients():
    """Yield a ZeroMQ context for clients."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@contextlib.contextmanager
def publishers():
    """Yield a builder of publishers from options; all are closed, and must leave no thread."""
    opened = []

    def build(rank=0, name="zmq", **fields):
        fields = {"endpoint": "tcp://127.0.0.1:*"} | fields
        options = convert(fields, ZmqPublisher.Options, path="plugin.zmq")
        made = ZmqPublisher(PublisherContext(name=name, options=options, data_parallel_rank=rank))
        opened.append(made)
        return made

    yield build
    for publisher in opened:
        publisher.close()
    assert threads() == []


class Subscriber:
    """Listens to a publisher.

    Attributes:
        published: number of the last batch that `is_there` published.
    """

    def __init__(self, context, publisher, topic="", hwm=1000):
        self.socket = context.socket(zmq.SUB)
        self.socket.rcvhwm = hwm
        self.socket.connect(publisher.endpoint)
        self.socket.subscribe(topic)

    def read(self):
        assert self.socket.poll(PATIENCE_S * 1000), "nothing came"
        topic, number, payload = self.socket.recv_multipart()
        self.topic = topic
        return int.from_bytes(number, "big"), decoded(payload)

    def read_up_to(self, number):
        """Read until the batch of a number comes; return the numbers and batches."""
        messages = [self.read()]
        while messages[-1][0] < number:
            messages.append(self.read())
        return messages

    def is_there(self, publisher, first=0):
        """Publish until something arrives, for subscribing takes a moment; return its number.

        `first` is the number of batches that were published before.
        """
        deadline = time.monotonic() + PATIENCE_S
        for self.published in itertools.count(first):
            publisher.publish(batch(self.published))
            if self.socket.poll(10):
                return self.read()[0]
            assert time.monotonic() < deadline, "nothing came"

    def has_all(self, publisher, first=0):
        """Like `is_there`, and read the published batches since; return the last number."""
        if self.is_there(publisher, first) < self.published:
            self.read_up_to(self.published)
        return self.published


def ask(context, publisher, *frames, hwm=1000):
    client = context.socket(zmq.DEALER)
    client.rcvhwm = hwm
    client.connect(publisher.replay_endpoint)
    client.send_multipart(frames)
    return client


def answers(client):
    """Read a replay up to its end; return the numbers and batches."""
    received = []
    while True:
        assert client.poll(PATIENCE_S * 1000), "the replay did not end"
        empty, number, payload = client.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert payload == b""
            return received
        received.append((int.from_bytes(number, "big"), decoded(payload)))


def replay(context, publisher, start):
    return answers(ask(context, publisher, b"", start.to_bytes(8, "big")))


def sent(context, publisher, count):
    """Publish batches from 0 on, and see that the thread has sent them."""
    for number in range(count):
        publisher.publish(batch(number))
    assert [number for number, _ in replay(context, publisher, count - 1)] == [count - 1]
