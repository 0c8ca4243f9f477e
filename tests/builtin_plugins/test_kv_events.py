"""KV events over real sockets: in order, replayable, never in the engine's way, nothing left."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from hardpoint.builtin_plugins import kv_event_stream
from hardpoint.builtin_plugins.kv_events import END_OF_REPLAY, NullPublisher, ZmqPublisher
from hardpoint.plugins import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ConfigError,
    KVEventBatch,
    PublisherContext,
)
from hardpoint.plugins.typed import convert

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_events_subscriber.py"
THREAD = "hardpoint-kv-events"


def batch(number, *, tokens=2):
    hashes = [number.to_bytes(32, "big")]
    return KVEventBatch(100.0 + number, [BlockStored(hashes, None, [70_000] * tokens, tokens)])


def decoded(payload):
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture
def context():
    """A ZeroMQ context for clients."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def open_publisher():
    """Build a publisher with options; it is closed at the end, and must leave no thread."""
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


@pytest.fixture(params=["tcp", "ipc"])
def publisher(request, open_publisher, tmp_path):
    if request.param == "tcp":
        return open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    return open_publisher(endpoint=live, replay_endpoint=replay)


class Subscriber:
    def __init__(self, context, publisher, topic="", hwm=1000):
        self.socket = context.socket(zmq.SUB)
        self.socket.rcvhwm = hwm
        self.socket.connect(publisher.endpoint)
        self.socket.subscribe(topic)

    def read(self):
        assert self.socket.poll(5000), "nothing came"
        topic, number, payload = self.socket.recv_multipart()
        self.topic = topic
        return int.from_bytes(number, "big"), decoded(payload)

    def is_there(self, publisher, first=0):
        """Publish until something arrives, for subscribing takes a moment; return its number."""
        for number in range(first, first + 500):
            publisher.publish(batch(number))
            if self.socket.poll(10):
                return self.read()[0]
        raise AssertionError("nothing came")


def ask(context, publisher, *frames, hwm=1000):
    client = context.socket(zmq.DEALER)
    client.rcvhwm = hwm
    client.connect(publisher.replay_endpoint)
    client.send_multipart(frames)
    return client


def answers(client):
    """Read a replay up to its end; return the numbers and batches."""
    found = []
    while True:
        assert client.poll(5000), "the replay did not end"
        empty, number, payload = client.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), decoded(payload)))


def replay(context, publisher, start):
    return answers(ask(context, publisher, b"", start.to_bytes(8, "big")))


def sent(context, publisher, count):
    """Publish batches from 0 on, and see that the thread has sent them."""
    for number in range(count):
        publisher.publish(batch(number))
    assert [number for number, _ in replay(context, publisher, count - 1)] == [count - 1]


# The live stream


def test_a_subscriber_gets_every_batch_in_order(context, publisher):
    subscriber = Subscriber(context, publisher)
    first = subscriber.is_there(publisher)
    last = first + 1
    while subscriber.socket.poll(50):
        last = subscriber.read()[0] + 1
    for number in range(last, last + 200):
        publisher.publish(batch(number))
    assert [subscriber.read() for _ in range(200)] == [
        (number, batch(number)) for number in range(last, last + 200)
    ]


def test_every_kind_of_event_arrives_whole(context, publisher):
    events = [
        BlockStored([b"\x01" * 32, b"\x02" * 32], b"\x00" * 32, [1, 2, 3, 4], 2, "poet", 1),
        BlockRemoved([b"\x01" * 32], 1),
        AllBlocksCleared(),
    ]
    publisher.publish(KVEventBatch(12.5, events, data_parallel_rank=3))
    assert replay(context, publisher, 0) == [(0, KVEventBatch(12.5, events, 3))]


def test_the_payload_is_plain_msgpack_with_names_of_events(context, open_publisher):
    publisher = open_publisher()
    subscriber = Subscriber(context, publisher)
    subscriber.is_there(publisher)
    while subscriber.socket.poll(50):
        subscriber.read()
    publisher.publish(KVEventBatch(1.0, [BlockStored([b"h"], None, [5, 6], 2), AllBlocksCleared()]))
    payload = subscriber.socket.recv_multipart()[2]
    stored = ["BlockStored", [b"h"], None, [5, 6], 2, None, 0]
    assert msgspec.msgpack.decode(payload) == [1.0, [stored, ["AllBlocksCleared"]], 0]


def test_a_topic_is_filtered_by(context, open_publisher):
    publisher = open_publisher(topic="kv@a")
    other = Subscriber(context, publisher, topic="kv@b")
    subscriber = Subscriber(context, publisher, topic="kv@")
    subscriber.is_there(publisher)
    assert subscriber.topic == b"kv@a"
    assert not other.socket.poll(100)


