"""Connections: limits of size and time, malformed requests, and edge cases of HTTP."""

import contextlib
import json
import socket
import threading
import time

import httpx
import msgspec
import pytest
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_bytes import (
    ASK,
    HEAD,
    post,
    read_all,
    read_answer,
    read_answer_of_many,
    receive,
)
from support.http_server import client_of, running
from support.waiting import PATIENCE_S, wait_until

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.operations.connections import ServerConnection
from hardpoint.builtin_plugins.server.operations.slow_readers import WriteWatch


def answer_of(server, data):
    """Return the answer to bytes, after which the server closes the connection."""
    with server.socket() as connection:
        connection.sendall(data)
        status, headers, body = read_answer(connection)
        assert headers["connection"] == "close"
        assert read_all(connection) == b""
    return status, body["error"]


LIMITS = {"header_bytes": 4000, "connections": 8}


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(config=configured(limits=LIMITS))) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def hasty():
    """A server that waits for requests for a third of a second only."""
    config = configured(header_seconds=0.3, keep_alive_seconds=0.3, limits=LIMITS)
    with running(FakeEngine(config=config)) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def alone(server):
    """Wait until the connections of other tests are gone; afterwards, the server must answer."""
    server.client.close()
    server.client = client_of(server.url)
    wait_until(lambda: server.service.traffic.connections == 0)
    yield
    assert server.client.get("/health").status_code == 200


MALFORMED = {
    b"nonsense\r\n\r\n": "its first word is no method",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": (
        "it is TLS, which this address does not speak"
    ),
    b"GET /health HTTP/9.9\r\n\r\n": "its version is another one",
    b"GET /health\x20there HTTP/1.1\r\n\r\n": "its target is not followed by `HTTP/1.1`",
    b"GET /health HTTP/1.1\nHost: localhost\n\n": "its lines do not end in CR LF",
    b"GET /health HTTP/1.1\r\n Host: localhost\r\n\r\n": "its first header begins with a space",
    b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n": (
        "the name of a header has a character that is not allowed"
    ),
    b"GET /health HTTP/1.1\r\nHost: a\x00b\r\n\r\n": (
        "the value of a header has a control character"
    ),
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n": "its target is no path or URL",
    b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n": "its target is no path or URL",
    b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n": "CONNECT is not supported",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n": (
        "its Content-Length is no number"
    ),
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab": (
        "it has two Content-Length headers"
    ),
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0": (
        "it has both a Content-Length and a Transfer-Encoding"
    ),
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n": (
        "its Transfer-Encoding is not chunked"
    ),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "it is HTTP/2",
}


@pytest.mark.parametrize(("data", "problem"), MALFORMED.items())
def test_what_is_no_http_is_answered_with_400_as_json(server, data, problem):
    status, error = answer_of(server, data)
    assert (status, error["code"]) == (400, "malformed_http")
    assert error["message"] == f"request: expected HTTP/1.1; {problem}"


