"""Buffers are used again only when ZMQ is done with them, whoever is slow."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch
import zmq
import zmq.asyncio
from support.waiting import PATIENCE_S, wait_until

from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.process.send_buffers import SendTracker, to_frames


@pytest.fixture
def sockets(tmp_path):
    context = zmq.Context()
    context.linger = 0
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    receiver.bind(f"ipc://{tmp_path}/s")
    receiver.rcvtimeo = int(PATIENCE_S * 1000)
    yield sender, receiver, f"ipc://{tmp_path}/s"
    context.destroy(linger=0)


def done(tracker):
    tracker.collect()
    return tracker.num_pending == 0


def test_a_copied_buffer_is_free_at_once(sockets):
    sender, receiver, address = sockets
    sender.connect(address)
    tracker = SendTracker()
    buffer = tracker.buffer()
    frames = Encoder().encode_into([1], buffer)
    sender.send_multipart(tracker.frames(frames, buffer), copy=False)
    assert (tracker.num_pending, tracker.num_free) == (0, 1)
    assert tracker.buffer() is buffer
    assert Decoder().decode(receiver.recv_multipart()) == [1]


def test_a_buffer_comes_back_only_after_sending(sockets):
    sender, receiver, address = sockets
    sender.connect(f"{address}-nobody")
    tracker = SendTracker(copy_below=0)
    for number in range(3):
        buffer = tracker.buffer()
        frames = Encoder().encode_into([number] * 1000, buffer)
        sender.send_multipart(tracker.frames(frames, buffer), copy=False)
        del buffer, frames
    tracker.collect()
    assert (tracker.num_pending, tracker.num_free) == (3, 0)
    assert not any(map(len, [tracker.buffer() for _ in range(3)]))
    receiver.bind(f"{address}-nobody")
    for number in range(3):
        assert Decoder().decode(receiver.recv_multipart()) == [number] * 1000
    wait_until(lambda: done(tracker))
    assert tracker.num_free == 3


def test_a_slow_client_delays_nobody_else(sockets):
    sender, receiver, address = sockets
    slow = sender.context.socket(zmq.PUSH)
    slow.connect(f"{address}-nobody")
    sender.connect(address)
    tracker = SendTracker(copy_below=0)
    buffers = [tracker.buffer() for _ in range(3)]
    for socket, buffer in zip((slow, sender, sender), buffers, strict=True):
        frames = Encoder().encode_into("x" * 100, buffer)
        socket.send_multipart(tracker.frames(frames, buffer), copy=False)
    receiver.recv_multipart()
    receiver.recv_multipart()

    def one_left():
        tracker.collect()
        return tracker.num_pending == 1

    wait_until(one_left)
    assert tracker.num_free == 2


def test_every_frame_counts_not_only_the_last(sockets):
    sender, receiver, address = sockets
    sender.connect(f"{address}-nobody")
    tracker = SendTracker(copy_below=1000)
    buffer = tracker.buffer()
    frames = Encoder().encode_into(["x" * 5000, torch.ones(100)], buffer)
    sender.send_multipart(tracker.frames(frames, buffer), copy=False)
    del frames
    tracker.collect()
    assert (tracker.num_pending, tracker.num_free) == (1, 0)
    receiver.bind(f"{address}-nobody")
    assert Decoder().decode(receiver.recv_multipart())[1].sum() == 100
    wait_until(lambda: done(tracker))


def test_failed_sends_give_the_buffer_back(sockets):
    sender, *_ = sockets
    tracker = SendTracker(copy_below=0)
    buffer = tracker.buffer()
    frames = Encoder().encode_into([1], buffer)
    with pytest.raises(zmq.Again):
        sender.send_multipart(tracker.frames(frames, buffer), zmq.NOBLOCK, copy=False)
    wait_until(lambda: done(tracker))
    assert tracker.num_free == 1


def test_the_pool_is_bounded(sockets):
    tracker = SendTracker(max_free=2, max_buffer=100)
    for _ in range(5):
        tracker.frames([b"x"], bytearray(10))
    assert tracker.num_free == 2
    tracker = SendTracker(max_buffer=100)
    tracker.frames([b"x"], bytearray(101))
    assert tracker.num_free == 0


def test_the_pool_is_bounded_however_many_come_back_at_once(sockets):
    sender, receiver, address = sockets
    sender.connect(f"{address}-nobody")
    tracker = SendTracker(copy_below=0)
    buffers = [tracker.buffer() for _ in range(10)]
    for number, buffer in enumerate(buffers):
        frames = Encoder().encode_into([number] * 1000, buffer)
        sender.send_multipart(tracker.frames(frames, buffer), copy=False)
    del frames
    tracker.collect()
    assert (tracker.num_pending, tracker.num_free) == (10, 0)
    receiver.bind(f"{address}-nobody")
    for number in range(10):
        assert Decoder().decode(receiver.recv_multipart()) == [number] * 1000
    wait_until(lambda: done(tracker))
    assert tracker.num_free == tracker._max_free == 4
    reused = [tracker.buffer() for _ in range(4)]
    assert all(any(pooled is buffer for buffer in buffers) for pooled in reused)
    assert not any(tracker.buffer() is buffer for buffer in buffers)


def test_memory_lives_until_it_is_sent(sockets):
    sender, receiver, address = sockets
    sender.connect(f"{address}-nobody")
    tensor = torch.arange(5000)
    sender.send_multipart(to_frames(Encoder().encode(tensor), copy_below=0), copy=False)
    del tensor
    gc.collect()
    [torch.zeros(5000, dtype=torch.int64) for _ in range(5)]
    receiver.bind(f"{address}-nobody")
    assert Decoder().decode(receiver.recv_multipart()).tolist() == list(range(5000))


def test_asynchronous_sockets(sockets):
    sender, receiver, address = sockets

    async def send():
        socket = zmq.asyncio.Socket(shadow=sender)
        socket.connect(f"{address}-nobody")
        buffer = tracker.buffer()
        frames = Encoder().encode_into(["x" * 5000, torch.ones(100)], buffer)
        await socket.send_multipart(tracker.frames(frames, buffer), copy=False)

    tracker = SendTracker(copy_below=0)
    asyncio.run(send())
    tracker.collect()
    assert tracker.num_pending == 1
    receiver.bind(f"{address}-nobody")
    assert Decoder().decode(receiver.recv_multipart())[0] == "x" * 5000
    wait_until(lambda: done(tracker))
    assert tracker.num_free == 1
