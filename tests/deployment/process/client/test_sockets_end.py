"""The end of a client's sockets: whatever other threads do, and whatever libzmq does."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import zmq
from support.core.fake_engine import Engine
from support.waiting import PATIENCE_S

from hardpoint import EngineDeadError
from hardpoint.host.system.encoding import WireError
from hardpoint.process.client import sockets as engine_sockets
from hardpoint.process.client.sockets import READER_THREAD, EngineSockets
from hardpoint.process.protocol import RequestType
from hardpoint.process.zmq_resources import CUT_S, end_context


def connected() -> tuple[EngineSockets, Engine]:
    """Sockets that are read, and the engine at their other end."""
    sockets = EngineSockets()
    engine = Engine(sockets)
    engine.ready()
    assert sockets.poll_ready(int(PATIENCE_S * 1000))
    sockets.read(lambda _: None, lambda _: None)
    return sockets, engine


def test_a_socket_is_not_closed_while_another_thread_sends_on_it(monkeypatch):
    """A sender wakes up the reader in the instant in which the client closes."""
    flushing, stopped, in_send, release = (threading.Event() for _ in range(4))
    closed_in_send: list[zmq.Socket] = []
    wake = vars(EngineSockets)["_wake_reader"]
    send, close = zmq.Socket.send, zmq.Socket.close

    def late_wake(self, reason):
        if reason == b"flush":
            flushing.set()
            assert stopped.wait(PATIENCE_S)
        wake(self, reason)
        stopped.set()

    def slow_send(self, data, *args, **options):
        if data == b"flush":
            in_send.set()
            assert release.wait(PATIENCE_S)
            assert not self.closed
        return send(self, data, *args, **options)

    def late_close(self, linger=None):
        if threading.current_thread().name == READER_THREAD:
            assert in_send.wait(PATIENCE_S)
        elif in_send.is_set() and not release.is_set():
            closed_in_send.append(self)
        close(self, linger)

    sockets, engine = connected()
    monkeypatch.setattr(zmq.Socket, "send_multipart", Mock(side_effect=zmq.Again))
    monkeypatch.setattr(EngineSockets, "_wake_reader", late_wake)
    monkeypatch.setattr(zmq.Socket, "send", slow_send)
    monkeypatch.setattr(zmq.Socket, "close", late_close)
    posts = functools.partial(sockets.post, RequestType.ABORT, ["a"])
    threads = [threading.Thread(target=run) for run in (posts, sockets.close)]
    for thread in threads:
        thread.start()
        assert flushing.wait(PATIENCE_S)  # before anybody closes
    assert in_send.wait(PATIENCE_S)
    time.sleep(0.2)
    assert vars(sockets)["_wake_sender"] not in closed_in_send
    release.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    monkeypatch.undo()
    engine.close()


def test_a_close_that_libzmq_does_not_end_is_left_to_it(monkeypatch, caplog):
    never = threading.Event()
    sockets, engine = connected()
    engine.close()
    monkeypatch.setattr(zmq.Context, "term", lambda _: never.wait())
    monkeypatch.setattr(
        engine_sockets, "end_context", functools.partial(end_context, timeout_s=0.1)
    )
    with caplog.at_level(logging.ERROR, "hardpoint"):
        sockets.close()
    assert f"the sockets in {sockets.folder} were closed, and libzmq has not" in caplog.text
    assert not sockets.folder.exists()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        sockets.post(RequestType.ABORT, ["a"])
    never.set()


def test_a_context_with_a_socket_that_is_open_is_left(caplog):
    context = zmq.Context()
    left = context.socket(zmq.PUSH)
    assert not end_context(context, "what it names", timeout_s=0.1)
    assert "what it names were closed, and libzmq has not released them within 0.1 s" in caplog.text
    left.close(0)
    caplog.clear()
    assert end_context(zmq.Context(), "others")
    assert not caplog.text


@pytest.mark.parametrize("is_dead", [True, False])
def test_the_connection_of_a_dead_engine_is_broken_before_its_socket_is_closed(
    monkeypatch, is_dead
):
    """See CUT_S; an engine that is closed in order has no need of it."""
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr(engine_sockets, "time", clock)
    sockets, engine = connected()
    if is_dead:
        sockets.fail(EngineDeadError("it has died"))
    closing = threading.Thread(target=sockets.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive() == is_dead
    assert not slept
    engine.close()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert slept == [CUT_S] * is_dead


def test_an_engine_that_failed_and_goes_on_delays_the_end_by_a_second_at_most(monkeypatch):
    monkeypatch.setattr(engine_sockets, "BREAK_TIMEOUT_S", 0.1)
    sockets, engine = connected()
    sockets.fail(EngineDeadError("it sent a wrong message"))
    sockets.close()
    sockets.close()  # nothing is left to close
    engine.close()


def test_connections_are_counted_over_several_ends():
    sockets, first = connected()
    second = Engine(sockets, b"another")
    second.ready()
    with pytest.raises(WireError, match="another"):  # so it has connected
        sockets.poll_ready(int(PATIENCE_S * 1000))
    connections = vars(sockets)["_connections"]
    first.close()
    assert not connections.wait_until_none(0.1)
    second.close()
    assert connections.wait_until_none(PATIENCE_S)
    assert connections.wait_until_none(0)
    sockets.close()


@pytest.mark.nightly
def test_connections_that_break_while_much_waits_to_be_sent(caplog):
    """Processes are killed that read slowly, at once or in a moment; each close ends."""
    for turn in range(300):
        sockets = EngineSockets()
        ready, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            engine = Engine(sockets)
            engine.ready()
            os.write(go, b"!")
            time.sleep(60)
            os._exit(1)
        assert os.read(ready, 1) == b"!"
        assert sockets.poll_ready(int(PATIENCE_S * 1000))
        sockets.read(lambda _: None, lambda _: None)
        while sockets.attempt(RequestType.ABORT, ["x" * 5000])():
            pass
        os.kill(pid, signal.SIGKILL)
        sockets.fail(EngineDeadError("it was killed"))
        time.sleep(turn % 3 / 1000)
        sockets.close()
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(go)
    assert "libzmq has not released" not in caplog.text