def test_an_old_client_gets_a_stream_without_chunks(server):
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    with server.socket() as connection:
        connection.sendall(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, events = read_all(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_an_old_client_gets_a_whole_answer(server):
    with server.socket() as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head.lower()
    assert b"transfer-encoding" not in head.lower()


def test_many_requests_on_one_connection_give_others_their_turn(server, monkeypatch):
    """Few of them begin at a time: parsing all that have come would take long."""
    waiting = []
    begin = ServerConnection.on_headers_complete

    def noting(self):
        begin(self)
        waiting.append(len(self.pipeline))

    monkeypatch.setattr(ServerConnection, "on_headers_complete", noting)
    request, many = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n", 5000
    with server.socket() as connection, server.socket() as other:
        received = threading.Thread(target=read_answers, args=(connection, many))
        received.start()
        connection.sendall(request * many)
        other.sendall(request)
        assert read_answer_of_many(other) == 200
        received.join()
    assert len(waiting) == many + 1
    assert max(waiting) <= 16 + 4096 // len(request) + 1


def read_answers(connection, count):
    """Read the answers to as many requests."""
    data = b""
    while count:
        data += receive(connection)
        count -= data.count(b"HTTP/1.1 200 OK")
        data = data[-14:] if not data.endswith(b"HTTP/1.1 200 OK") else b""


def test_a_client_that_ends_its_sending_is_taken_for_gone():
    engine = HeldEngine(config=configured())
    with running(engine) as server, server.socket() as connection:
        connection.sendall(post(json.dumps({"prompt": "x"}).encode(), path=b"/v1/completions"))
        wait_until(lambda: engine.open == 1)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
        wait_until(lambda: engine.aborted == 1)


def test_a_broken_body_ends_its_request(server):
    num_asked = len(server.engine.asked)
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    status, error = answer_of(server, head + b"zz\r\n")
    assert (status, error["code"]) == (400, "malformed_http")
    assert len(server.engine.asked) == num_asked


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 5000,  # no end
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 5000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_long_headers_are_refused(server, data):
    status, error = answer_of(server, data)
    assert status == 431
    assert error["message"] == "headers: expected at most 4000 bytes (server.limits.header_bytes)"


def test_long_headers_in_small_pieces_are_refused_before_they_end(server):
    with server.socket() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        for _ in range(50):
            connection.sendall(b"x" * 100)
            time.sleep(0.001)
        assert read_answer(connection)[0] == 431


def test_headers_below_the_limit_are_fine(server):
    assert server.client.get("/health", headers={"x-long": "x" * 3000}).status_code == 200


def test_headers_that_do_not_end_are_answered_with_408(hasty):
    began = time.monotonic()
    status, error = answer_of(hasty, b"GET /health HTTP/1.1\r\nHost: local")
    assert status == 408
    assert error["message"] == "headers: expected them within 0.3 s (server.header_seconds)"
    assert time.monotonic() - began > 0.25


def test_a_slow_loris_is_disconnected_in_time_however_often_it_sends(hasty):
    began = time.monotonic()
    with hasty.socket() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        connection.settimeout(0.02)
        answer = b""
        while not answer and time.monotonic() - began < PATIENCE_S:
            with contextlib.suppress(TimeoutError):
                connection.sendall(b"a: b\r\n")
                answer = connection.recv(100)
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("data", [b"", b"\r\n"])
def test_a_connection_without_a_request_is_closed(hasty, data):
    with hasty.socket() as connection:
        connection.sendall(data)
        assert connection.recv(100)[:12] in (b"", b"HTTP/1.1 408")


def test_an_idle_connection_is_kept_for_a_while(server):
    with server.socket() as connection:
        connection.sendall(post())
        assert read_answer(connection)[0] == 200
        time.sleep(0.1)
        connection.sendall(post())
        assert read_answer(connection)[0] == 200


def test_usual_clients_and_proxies_close_an_idle_connection_first():
    """A server that closes it may reset a request that is on its way, which is not repeated."""
    clients = {"httpx": httpx.Limits().keepalive_expiry, "aiohttp": 15.0}
    proxies = {"load balancers of AWS": 60.0, "upstream connections of nginx": 60.0}
    for seconds in (clients | proxies).values():
        assert configured().table(ServerConfig).keep_alive_seconds > seconds + 10.0


def test_an_idle_connection_is_closed_after_a_while(hasty):
    with hasty.socket() as connection:
        began = time.monotonic()
        connection.sendall(post())
        assert read_answer(connection)[0] == 200
        assert connection.recv(100) == b""
        assert time.monotonic() - began > 0.25


def test_a_line_break_after_a_request_does_not_keep_the_connection(hasty):
    with hasty.socket() as connection:
        connection.sendall(post() + b"\r\n")
        assert read_answer(connection)[0] == 200
        assert connection.recv(100)[:12] in (b"", b"HTTP/1.1 408")


def test_pipelined_requests_are_answered_in_order(server):
    with server.socket() as connection:
        wrong = post(b"{", path=b"/v1/completions")
        connection.sendall(post() + wrong + post().replace(b"POST", b"GET", 1) + post())
        assert [read_answer_of_many(connection) for _ in range(4)] == [200, 400, 405, 200]


def test_nonsense_after_a_request_does_not_cut_its_answer(server):
    with server.socket() as connection:
        connection.sendall(post() + b"\x00\x01\x02 nonsense\r\n\r\n")
        assert read_answer(connection)[0] == 200
        assert read_all(connection) == b""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waiting", [1, 5])
def test_a_client_that_goes_ends_its_request_although_others_wait(caplog, stream, waiting):
    engine = HeldEngine(at_once=2 if stream else 0, config=configured())
    with running(engine) as server:
        with server.socket() as connection:
            connection.sendall(
                post(
                    json.dumps({"prompt": "x", "stream": stream}).encode(), path=b"/v1/completions"
                )
            )
            wait_until(lambda: engine.open == 1)
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * waiting)
            time.sleep(0.1)
        wait_until(lambda: engine.open == 0 and server.service.load.open == 0)
        assert engine.aborted == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_requests_before_nonsense_are_all_answered(server):
    with server.socket() as connection:
        connection.sendall(post() + post() + post() + b"\x00\x01 nonsense\r\n\r\n")
        assert [read_answer_of_many(connection) for _ in range(3)] == [200] * 3
        assert read_all(connection) == b""


def test_many_requests_at_once_are_all_answered(server):
    with server.socket() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        for _ in range(100):
            assert read_answer_of_many(connection) == 200
        connection.sendall(post())
        assert read_answer_of_many(connection) == 200


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_a_request_for_another_protocol_is_answered_in_this_one(server, protocol):
    upgrade = b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n"
    with server.socket() as connection:
        connection.sendall(post(head=HEAD + upgrade))
        status, _, body = read_answer(connection)
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "Hello there , friend"
        connection.sendall(post(head=HEAD + upgrade)[:100])
        connection.sendall(post(head=HEAD + upgrade)[100:] + post())
        assert [read_answer_of_many(connection) for _ in range(2)] == [200, 200]
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
        assert read_answer(connection)[0] == 200


def test_expect_100_continue(server):
    with server.socket() as connection:
        connection.sendall(
            post(b"", head=HEAD + b"Expect: 100-continue\r\n").replace(
                b"Content-Length: 0", b"Content-Length: %d" % len(ASK)
            )
        )
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(ASK)
        assert read_answer(connection)[0] == 200


def test_an_answer_before_the_end_of_a_body_arrives(server):
    """The rest of the body is read, since closing at once would reset the connection."""
    body = b"x" * (9 << 20)
    with server.socket() as connection:
        connection.sendall(post(body)[:200])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(body[: 1 << 20])
        status, headers, answer = read_answer(connection)
    assert (status, headers["connection"]) == (413, "close")
    assert "server.limits.body_bytes" in answer["error"]["message"]


def test_a_body_that_goes_on_after_its_answer_ends_with_the_connection(server, monkeypatch):
    respond = ServerConnection.on_response_complete

    def respond_hastily(self):
        self._settings = msgspec.structs.replace(self._settings, header_seconds=0.2)
        respond(self)

    monkeypatch.setattr(ServerConnection, "on_response_complete", respond_hastily)
    with server.socket() as connection:
        data = post(b"x" * 100_000, path=b"/nowhere")
        connection.sendall(data[:5000])
        assert read_answer(connection)[0] == 404
        wait_until(lambda: fails(connection), what="the end of the connection")


def fails(connection):
    """Return whether a connection takes no more bytes."""
    try:
        connection.sendall(b"x" * 10)
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


@contextlib.contextmanager
def busy_server():
    """Serve with as many connections as there may be, each with a request that is answered."""
    engine = HeldEngine(config=configured(limits=LIMITS))
    with running(engine) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.socket()) for _ in range(8)]
        for connection in busy:
            connection.sendall(post(ASK))
        wait_until(lambda: server.service.load.open == 8)
        yield server, busy
        engine.go_on.set()
        for connection in busy:
            assert read_answer(connection)[0] == 200