def test_without_subscribers_batches_are_dropped_and_nobody_waits(open_publisher):
    publisher = open_publisher()
    for number in range(1000):
        publisher.publish(batch(number))
    publisher.close()
    assert publisher.replay_endpoint is None


def test_a_subscriber_that_does_not_read_loses_batches_and_nobody_waits(context, open_publisher):
    publisher = open_publisher(hwm=1, replay_endpoint="tcp://127.0.0.1:*", buffer_steps=20_000)
    slow = Subscriber(context, publisher, hwm=1)
    slow.is_there(publisher)
    start = time.monotonic()
    for number in range(1000, 4000):
        publisher.publish(batch(number, tokens=2000))
    assert time.monotonic() - start < 5
    numbers = [slow.read()[0]]
    while slow.socket.poll(500):
        numbers.append(slow.read()[0])
    missing = set(range(numbers[0], numbers[-1])) - set(numbers)
    assert missing  # and it sees it in the numbers
    found = dict(replay(context, publisher, min(missing)))
    assert missing <= set(found)


def test_when_the_thread_lags_the_oldest_batches_go(context, open_publisher, monkeypatch):
    held = threading.Event()
    send = kv_event_stream.Stream._send_live
    monkeypatch.setattr(
        kv_event_stream.Stream, "_send_live", lambda self: (held.wait(), send(self))
    )
    publisher = open_publisher(max_queue=5, replay_endpoint="tcp://127.0.0.1:*")
    for number in range(20):
        publisher.publish(batch(number))
    assert publisher.num_dropped == 15
    held.set()
    found = replay(context, publisher, 3)
    assert [number for number, _ in found] == [15, 16, 17, 18, 19]  # the gap shows


# Replay


def test_a_late_subscriber_gets_what_it_missed_and_has_no_gap(context, publisher):
    sent(context, publisher, 50)
    subscriber = Subscriber(context, publisher)
    first = subscriber.is_there(publisher, first=50)
    found = dict(replay(context, publisher, 0))
    assert first in found  # what is live before a replay is asked for is in it
    for number in range(1000, 1010):
        publisher.publish(batch(number))
    numbers = {first}
    while subscriber.socket.poll(100):
        numbers.add(subscriber.read()[0])
    assert set(found) | numbers == set(range(max(numbers) + 1))
    assert [found[number] for number in range(50)] == [batch(number) for number in range(50)]


@pytest.mark.parametrize(("start", "count"), [(0, 8), (5, 3), (7, 1), (8, 0), (2**64 - 1, 0)])
def test_a_replay_begins_where_it_was_asked_to(context, publisher, start, count):
    sent(context, publisher, 8)
    assert replay(context, publisher, start) == [(n, batch(n)) for n in range(8 - count, 8)]


def test_only_the_newest_batches_can_be_had_again(context, open_publisher):
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*", buffer_steps=3)
    sent(context, publisher, 10)
    assert [number for number, _ in replay(context, publisher, 0)] == [7, 8, 9]


