"""Memory of connections: nothing that clients send around bodies is held without a limit."""

import contextlib
import gc
import random
import weakref

import psutil
import pytest
from support.fake_engine import FakeEngine, configured
from support.http_bytes import HEAD, post, read_all, read_answer, read_answer_of_many
from support.http_server import running
from support.waiting import wait_until

from hardpoint.builtin_plugins.server.operations.connections import ServerConnection

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + CHUNKED
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n" + CHUNKED
TOO_LONG = "body: expected at most 4000 bytes of chunk extensions and trailers"

FRAMES = {
    "trailer": b"0\r\nX-Trailer: " + b"x" * 20_000,
    "trailers": b"0\r\n" + b"X-Trailer: x\r\n" * 1500,
    "name": b"0\r\n" + b"x" * 20_000,
    "extension": b"1;" + b"x" * 20_000,
    "extension of the end": b"0;name=" + b"x" * 20_000,
    "extensions": (b"1;" + b"x" * 500 + b"\r\n{\r\n") * 40,
}


@pytest.fixture(scope="module")
def server():
    config = configured(limits={"header_bytes": 4000})
    with running(FakeEngine(config=config)) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def counted(server):
    before = server.service.traffic.rejected["header_size"]
    yield
    assert server.service.traffic.rejected["header_size"] == before + 1
    wait_until(lambda: server.service.load.open == 0)


@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES)
def test_long_frames_of_a_body_are_refused(server, frames):
    num_asked = len(server.engine.asked)
    with server.socket() as connection:
        connection.sendall(CHAT + frames)
        status, headers, body = read_answer(connection)
        assert (status, headers["connection"]) == (431, "close")
        assert body["error"]["message"] == f"{TOO_LONG} (server.limits.header_bytes)"
        assert read_all(connection) == b""
    assert len(server.engine.asked) == num_asked


@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES)
def test_long_frames_after_the_answer_end_the_connection_without_another_one(server, frames):
    with server.socket() as connection:
        connection.sendall(HEALTH)
        assert read_answer_of_many(connection) == 200
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(frames), 100):
                connection.sendall(frames[start : start + 100])
        assert read_all(connection) == b""


class TestWithinTheLimit:
    @pytest.fixture(autouse=True)
    def counted(self):
        """Count nothing: the fuzzed connections are refused as they come, and others are not."""

    def test_usual_frames_are_read(self, server):
        with server.socket() as connection:
            ask = post().partition(b"\r\n\r\n")[2]
            chunks = b"".join(b"1;a=%d\r\n%c\r\n" % (i % 10, c) for i, c in enumerate(ask))
            connection.sendall(
                CHAT + chunks + b"0;last\r\nX-Trailer: x\r\nHost: evil\r\n\r\n" + post()
            )
            assert [read_answer_of_many(connection) for _ in range(2)] == [200, 200]

    def test_a_trailer_is_no_header_of_its_request(self, server):
        with server.socket() as connection:
            connection.sendall(CHAT + b"2\r\n{}\r\n")
            connection.sendall(b"0\r\nX-Request-Id: trailer\r\n\r\n")
            _, headers, _ = read_answer(connection)
            assert headers["x-request-id"] != "trailer"

    def test_a_connection_is_freed_when_it_ends(self, server):
        gc.collect()
        gc.disable()
        try:
            for data in (HEALTH + b"0\r\nX-T: " + b"x" * 1000, post(), CHAT + b"5\r\nab", b"GET /"):
                with server.socket() as connection:
                    connection.sendall(data)
                    wait_until(lambda: connections())
                    alive = [weakref.ref(open_connection) for open_connection in connections()]
                    if data.endswith(b"x") or data == post():
                        read_answer_of_many(connection)
                wait_until(lambda: all(ref() is None for ref in alive))  # noqa: B023
        finally:
            gc.enable()

    def test_bodies_of_requests_that_wait_are_held_within_a_limit(self, server, monkeypatch):
        """While a client leaves an answer unread; each body alone is below all limits."""
        held = []
        read = ServerConnection.on_body

        def noting(self, body):
            read(self, body)
            held.append(sum(len(cycle.body) for cycle, _ in self.pipeline))

        monkeypatch.setattr(ServerConnection, "on_body", noting)
        monkeypatch.setattr(server.engine, "delay", 0.1)
        with server.socket() as connection:
            connection.sendall(post() + post(b"x" * 60_000, path=b"/health") * 12)
            assert read_answer_of_many(connection) == 200
            assert {read_answer_of_many(connection) for _ in range(12)} == {405}
        assert 0 < max(held) <= (64 << 10) + 4096

    @pytest.mark.nightly
    def test_ten_thousand_cut_connections_leave_memory_flat(self, server):
        chance = random.Random(7)
        memory = []
        for number in range(10_000):
            head = chance.choice(
                [HEALTH, CHAT, b"", b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED]
            )
            frames = chance.choice(
                [*FRAMES.values(), post(), b"5\r\nab", b"0\r\nX: " + b"x" * 3900]
            )
            with server.socket() as connection, contextlib.suppress(ConnectionError):
                connection.sendall((head + frames)[: chance.randrange(30_000)])
            if number % 1000 == 999:
                wait_until(lambda: server.service.traffic.connections == 0)
                memory.append(psutil.Process().memory_info().rss >> 20)
        assert max(memory[2:]) - memory[1] < 16, memory


def connections():
    return [candidate for candidate in gc.get_objects() if type(candidate) is ServerConnection]