def test_connections_beyond_the_limit_are_answered_with_503():
    with busy_server() as (server, _), server.socket() as further:
        further.sendall(post())
        status, headers, body = read_answer(further)
        assert (status, headers["connection"]) == (503, "close")
        assert body["error"]["message"].startswith("the server has 8 connections, its maximum")
        assert int(headers["retry-after"]) >= 1
        assert headers["x-request-id"].startswith("req-")
        assert server.service.traffic.rejected["connections"] >= 1


def test_far_more_connections_than_the_limit_are_closed_at_once():
    with busy_server() as (server, _), contextlib.ExitStack() as stack:
        for _ in range(16 * 64):
            stack.enter_context(server.socket())
        wait_until(lambda: server.service.traffic.rejected["idle_connections"] > 0)
        assert server.service.traffic.connections <= 8 + 64


def test_idle_connections_keep_nobody_out(server):
    """New connections close the oldest ones, also connections with incomplete headers."""
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(server.socket()) for _ in range(8)]
        wait_until(lambda: server.service.traffic.connections == 8)
        many[1].sendall(b"GET /health HTTP/1.1\r\nHost:")
        for _ in range(2):
            new = stack.enter_context(server.socket())
            new.sendall(post())
            assert read_answer(new)[0] == 200
        assert read_all(many[0]) == b""
        assert read_all(many[1]) == b""
        many[7].sendall(post())
        assert read_answer(many[7])[0] == 200