def test_a_long_replay_arrives_whole_beside_the_live_stream(context, open_publisher):
    """More messages than ZeroMQ keeps for a client: a plain send would drop some."""
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    sent(context, publisher, 8000)
    subscriber = Subscriber(context, publisher)
    subscriber.is_there(publisher, first=8000)
    client = ask(context, publisher, b"", (0).to_bytes(8, "big"))
    time.sleep(0.2)  # while its queue is full
    publisher.publish(batch(9000))
    assert subscriber.socket.poll(1000)
    numbers = [number for number, _ in answers(client)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 8000


def test_what_is_published_before_a_replay_is_asked_for_is_in_it(context, publisher):
    client = context.socket(zmq.DEALER)
    client.connect(publisher.replay_endpoint)
    for number in range(300):
        publisher.publish(batch(number))
        client.send_multipart([b"", number.to_bytes(8, "big")])
        assert [found for found, _ in answers(client)] == [number]


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


def test_a_flood_and_bytes_that_are_not_zeromq_harm_nobody(context, open_publisher):
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
    monkeypatch.setattr(kv_event_stream, "_PATIENCE", 0.1)
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    for number in range(3000):
        publisher.publish(batch(number, tokens=2000))
    client = ask(context, publisher, b"", (0).to_bytes(8, "big"), hwm=1)
    deadline = time.monotonic() + 5
    seen = False
    while time.monotonic() < deadline and not (seen and not publisher._stream._replays):
        seen = seen or bool(publisher._stream._replays)
        time.sleep(0.005)
    assert seen
    assert publisher._stream._replays == {}
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


def test_a_subscriber_that_is_killed_in_a_replay_harms_nobody(context, publisher):
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
    while survivor.socket.poll(50):
        survivor.read()
    for number in range(20):
        publisher.publish(batch(8000 + number))
    assert [survivor.read()[1] for _ in range(20)] == [batch(8000 + n) for n in range(20)]
    assert len(replay(context, publisher, 0)) >= 6000


# Endpoints


@pytest.mark.parametrize(
    "endpoint",
    ["", "5557", "tcp://*", "tcp://:5557", "tcp://host:port", "inproc://kv", "ipc://", "ipc://*"],
)
@pytest.mark.parametrize("option", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_is_none_is_refused(open_publisher, option, endpoint):
    with pytest.raises(ConfigError) as error:
        open_publisher(**{option: endpoint})
    assert str(error.value) == (
        f"plugin.zmq.{option}: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r}"
    )


def test_a_port_that_is_taken_is_refused_with_the_option(open_publisher):
    taken = open_publisher().endpoint
    with pytest.raises(ConfigError) as error:
        open_publisher(name="router", replay_endpoint=taken)
    assert str(error.value) == (
        f"plugin.router.replay_endpoint: cannot bind {taken!r}: Address already in use"
    )


def test_a_file_that_is_in_use_is_refused_and_stays_in_use(context, open_publisher, tmp_path):
    endpoint = f"ipc://{tmp_path}/live"
    first = open_publisher(endpoint=endpoint)
    with pytest.raises(ConfigError, match="plugin.zmq.endpoint: cannot bind .* already in use"):
        open_publisher(endpoint=endpoint)
    with pytest.raises(ConfigError, match="plugin.zmq.replay_endpoint: .* already in use"):
        open_publisher(endpoint=f"ipc://{tmp_path}/other", replay_endpoint=endpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["live"]
    Subscriber(context, first).is_there(first)


def test_a_file_that_is_no_socket_is_not_deleted(open_publisher, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="there is a file that is no socket"):
        open_publisher(endpoint=f"ipc://{tmp_path}/notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_socket_that_was_left_behind_is_taken_over(context, open_publisher, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "live"))
    publisher = open_publisher(endpoint=f"ipc://{tmp_path}/live")
    Subscriber(context, publisher).is_there(publisher)


def test_a_folder_that_is_not_there_is_refused(open_publisher, tmp_path):
    with pytest.raises(ConfigError, match="plugin.zmq.endpoint: cannot bind .*/no/live"):
        open_publisher(endpoint=f"ipc://{tmp_path}/no/live")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_each_data_parallel_rank_has_endpoints_of_its_own(open_publisher, tmp_path):
    port = free_port()
    publisher = open_publisher(
        rank=2,
        endpoint=f"tcp://127.0.0.1:{port}",
        replay_endpoint=f"ipc://{tmp_path}/replay",
    )
    assert publisher.endpoint == f"tcp://127.0.0.1:{port + 2}"
    assert publisher.replay_endpoint == f"ipc://{tmp_path}/replay_dp2"


def test_a_port_that_a_rank_pushes_out_of_range_is_refused(open_publisher):
    with pytest.raises(ConfigError, match="expected a port of at most 65533 for data-parallel ran"):
        open_publisher(rank=2, endpoint="tcp://127.0.0.1:65534")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buffer_steps": 0}, "plugin.zmq.buffer_steps: expected a whole number >= 1, got 0"),
        ({"hwm": 0}, "plugin.zmq.hwm: expected a whole number >= 1, got 0"),
        ({"max_queue": 0}, "plugin.zmq.max_queue: expected a whole number >= 1, got 0"),
        ({"port": 1}, "plugin.zmq.port: unknown field"),
    ],
)
def test_options_are_checked(open_publisher, fields, message):
    with pytest.raises(ConfigError) as error:
        open_publisher(**fields)
    assert str(error.value).startswith(message)


# The end


def test_closing_sends_what_waits_and_leaves_nothing(context, open_publisher, tmp_path):
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    publisher = open_publisher(
        endpoint=f"ipc://{tmp_path}/live", replay_endpoint=f"ipc://{tmp_path}/replay"
    )
    subscriber = Subscriber(context, publisher)
    last = subscriber.is_there(publisher)
    while subscriber.socket.poll(50):
        last = subscriber.read()[0]
    for number in range(100):
        publisher.publish(batch(number))
    publisher.close()
    publisher.close()
    assert threads() == []
    assert list(tmp_path.iterdir()) == []
    assert [subscriber.read()[0] for _ in range(100)] == list(range(last + 1, last + 101))
    context.destroy(linger=0)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # pyzmq's own, not per publisher


def test_many_publishers_leave_no_descriptors(tmp_path, open_publisher):
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc")

    def descriptors_after(count):
        for _ in range(count):
            endpoint = f"ipc://{tmp_path}/live"
            open_publisher(endpoint=endpoint, replay_endpoint="tcp://127.0.0.1:*").close()
        return len(os.listdir("/proc/self/fd"))

    assert descriptors_after(20) == descriptors_after(1)


def test_closing_waits_for_a_subscriber_that_does_not_read_but_not_long(context, open_publisher):
    publisher = open_publisher()
    slow = Subscriber(context, publisher, hwm=1)
    slow.is_there(publisher)
    for number in range(2000):
        publisher.publish(batch(number, tokens=5000))
    start = time.monotonic()
    publisher.close()
    assert time.monotonic() - start < 5


def test_a_process_that_forgets_to_close_ends():
    code = (
        "from hardpoint.builtin_plugins.kv_events import ZmqPublisher as Z\n"
        "from hardpoint.plugins import PublisherContext as C\n"
        "z = Z(C(name='zmq', options=Z.Options(endpoint='tcp://127.0.0.1:*')))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_error_in_the_thread_is_told_to_the_engine(open_publisher):
    publisher = open_publisher()
    publisher.publish(object())  # cannot be encoded
    publisher._stream._thread.join(5)
    with pytest.raises(RuntimeError, match="the thread that publishes KV events ended") as error:
        publisher.publish(batch(0))
    assert isinstance(error.value.__cause__, TypeError)


def test_null_drops_everything():
    context = PublisherContext(name="null", options=NullPublisher.Options())
    publisher = NullPublisher(context)
    assert publisher.publish(batch(0)) is None
    publisher.close()


# The example


def example():
    spec = importlib.util.spec_from_file_location("kv_events_subscriber", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encoded(*events):
    return msgspec.msgpack.encode(KVEventBatch(0.0, list(events)))


def stored(*names, group=0):
    return BlockStored([name.encode() for name in names], None, [1] * len(names), 1, None, group)


def removed(*names, group=0):
    return BlockRemoved([name.encode() for name in names], group)


def names_of(follower):
    return sorted(f"{block.decode()}{group}" for group, block in follower.blocks)


def test_the_example_follows_what_is_stored_removed_and_cleared():
    follower = example().CacheFollower()
    follower.receive(0, encoded(stored("a", "b"), stored("a", group=1)))
    follower.receive(1, encoded(removed("a"), stored("c")))
    assert names_of(follower) == ["a1", "b0", "c0"]
    follower.receive(2, encoded(AllBlocksCleared(), stored("d")))
    assert names_of(follower) == ["d0"]
    assert follower.num_resets == 0


def test_the_example_fills_gaps_and_forgets_what_it_cannot_know():
    kept = {number: encoded(stored("abcdef"[number])) for number in range(6)}
    asked = []

    def replay(start):
        asked.append(start)
        return [(number, kept[number]) for number in sorted(kept) if number >= start]

    follower = example().CacheFollower(replay)
    follower.receive(2, kept[2])  # came late
    follower.receive(3, kept[3])
    assert asked == [0]
    assert names_of(follower) == ["a0", "b0", "c0", "d0", "e0", "f0"]
    follower.receive(4, kept[4])
    follower.receive(5, kept[5])
    assert (follower.num_replayed, follower.num_resets) == (6, 0)
    kept.clear()
    follower.receive(9, encoded(stored("x")))  # 6 to 8 are lost: anything may have been removed
    assert names_of(follower) == ["x0"]
    follower.receive(0, encoded(stored("y")))  # the engine started anew
    assert names_of(follower) == ["y0"]
    assert follower.num_resets == 2


def test_the_example_runs_beside_an_engine(context, open_publisher):
    publisher = open_publisher(replay_endpoint="tcp://127.0.0.1:*")
    sent(context, publisher, 300)
    command = [sys.executable, str(EXAMPLE), "--endpoint", publisher.endpoint]
    command += ["--replay-endpoint", publisher.replay_endpoint, "--batches", "301"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        number = 300
        while process.poll() is None and number < 1000:
            publisher.publish(batch(number))
            number += 1
            time.sleep(0.02)
        output = process.stdout.read()
    assert process.returncode == 0
    assert "batches replayed, 0 resets" in output.splitlines()[-1]
    blocks = int(output.splitlines()[-1].split()[2])
    assert blocks > 300  # those of before it was there too


def test_the_example_explains_itself():
    done = subprocess.run([sys.executable, EXAMPLE, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--replay-endpoint" in done.stdout
