"""Endpoints of KV events: rejected addresses, and cleanup."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.builtins.kv_events_harness import Subscriber, batch, threads

from hardpoint.builtin_plugins.kv_cache import events as kv_events
from hardpoint.builtin_plugins.kv_cache.events import NullPublisher
from hardpoint.plugins import ConfigError, PublisherContext

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
    with pytest.raises(ConfigError, match="the file exists and is no socket"):
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


def test_each_data_parallel_rank_has_endpoints_of_its_own(open_publisher, tmp_path, free_port):
    port = free_port() - 2
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


def test_closing_sends_what_waits_and_leaves_nothing(
    context, open_publisher, tmp_path, monkeypatch
):
    monkeypatch.setattr(kv_events, "_LINGER_MS", 20_000)  # more than a subscriber can need
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    publisher = open_publisher(
        endpoint=f"ipc://{tmp_path}/live", replay_endpoint=f"ipc://{tmp_path}/replay"
    )
    subscriber = Subscriber(context, publisher)
    last = subscriber.has_all(publisher)
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

    count = descriptors_after(1)
    assert descriptors_after(20) <= count


def test_closing_waits_for_a_subscriber_that_does_not_read_but_not_long(context, open_publisher):
    publisher = open_publisher()
    slow = Subscriber(context, publisher, hwm=1)
    slow.is_there(publisher)
    for number in range(2000):
        publisher.publish(batch(number, tokens=5000))
    start = time.monotonic()
    publisher.close()
    assert time.monotonic() - start < 60


def test_a_process_that_forgets_to_close_ends():
    code = (
        "from hardpoint.builtin_plugins.kv_cache.events import ZmqPublisher as Z\n"
        "from hardpoint.plugins import PublisherContext as C\n"
        "z = Z(C(name='zmq', options=Z.Options(endpoint='tcp://127.0.0.1:*')))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_error_in_the_thread_is_reported_to_the_engine(open_publisher):
    publisher = open_publisher()
    publisher.publish(object())  # cannot be encoded
    publisher._stream._thread.join(60)
    with pytest.raises(RuntimeError, match="the thread that publishes KV events ended") as error:
        publisher.publish(batch(0))
    assert isinstance(error.value.__cause__, TypeError)


def test_null_drops_everything():
    context = PublisherContext(name="null", options=NullPublisher.Options())
    publisher = NullPublisher(context)
    assert publisher.publish(batch(0)) is None
    publisher.close()