def test_administrators_reach_the_server_when_users_have_all_connections(tmp_path):
    config = configured(limits={"connections": 3}, admin=f"unix:{tmp_path}/admin")
    with running(FakeEngine(config=config)) as server, contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(server.socket())
        wait_until(lambda: server.service.traffic.rejected["idle_connections"] == 3)
        assert server.admin.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("size", "count", "status"), [(1, 32_000, 200), (64, 60_000, 200), (1, 50_000, 400)]
)
def test_many_small_chunks(server, size, count, status):
    """Each takes as much of the event loop's time as a large one."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    with server.socket() as connection:
        with contextlib.suppress(OSError):  # the server may have closed it
            connection.sendall(head + chunk * count)
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(ASK), ASK))
        answer_status, _, body = read_answer(connection)
    assert answer_status == status
    if status == 400:
        expected = "body: expected chunks of 64 bytes or more on average"
        assert body["error"]["message"] == expected


def test_what_is_refused_is_counted(server, hasty):
    def counted(number):
        names = ("malformed", "header_size", "header_time")
        return [number.service.traffic.rejected[name] for name in names]

    before, before_hasty = counted(server), counted(hasty)
    answer_of(server, b"nonsense\r\n\r\n")
    answer_of(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 5000)
    answer_of(hasty, b"GET / HT")
    grown = [after - count for after, count in zip(counted(server), before, strict=True)]
    assert grown == [1, 1, 0]
    assert counted(hasty)[2] == before_hasty[2] + 1
    assert 'hardpoint:http_rejected_total{reason="malformed"}' in server.client.get("/metrics").text


def slow_reader(server):
    """Return a connection that asks for a stream and does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    connection.sendall(post(body))
    return connection


def test_a_client_that_does_not_read_is_disconnected_and_its_request_ended():
    text = " ".join(["word" * 20_000] * 300)  # 24 MB, more than the kernel buffers
    engine = FakeEngine(text=text, delay=1e-4, config=configured(send_seconds=0.3))
    with running(engine) as server, slow_reader(server) as connection:
        wait_until(lambda: server.engine.aborted == 1)
        assert server.engine.open == 0
        wait_until(lambda: server.service.load.open == 0)
        wait_until(lambda: server.service.traffic.connections == 0)
        assert server.service.traffic.rejected["slow_reader"] == 1
        assert len(read_all(connection)) < len(text)


def test_a_client_that_reads_slowly_gets_all(monkeypatch):
    text = " ".join(["word" * 20_000] * 150)
    engine = FakeEngine(text=text, delay=1e-4, config=configured(send_seconds=0.05))
    check, checks, size, tail = vars(WriteWatch)["_check"], [], 0, b""

    def check_after_reading(self):
        """Let the client read a little before each of three checks; make no others."""
        nonlocal size
        if len(checks) == 3:
            return
        while self._unread() >= self._unsent:
            size += len(receive(connection, 2000))
        check(self)
        checks.append(self._transport.is_closing())

    monkeypatch.setattr(WriteWatch, "_check", check_after_reading)
    with running(engine) as server:
        with slow_reader(server) as connection:
            wait_until(lambda: len(checks) == 3)
            while b"data: [DONE]" not in tail:
                part = receive(connection)
                size += len(part)
                tail = (tail + part)[-100:]
        assert checks == [False] * 3
        assert size > len(text)
        assert server.engine.aborted == 0


@pytest.mark.nightly
def test_500_connections_at_once(server_of_many):
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(server_of_many.socket()) for _ in range(500)]
        for connection in many:
            connection.sendall(post(body))
        for connection in many:
            answer = b""
            while b"data: [DONE]" not in answer:
                answer += receive(connection)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert answer.count(b"friend") == 1
        assert server_of_many.service.traffic.connections == 500
    assert server_of_many.engine.aborted == 0


@pytest.fixture
def server_of_many():
    with running(FakeEngine(delay=0.01, config=configured())) as running_server:
        yield running_server
