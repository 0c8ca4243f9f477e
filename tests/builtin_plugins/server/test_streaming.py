"""Server-sent events: heartbeats, disconnects, errors inside a stream, and slow clients."""

import asyncio
import contextlib
import json
import time

import pytest
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_server import running
from support.waiting import PATIENCE_S, wait_until

from hardpoint.builtin_plugins.server.streaming import until_disconnect
from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.plugins import EngineConfig, OverloadedError, RequestError
from hardpoint.plugins.server import Middleware

ENDED = "the engine is being restarted; send the request again"
"""The message to clients about an engine that died; the log has the details."""

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def lines_of(server, body=CHAT, path="/v1/chat/completions"):
    with server.client.stream("POST", path, json=body) as response:
        return response.status_code, response.read().decode()


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("top_k: expected at most 5, got 6"), 400, "invalid_request_error"),
        (OverloadedError("too many requests wait: 5"), 429, "overloaded_error"),
        (EngineDeadError("the engine died"), 503, "unavailable_error"),
        (PluginFaultError("plugin 'x': it raised"), 500, "plugin_error"),
    ],
)
def test_an_error_before_the_first_token_has_its_status(error, status, kind):
    with running(FakeEngine(error=error, config=configured())) as server:
        code, text = lines_of(server)
    assert code == status
    assert json.loads(text)["error"]["type"] == kind
    message = ENDED if isinstance(error, EngineDeadError) else str(error)
    assert json.loads(text)["error"]["message"] == message


def test_the_field_of_an_error_is_its_param():
    error = RequestError("messages[0].content: expected a string, got 5")
    with running(FakeEngine(error=error, config=configured())) as server:
        _, text = lines_of(server)
    assert json.loads(text)["error"]["param"] == "messages[0].content"


def test_an_error_inside_a_stream_is_an_event_before_the_end_marker():
    engine = FakeEngine(error=EngineDeadError("it died"), fails_after=2, config=configured())
    with running(engine) as server:
        code, text = lines_of(server)
    events = text.split("\n\n")
    assert code == 200
    assert json.loads(events[-3].removeprefix("data: "))["error"]["message"] == ENDED
    assert events[-2:] == ["data: [DONE]", ""]


def test_comments_fill_the_time_without_events():
    engine = HeldEngine(text="a b", config=configured(heartbeat_seconds=0.05))
    with running(engine) as server:
        code, text = server.held_stream("/v1/chat/completions", CHAT, count=4)
    assert code == 200
    assert text.startswith(": waiting\n\n")
    assert text.count(": waiting\n\n") >= 4
    assert text.endswith("data: [DONE]\n\n")


def starting_late(engine):
    """Return a middleware that passes the start of an answer on after the engine's first output."""

    def wrap(app):
        async def middleware(scope, receive, send):
            async def late(message):
                if message["type"] == "http.response.start":
                    engine.go_on.set()
                    await asyncio.sleep(0.1)
                await send(message)

            await app(scope, receive, late)

        return middleware

    return Middleware(wrap=wrap)


@pytest.mark.parametrize("error", [None, EngineDeadError("it died")])
def test_no_body_overtakes_a_start_that_a_middleware_delays(error):
    engine = HeldEngine(
        text="a b c",
        error=error,
        fails_after=1,
        config=configured(heartbeat_seconds=0.05),
    )
    engine.extensions = (("acme", starting_late(engine)),)
    with running(engine) as server:
        code, text = lines_of(server)
        assert server.service.faults.counts == {}
    assert code == 200
    assert text.startswith(": waiting\n\ndata: ")
    assert text.endswith("data: [DONE]\n\n")
    assert (ENDED in text) == (error is not None)


def test_an_answer_that_the_end_of_the_server_cuts_leaves_no_traceback(caplog):
    """Its client reads nothing, so that it cannot be notified."""
    engine = FakeEngine(text=" ".join(["w" * 30_000] * 1000), config=configured())
    with running(engine) as server:
        body = json.dumps(CHAT).encode()
        connection = server.socket()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: engine.open == 1)
        time.sleep(0.2)
        server.call(server.serving.stop)
        server.thread.join(PATIENCE_S)
        connection.close()
    assert engine.aborted == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_no_comment_without_heartbeats():
    engine = FakeEngine(delay=0.1, text="a b", config=configured(heartbeat_seconds=0))
    with running(engine) as server:
        _, text = lines_of(server)
    assert ": waiting" not in text


