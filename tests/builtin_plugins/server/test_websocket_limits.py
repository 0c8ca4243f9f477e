"""Limits of WebSockets: small frames, messages that are not whole, and texts that are not UTF-8."""

import contextlib
import os
import struct

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_bytes import receive, receive_head
from support.http_server import running
from support.waiting import wait_until

from hardpoint.builtin_plugins.server.operations import websockets
from hardpoint.plugins.server import Authenticator, Client, Route

LIMITS = {"body_bytes": 200_000, "buffered_bytes": 200_000}
TEXT, PART, CLOSE, PING, PONG = 1, 0, 8, 9, 10


async def echo(websocket):
    await websocket.accept()
    while True:
        await websocket.send_text(str(len(await websocket.receive_text())))


async def authenticate(headers, path):
    return Client(name=headers.get("x-name", "alice"))


EXTENSIONS = (
    ("acme", Route(path="/echo", endpoint=echo, websocket=True)),
    ("acme", Authenticator(authenticate=authenticate)),
)


@pytest.fixture(scope="module")
def server():
    config = configured(limits=LIMITS)
    with running(FakeEngine(config=config, extensions=EXTENSIONS)) as one:
        yield one


@pytest.fixture(scope="module")
def hasty_server():
    config = configured(body_seconds=0.3)
    with running(FakeEngine(config=config, extensions=EXTENSIONS)) as one:
        yield one


def frame(opcode, payload=b"", *, final=True, length=None):
    size = len(payload) if length is None else length
    head = bytes([final << 7 | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += b"\xfe" + struct.pack(">H", size)
    else:
        head += b"\xff" + struct.pack(">Q", size)
    return head + b"\0\0\0\0" + payload  # a mask of zeros


@contextlib.contextmanager
def opened(server, name="alice"):
    with server.socket() as socket:
        socket.sendall(
            b"GET /echo HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nx-name: " + name.encode() + b"\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert b" 101 " in receive_head(socket)
        yield socket


def closing(socket):
    """Return the code and the reason that the server closes with."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := socket.recv(1 << 16):
            data += part
    start = data.rindex(b"\x88")
    payload = data[start + 2 :]
    return struct.unpack(">H", payload[:2])[0], payload[2:].decode()


SMALL = {
    "pings": frame(PING),
    "pings with a payload": frame(PING, b"p" * 125),
    "pongs": frame(PONG),
    "fragments": frame(PART, b"x", final=False),
    "empty fragments": frame(PART, final=False),
}


@pytest.mark.parametrize("kind", SMALL)
def test_small_frames_are_limited_for_a_connection(server, monkeypatch, kind):
    monkeypatch.setattr(websockets, "_FRAMES", 20)
    begin = frame(TEXT, b"x", final=False) if "fragments" in kind else b""
    with opened(server, name=kind) as socket:
        with contextlib.suppress(ConnectionError):
            socket.sendall(begin + SMALL[kind] * 1000)
        assert closing(socket) == (1008, "expected fewer small frames in a minute")
    assert server.service.traffic.rejected["websocket_frames"] >= 1


def test_small_frames_are_limited_for_all_connections_of_a_key(server, monkeypatch):
    monkeypatch.setattr(websockets, "_KEY_FRAMES", 30)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(opened(server, "carol")) for _ in range(2))
        other = stack.enter_context(opened(server, "bob"))
        for socket in (first, other):
            socket.sendall(frame(PING) * 20 + frame(TEXT, b"abc"))
            while b"3" not in receive(socket)[-1:]:
                pass
        second.sendall(frame(PING) * 20)
        assert closing(second)[0] == 1008


def test_usual_frames_are_not_small(server, monkeypatch):
    monkeypatch.setattr(websockets, "_FRAMES", 3)
    parts = frame(TEXT, b"x" * 2000, final=False) + frame(PART, b"x" * 2000, final=False) * 40
    with opened(server) as socket:
        socket.sendall((parts + frame(PART)) * 2 + frame(TEXT, b"ab") * 50)
        data = b""
        while data.count(b"\x81\x012") < 50:
            data += receive(socket)
        assert data.count(b"82000") == 2


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_message_is_whole_in_time(hasty_server, is_begun):
    start = frame(TEXT, b"x" * 200, final=False)
    with opened(hasty_server) as socket:
        socket.sendall(start if is_begun else frame(TEXT, b"x" * 10, length=2000))
        assert closing(socket) == (1008, "expected the rest of a message within 0.3 s")


def test_messages_that_are_not_whole_count_as_bodies(server):
    size = 110_000
    with opened(server) as first, opened(server, "bob") as second:
        first.sendall(frame(TEXT, b"x" * (size - 1), length=size))
        wait_until(lambda: server.service.requests.receiver.held > size // 2)
        second.sendall(frame(TEXT, os.urandom(size - 1), length=size))
        assert closing(second) == (1013, "the server holds as many bytes as it may")
        first.sendall(b"x")
        assert first.recv(100).endswith(b"110000")
    wait_until(lambda: server.service.requests.receiver.held == 0)


@pytest.mark.parametrize("payload", [b"\xff", b"a\xc3", b"\xed\xa0\x80"])
def test_a_text_that_is_not_utf_8_logs_nothing(server, caplog, payload):
    with opened(server) as socket:
        socket.sendall(frame(TEXT, payload))
        assert closing(socket) == (1007, "expected a text in UTF-8")
    assert caplog.text == ""
