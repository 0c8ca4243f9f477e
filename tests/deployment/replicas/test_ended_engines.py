"""How an engine ended, as its head sees it, if its messages race with its next session."""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import zmq
from support.joining import HELLO, NO_PLUGINS, Head, free_address
from support.waiting import PATIENCE_S, wait_until

from hardpoint.host.boundary.activity import FILE_NAME
from hardpoint.host.system.encoding import Encoder
from hardpoint.plugins import EngineConfig, EngineCoreOutput, EngineCoreOutputs
from hardpoint.process.protocol import EngineCoreReadyResponse
from hardpoint.replicas.remote import joining, listener
from hardpoint.replicas.remote.connection import HeadConnection
from hardpoint.replicas.remote.messages import (
    NO_SESSION,
    Hello,
    MessageKind,
    ProcessEnd,
    Welcome,
    decode,
    encode,
)
from hardpoint.replicas.remote.session import EngineSession

NUM_OUTPUTS = 20
WELCOME = Welcome(
    rank=1, heartbeat_seconds=40.0, manifest=NO_PLUGINS, config={}, config_sources={},
    log_level="INFO", vocabulary=None, reports_load=False, reports_cache=False,
)  # fmt: skip


@pytest.fixture
def head(monkeypatch):
    """Return a head that sends a heartbeat between any two messages that it reads."""
    monkeypatch.setattr(listener, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(listener, "_MOST_AT_ONCE", 1)
    with Head(heartbeat_seconds=40.0) as head:
        yield head


class Stall:
    """Stops the thread of a listener at the next LEAVE."""

    def __init__(self, head):
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        head.listener.leave = self._wait

    def _wait(self, rank):
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)


def packed(message):
    return [bytes(frame) for frame in Encoder().encode(message)]


def crashed(head, **end):
    """Let an engine crash in a step, while the head does not read.

    Returns:
        The place, the engine's side, the outputs that its client gets, and the stall.
    """
    place, peer, outputs, stall = head.host(), head.peer(), [], Stall(head)
    peer.join()
    place.joined()
    ready = EngineCoreReadyResponse(manifest_hash="", max_model_len=9)
    peer.send(MessageKind.READY, *packed(ready))
    assert place.sockets.poll_ready(PATIENCE_S * 1000)
    place.sockets.read(outputs.append, outputs.append)
    peer.send(MessageKind.LEAVE)
    assert stall.has_begun.wait(PATIENCE_S)
    output = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r", new_token_ids=[7])])
    for _ in range(NUM_OUTPUTS):
        peer.send(MessageKind.DATA, *packed(output))
    activity = zlib.compress((place.sockets.folder / FILE_NAME).read_bytes())
    fields = {"description": "was ended by SIGSEGV", "was_killed": False, "activity": activity}
    peer.send(MessageKind.ENDED, encode(ProcessEnd(**fields | end)))
    return place, peer, outputs, stall


def check_end(place):
    wait_until(lambda: place.host.has_ended, PATIENCE_S, "the end")
    assert place.failure().endswith("was ended by SIGSEGV")
    assert not place.host.was_killed


def test_a_heartbeat_that_cannot_be_sent_does_not_overtake_the_end_of_an_engine(head):
    place, peer, outputs, stall = crashed(head)
    peer.socket.close(int(PATIENCE_S * 1000))
    port = int(head.address.rpartition(":")[2])

    def is_cut():
        connections = psutil.Process().net_connections("tcp")
        return {c.status for c in connections if c.laddr.port == port} == {psutil.CONN_LISTEN}

    wait_until(is_cut, PATIENCE_S, "the end of the connection")
    stall.may_end.set()
    check_end(place)
    wait_until(lambda: len(outputs) == NUM_OUTPUTS, PATIENCE_S, "the outputs")


def test_an_end_counts_if_its_engine_joins_again_before_the_outputs_are_passed_on(
    head, monkeypatch
):
    place, peer, _outputs, stall = crashed(head, is_orderly=True)
    monkeypatch.setattr(EngineSession, "flush", lambda _: False)
    stall.may_end.set()
    wait_until(lambda: place.host.sends_end_marker, PATIENCE_S, "the message of its end")
    peer.socket.close(0)
    head.peer().hello(former=peer.session)
    check_end(place)


@pytest.mark.parametrize("has_sent_end", [False, True])
def test_a_hello_names_no_session_of_which_the_end_was_sent(monkeypatch, has_sent_end):
    """It would overtake the last outputs and the end, which come by another connection."""

    class EndedLink:
        why_over, was_stopped = "", False

        def __init__(self, *_):
            self.has_sent_end = has_sent_end

        def run(self, *_):
            """Be over at once."""

    monkeypatch.setattr(joining, "EngineLink", EndedLink)
    config, session = EngineConfig(model="m"), b"s" * 16
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address := free_address())
        ours, theirs = socket.socketpair()
        engine = joining.Joining(config, None, address, None, HELLO, ours.fileno())
        with ThreadPoolExecutor() as pool, contextlib.closing(engine), ours, theirs:
            formers = []
            for _ in range(2):
                run = pool.submit(engine.run)
                assert router.poll(PATIENCE_S * 1000)
                routing, _kind, _session, hello = router.recv_multipart()
                formers.append(decode(hello, Hello).former)
                router.send_multipart([routing, MessageKind.WELCOME, session, encode(WELCOME)])
                assert run.result(PATIENCE_S)
    assert formers == [NO_SESSION, NO_SESSION if has_sent_end else session]


def test_the_last_messages_of_an_engine_are_sent_after_it_closed_its_connection():
    message = bytes(1 << 20)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address := free_address())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            connection = HeadConnection(context, address, None)
            assert connection.wait(PATIENCE_S, ours.fileno())
        for _ in range(NUM_OUTPUTS):
            connection.socket.send(message)
        connection.socket.setsockopt(zmq.LINGER, int(PATIENCE_S * 1000))
        connection.close()
        for _ in range(NUM_OUTPUTS):
            assert router.poll(PATIENCE_S * 1000)
            assert router.recv_multipart()[1] == message
