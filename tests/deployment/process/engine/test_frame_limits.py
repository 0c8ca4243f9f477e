"""The size limit of a frame, and the end of a connection that brings a larger one."""

from __future__ import annotations

import contextlib
import logging
import time

import pytest
import zmq
from support.core.engine_harness import expected, request
from support.waiting import PATIENCE_S, wait_until
from zmq.utils.monitor import recv_monitor_message

from hardpoint.host.system.encoding import MOST_BYTES, Encoder, WireError
from hardpoint.process.client import sockets as engine_sockets
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.engine import transport
from hardpoint.process.protocol import RequestType

MIB = 1 << 20


def heard(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "client 0 was cut" in r.getMessage()]


class Joins:
    """Tells when the engine is there again, at the client's end of the connection."""

    def __init__(self, client) -> None:
        self._input = client.input
        self._events = client.input.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)

    def wait(self) -> None:
        assert self._events.poll(PATIENCE_S * 1000), "the engine did not connect again"
        recv_monitor_message(self._events)
        self._input.poll(0)  # so that the next message takes the new connection


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(transport, "MOST_BYTES", MIB)


def test_a_frame_that_is_too_large_is_not_received(small, serve, caplog):
    """Calls before it are answered, and calls after the connection is made again."""
    (client,) = serve().clients
    joins = Joins(client)
    client.send(RequestType.ADD, request("before"))
    client.raw(bytes(RequestType.ADD), bytes(2 * MIB))
    wait_until(lambda: heard(caplog), what="the word of the cut")
    joins.wait()
    client.send(RequestType.ADD, request("after"))
    client.until(lambda: len(client.ends) == 2)
    assert client.tokens == dict.fromkeys(("before", "after"), expected([1, 2, 3], 4))
    (words,) = heard(caplog)
    assert words == (
        "the connection to client 0 was cut, as for a frame of more than 1048576 bytes; "
        "it is restored, messages in between are lost"
    )


def test_again_and_again(small, serve, caplog):
    served = serve(clients=2)
    first, second = served.clients
    joins = Joins(first)
    for times in range(1, 4):
        first.raw(bytes(RequestType.ABORT), bytes(2 * MIB))
        wait_until(lambda times=times: len(heard(caplog)) == times, what="the word of the cut")
        joins.wait()
        second.send(RequestType.ADD, request(f"r{times}", client_index=1))
        second.until(lambda times=times: f"r{times}" in second.ends)
    first.send(RequestType.ADD, request("last"))
    first.until(lambda: first.ends)


def test_a_client_that_goes_is_no_news(serve, caplog):
    caplog.set_level(logging.WARNING)
    served = serve(clients=2)
    first, second = served.clients
    first.close()
    second.send(RequestType.ADD, request("a", client_index=1))
    second.until(lambda: second.ends)
    time.sleep(0.3)
    assert heard(caplog) == []


def test_what_is_too_large_is_not_sent():
    encoder = Encoder(most_bytes=100)
    for encode in (encoder.encode, lambda text: encoder.encode_into(text, bytearray())):
        with pytest.raises(WireError, match="^str: expected frames of at most 100 bytes, got one"):
            encode("x" * 100)
        assert encode("x" * 90)


def test_the_clients_sockets_have_the_bound_too():
    with contextlib.closing(EngineSockets()) as sockets:
        for socket in (sockets._input, sockets._output):
            assert socket.getsockopt(zmq.MAXMSGSIZE) == engine_sockets.MOST_BYTES == MOST_BYTES
    assert MOST_BYTES == 4 << 30