def test_an_error_after_a_comment_is_an_event():
    engine = HeldEngine(config=configured(heartbeat_seconds=0.02))

    async def late(*_, **__):
        while not engine.go_on.is_set():
            await asyncio.sleep(0.005)
        raise OverloadedError("too many requests wait: 5")
        yield

    engine.chat = late
    with running(engine) as server:
        code, text = server.held_stream("/v1/chat/completions", CHAT)
    assert code == 200
    assert '"message":"too many requests wait: 5"' in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_the_request(stream):
    engine = HeldEngine(at_once=int(stream), config=configured())
    with running(engine) as server:
        connection = server.socket()
        body = json.dumps({**CHAT, "stream": stream}).encode()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: engine.open == 1)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
        wait_until(lambda: engine.open == 0)
        assert engine.aborted == 1
        wait_until(lambda: server.service.load.open == 0)


def test_a_disconnect_before_the_body_is_whole_asks_the_engine_nothing():
    with running(FakeEngine(config=configured())) as server:
        connection = server.socket()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"messages'
        )
        connection.close()
        assert server.post("/v1/chat/completions", {**CHAT, "stream": False}).status_code == 200
        assert len(server.engine.asked) == 1


def test_a_body_that_stops_is_answered_408():
    with running(FakeEngine(config=configured(body_seconds=0.1))) as server:
        connection = server.socket()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"messages'
        )
        answer = connection.makefile("rb").read()  # until the server closes
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"within 0.1 s (server.body_seconds)" in answer


def test_a_body_that_drips_is_answered_408():
    with running(FakeEngine(config=configured(body_seconds=0.3))) as server:
        connection = server.socket()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
        )
        connection.settimeout(0.1)
        answer = b""
        for _ in range(600):
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1000)
                break
            connection.sendall(b" ")
    assert answer.startswith(b"HTTP/1.1 408")


def test_more_requests_than_the_limit_are_answered_429():
    engine = HeldEngine(config=configured(limits={"requests": 1}))
    with running(engine) as server:
        first = server.socket()
        body = json.dumps({**CHAT, "stream": False}).encode()
        first.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: engine.open == 1)
        second = server.post("/v1/chat/completions", CHAT)
        engine.go_on.set()
        assert first.recv(12) == b"HTTP/1.1 200"
    assert second.status_code == 429
    assert int(second.headers["retry-after"]) >= 1
    assert second.json()["error"]["code"] == "overloaded"


def test_an_engine_that_does_not_run_is_answered_503():
    engine = FakeEngine(config=configured())
    with running(engine) as server:
        engine.is_running = False
        restarting = server.post("/v1/chat/completions", CHAT)
        assert restarting.status_code == 503
        assert restarting.headers["retry-after"] == "2"
        assert "being restarted" in restarting.json()["error"]["message"]
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 503


def test_the_request_id_of_a_client_comes_back():
    with running(FakeEngine(config=configured())) as server:
        answer = server.post("/v1/chat/completions", CHAT, headers={"x-request-id": "abc-1"})
        bad = server.post("/v1/chat/completions", CHAT, headers={"x-request-id": "a b" * 99})
    assert answer.headers["x-request-id"] == "abc-1"
    assert bad.headers["x-request-id"].startswith("req-")


def test_a_fake_has_the_configuration_of_the_test():
    assert isinstance(configured(), EngineConfig)
    assert configured(heartbeat_seconds=3).server.heartbeat_seconds == 3


def test_a_cancellation_at_the_end_of_the_work_is_kept():
    """At that moment the call waits for the end of its own watch of the connection."""

    async def ends_cancelled():
        async def receive():
            try:
                await asyncio.Event().wait()
            finally:
                running.cancel()

        running = asyncio.ensure_future(until_disconnect(receive, asyncio.sleep(0)))
        await asyncio.wait([running])
        return running.cancelled()

    assert asyncio.run(ends_cancelled())
