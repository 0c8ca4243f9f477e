"""`/inference/v1/sessions`, and WebSockets of plugins."""

from __future__ import annotations

import contextlib
import json
import re
import time

import pytest
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_bytes import read_answer_of_many
from support.http_server import running
from support.internals import open_conversations_of
from support.keyed_server import ALICE, BOB, keyed_server, keys_text, write_keys
from support.scripted_server import server_config, write_model
from support.waiting import PATIENCE_S, wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from hardpoint import AsyncLLM, EngineDeadError, RequestError
from hardpoint.builtin_plugins.server.access.keys import KeyStore, installed
from hardpoint.plugins.server import Middleware, Route, Transform


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tables = {
        "conversations": {"lease_seconds": 600.0, "max_open": 3},
        "plugins": {"enable": ["support.plugins.slow:Slow"]},
    }
    with keyed_server(tmp_path_factory.mktemp("model"), 3, **tables) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def alone(request):
    """Wait until the conversations of other tests have ended; the shared server may have few."""
    if "server" in request.fixturenames:
        engine = request.getfixturevalue("server").engine
        wait_until(lambda: not len(open_conversations_of(engine)))


class Talk:
    """A client of a conversation."""

    def __init__(self, socket):
        self.socket = socket

    def send(self, kind, **fields):
        self.socket.send(json.dumps({"type": kind, **fields}))

    def next(self):
        return json.loads(self.socket.recv(PATIENCE_S))

    def turn(self):
        """Return the text of a turn, and its end."""
        text = ""
        while (event := self.next())["type"] == "response.delta":
            text += event["text"]
        return text, event

    def ask(self, text, **fields):
        self.send("input.append", text=text)
        self.send("input.commit", **fields)
        return self.turn()

    def closed(self):
        """Return the code and the reason that the server closes with."""
        with pytest.raises(ConnectionClosed) as info:
            self.socket.recv(PATIENCE_S)
        return info.value.rcvd.code, info.value.rcvd.reason


@contextlib.contextmanager
def talking(server, query="", path="/inference/v1/sessions", headers=None, **options):
    url = server.url.replace("http", "ws") + path + query
    headers = {"Authorization": f"Bearer {ALICE}"} if headers is None else headers
    with connect(url, additional_headers=headers, **options) as socket:
        yield Talk(socket)


def refused(server, *args, **options):
    """Return the status and the error of a handshake."""
    with pytest.raises(InvalidStatus) as info, talking(server, *args, **options):
        pass
    response = info.value.response
    return response.status_code, json.loads(response.body)["error"]


GREEDY = {"temperature": 0, "max_tokens": 20}


def test_each_answer_is_part_of_the_next_prompt(server):
    with talking(server) as talk:
        text, done = talk.ask("say abc", **GREEDY)
        assert text == " abc abc abc"
        assert (done["turn"], done["finish_reason"]) == (0, "stop")
        usage = {"prompt_tokens": 7, "completion_tokens": 13, "total_tokens": 20}
        assert done["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        _, done = talk.ask(" and", **GREEDY)
        assert (done["turn"], done["usage"]["prompt_tokens"]) == (1, 24)
        assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_a_turn_may_have_the_rest_of_the_context(server):
    with talking(server) as talk:
        text, done = talk.ask("loop", temperature=0, n_predict=-1)
        assert (text, done["finish_reason"]) == ("na" * 200, "stop")


def test_the_earlier_path_works_and_warns_once(server, caplog):
    for _ in range(2):
        with talking(server, path="/v1/conversations") as talk:
            assert talk.ask("say abc", **GREEDY)[0] == " abc abc abc"
    warnings = [text for text in caplog.messages if "deprecated" in text]
    assert warnings == [
        "WebSocket /v1/conversations is deprecated; open it at /inference/v1/sessions"
    ]


def test_parts_parameters_and_a_commit_without_parts(server):
    with talking(server, "?keep_last=false&model=other&priority=3") as talk:
        talk.send("input.commit", **GREEDY)
        assert talk.turn() == ("", NOTHING)
        talk.send("input.append", text="say")
        talk.send("input.append", text="")
        assert talk.ask(" abc", temperature=0, max_tokens=4)[0] == " abc"
        _, done = talk.ask("x")  # by the parameters before
        assert (done["turn"], done["usage"]["completion_tokens"]) == (1, 4)
        assert done["usage"]["prompt_tokens"] == 7 + 4 - 1 + 1  # the last token was dropped


NOTHING = {
    "type": "response.done",
    "turn": None,
    "finish_reason": None,
    "stop_reason": None,
    "usage": {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ("{", "body", "body: expected JSON"),
        ("[]", "body", "body: expected a JSON object, got an array"),
        (b"{}", "message", "message: expected a text, got bytes"),
        ("{}", "type", "type: expected one of 'input.append', 'input.commit', .* got None"),
        ('{"type": ["x"]}', "type", r"type: expected one of .* got \['x'\]"),
        ('{"type": "input.append"}', "text", "text: missing"),
        ('{"type": "input.append", "text": 3}', "text", "text: expected a string, got 3"),
        ('{"type": "input.append", "txt": "a"}', "txt", "txt: unknown.*did you mean 'text'"),
        ('{"type": "input.commit", "n": 2}', "n", "n: expected 1 in a conversation.* got 2"),
        ('{"type": "input.commit", "temperature": -1}', "temperature", "temperature: .* -1"),
        ('{"type": "input.commit", "model": "a"}', "model", "model: not supported: give it in the"),
        ('{"type": "input.commit", "n": 999}', "n", "n: expected at most 128 on this server"),
        ('{"type": "response.cancel", "x": 1}', "x", "x: unknown"),
    ],
)
def test_a_wrong_message_ends_nothing(server, message, param, words):
    with talking(server) as talk:
        talk.send("input.append", text="say abc")
        talk.socket.send(message)
        event = talk.next()
        assert event["type"] == "error"
        assert event["error"]["param"] in (param, None)
        assert re.search(words, event["error"]["message"]), event
        talk.send("input.commit", **GREEDY)
        assert talk.turn()[0] == " abc abc abc"


def test_a_turn_is_cancelled_and_parts_come_meanwhile(server):
    slow = {"plugin_args": {"slow": {"seconds": 0.02}}, "ignore_eos": True, "temperature": 0}
    with talking(server) as talk:
        talk.send("response.cancel")  # nothing runs
        talk.send("input.append", text="say abc")
        talk.send("input.commit", max_tokens=900, **slow)
        assert talk.next()["type"] == "response.delta"
        talk.send("input.append", text="more")
        talk.send("input.commit")
        while (event := talk.next())["type"] == "response.delta":
            pass
        assert event["error"]["message"].startswith("input.commit: a turn runs; wait for its")
        talk.send("response.cancel")
        _, done = talk.turn()
        assert (done["finish_reason"], done["turn"]) == ("abort", 0)
        made = done["usage"]["completion_tokens"]
        talk.send("input.commit", max_tokens=1, temperature=0)
        _, done = talk.turn()
        assert (done["turn"], done["usage"]["prompt_tokens"]) == (1, 7 + made + 4)


def test_a_part_too_long_names_the_numbers(server):
    with talking(server) as talk:
        talk.send("input.append", text="a" * 1100)
        error = talk.next()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "the conversation has 0 tokens and this part 1100" in error["message"]
        talk.send("input.append", text="a" * (1 << 20))
        assert talk.next()["error"]["message"].startswith("text: expected at most 32768 characters")


def test_the_lease_runs_out(tmp_path):
    config = server_config(write_model(tmp_path), conversations={"lease_seconds": 0.5})
    with running(AsyncLLM(config=config)) as server:
        began = time.monotonic()
        with talking(server, headers={}) as talk:
            event = talk.next()
            assert event["error"]["code"] == "conversation_ended"
            assert "its lease of 0.5 s has run out" in event["error"]["message"]
            assert time.monotonic() - began > 0.4
            assert talk.closed()[0] == 1008


def test_no_more_are_opened_than_may_be(server):
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(talking(server))
        status, error = refused(server)
        assert (status, error["code"]) == (429, "overloaded")
        assert "conversations.max_open: 3 conversations are open" in error["message"]


def test_the_client_goes_in_the_middle_of_a_turn(server):
    with talking(server) as talk:
        slow = {"plugin_args": {"slow": {"seconds": 0.02}}, "ignore_eos": True}
        talk.send("input.append", text="say abc")
        talk.send("input.commit", max_tokens=900, **slow)
        assert talk.next()["type"] == "response.delta"
    wait_until(
        lambda: not server.service.load.open and not len(open_conversations_of(server.engine))
    )
    stats = server.call(server.engine.engines.scheduler_stats)
    assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("?model=gpt", 404, "model: expected 'scripted' or 'other', got 'gpt'"),
        ("?keep_last=7", 400, "keep_last: expected .*bool.* got 7|keep_last: .*true or false"),
        ("?keep=true", 400, "keep: unknown.*did you mean 'keep_last'"),
        ("?priority=a", 400, "priority: expected a whole number, or none, got 'a'"),
        ("?priority=" + "[" * 5000, 400, r"priority: expected a whole number, or none, got '\[\["),
        ("?model=a&model=b", 400, "model: expected it once in the query, got it several times"),
    ],
)
def test_wrong_queries_open_nothing(server, query, status, words):
    got, error = refused(server, query)
    assert got == status
    assert re.search(words, error["message"]), error


class TestAccess:
    def test_a_key_is_needed(self, server):
        status, error = refused(server, headers={})
        assert (status, error["code"]) == (401, "invalid_api_key")

    def test_pages_of_others_are_refused(self, server):
        status, error = refused(server, origin="https://evil.example")
        assert (status, error["code"]) == (403, "origin_not_allowed")

    def test_each_turn_counts_as_a_request_of_the_key(self, server):
        bob = {"x-api-key": BOB}
        with talking(server, headers=bob) as talk:  # the first one
            for _ in range(2):
                assert talk.ask("a", max_tokens=1)[1]["type"] == "response.done"
            talk.send("input.append", text="a")
            talk.send("input.commit")
            event = talk.next()
            assert event["error"]["code"] == "rate_limit_exceeded"
        status, error = refused(server, headers=bob)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")

    def test_a_key_that_is_withdrawn_has_no_further_turn(self, server):
        with talking(server) as talk:
            assert talk.ask("a", max_tokens=1)[1]["turn"] == 0
            server.keys.write_text(keys_text(3).replace(ALICE, "x" * 30))
            try:
                server.clock.advance(1.0)  # files are looked at once a second
                assert talk.ask("a", max_tokens=1)[1]["error"]["code"] == "invalid_api_key"
                assert talk.closed()[0] == 1008
            finally:
                server.keys.write_text(keys_text(3))
                server.clock.advance(1.0)
                refused(server, headers={})  # has the file read again


class TestConversationsOfAKey:
    @pytest.fixture
    def limited(self, tmp_path):
        """Return a server of a fake engine, on which a key may have two conversations."""
        path = write_keys(tmp_path)
        engine = FakeEngine(config=configured(limits={"conversations": 2}))
        with running(engine, authenticators=[installed(KeyStore(str(path)))]) as running_server:
            yield running_server

    def test_a_further_one_is_refused_and_disturbs_nothing(self, limited):
        with talking(limited) as first, talking(limited):
            status, error = refused(limited)
            assert status == 429
            assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_conversations")
            assert error["message"] == (
                "server.limits.conversations: expected at most 2 open conversations of this key, "
                "and 2 are open; close one first"
            )
            assert first.ask("hello")[1]["turn"] == 0
            with talking(limited, headers={"x-api-key": BOB}) as other:  # each key has its own
                assert other.ask("hello")[1]["turn"] == 0

    def test_the_end_of_one_makes_room(self, limited):
        with talking(limited):
            for _ in range(3):
                with opened_in_time(limited) as talk:
                    assert talk.ask("hello")[1]["turn"] == 0
        with opened_in_time(limited), opened_in_time(limited):
            assert refused(limited)[0] == 429

    def test_handshakes_that_are_refused_are_not_counted(self, limited):
        for query in ("?model=gpt", "?priority=-9", "?keep=1"):
            for _ in range(3):
                assert refused(limited, query)[0] in (400, 404)
        with talking(limited), talking(limited):
            assert refused(limited)[0] == 429

    def test_without_keys_all_clients_have_one_limit(self):
        engine = FakeEngine(config=configured(limits={"conversations": 1}))
        with running(engine) as server, talking(server, headers={}):
            status, error = refused(server, headers={})
            assert status == 429
            assert "at most 1 open conversations of all clients together" in error["message"]


@contextlib.contextmanager
def opened_in_time(server):
    """Open a conversation once the server has heard that another one has ended."""
    with contextlib.ExitStack() as stack:
        opened = []

        def opens():
            try:
                opened.append(stack.enter_context(talking(server)))
            except InvalidStatus as error:
                if error.response.status_code != 429:
                    raise
            return opened

        wait_until(opens)
        yield opened[0]


def test_what_is_no_handshake_is_told(server):
    answer = server.client.get("/inference/v1/sessions", headers={"x-api-key": ALICE})
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
    assert answer.json()["error"]["message"].startswith("upgrade: expected a handshake of a WebS")
    # One that comes after a request that is not answered yet is no handshake either.
    head = f"Host: localhost\r\nx-api-key: {ALICE}\r\n"
    wish = "Connection: upgrade\r\nUpgrade: websocket\r\n"
    wish += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with server.socket() as connection:
        connection.sendall(
            f"GET /version HTTP/1.1\r\n{head}\r\n"
            f"GET /inference/v1/sessions HTTP/1.1\r\n{head}{wish}\r\n".encode()
        )
        assert [read_answer_of_many(connection) for _ in range(2)] == [200, 426]


def test_messages_above_the_limit_close_it(tmp_path):
    engine = FakeEngine(config=configured(limits={"body_bytes": 1000}), extensions=ECHO)
    with running(engine) as server, talking(server, path="/acme/echo", headers={}) as talk:
        talk.socket.send("x" * 2000)
        assert talk.closed()[0] == 1009


async def echo(websocket):
    await websocket.accept()
    while (text := await websocket.receive_text()) != "end":
        if text == "fail":
            raise LookupError("secret")
        await websocket.send_text(f"{websocket.state.client.name}: {text}")


async def unwilling(websocket):
    raise LookupError("secret")


ECHO = (
    ("acme", Route(path="/acme/echo", endpoint=echo, websocket=True)),
    ("acme", Route(path="/acme/unwilling", endpoint=unwilling, websocket=True)),
)


@pytest.fixture(scope="module")
def echoing():
    with running(FakeEngine(config=configured(), extensions=ECHO)) as running_server:
        yield running_server


class TestRoutesOfPlugins:
    def test_one_may_be_a_websocket(self, echoing):
        with talking(echoing, path="/acme/echo", headers={}) as talk:
            talk.socket.send("hello")
            assert talk.socket.recv(PATIENCE_S) == "anybody: hello"
            talk.socket.send("end")
            assert talk.closed() == (1000, "")
        with talking(echoing, path="/acme/echo", headers={}) as talk:
            pass  # that the client goes is no fault
        assert echoing.service.faults.counts["acme"] == 0

    def test_its_errors_are_its_own(self, echoing):
        with talking(echoing, path="/acme/echo", headers={}) as talk:
            talk.socket.send("fail")
            code, reason = talk.closed()
            assert (code, reason) == (
                1011,
                "plugin 'acme': its route /acme/echo failed: LookupError",
            )
        status, error = refused(echoing, path="/acme/unwilling", headers={})
        assert (status, error["type"]) == (500, "plugin_error")
        assert error["message"] == "plugin 'acme': its route /acme/unwilling failed: LookupError"
        assert echoing.service.faults.counts["acme"] == 2
        paths = echoing.client.get("/openapi.json").json()["paths"]
        assert "101" in paths["/acme/echo"]["get"]["responses"]


class TestExtensions:
    def test_a_transform_sees_messages_and_events(self):
        async def request(call, body):
            assert call.path == "/inference/v1/sessions"
            return {**body, "text": body["text"].upper()} if "text" in body else body

        def event(call, body):
            return None if body["type"] == "response.delta" else {**body, "seen": call.path}

        engine = FakeEngine(
            config=configured(),
            extensions=(("acme", Transform(request=request, event=event)),),
        )
        with running(engine) as server, talking(server, headers={}) as talk:
            text, done = talk.ask("hello", max_tokens=5)
            assert (text, done["seen"]) == ("", "/inference/v1/sessions")
            ((prompt, params, _),) = engine.asked
            assert prompt["prompt_token_ids"] == [1, *map(ord, "HELLO")]
            assert params.max_tokens == 5

    def test_a_middleware_is_around_it(self):
        seen = []

        def wrap(app):
            async def inside(scope, receive, send):
                seen.append((scope["type"], scope["path"]))
                if b"refuse" in scope["query_string"]:
                    raise RequestError("query: not today")
                await app(scope, receive, send)

            return inside

        engine = FakeEngine(config=configured(), extensions=(("acme", Middleware(wrap=wrap)),))
        with running(engine) as server:
            with talking(server, headers={}) as talk:
                assert talk.ask("hello")[0] == "Hello there , friend"
            assert refused(server, "?refuse=1", headers={})[1]["message"] == "query: not today"
        assert seen == [("websocket", "/inference/v1/sessions")] * 2


class TestEnds:
    def test_an_idle_one_is_closed_as_the_server_ends(self):
        with contextlib.ExitStack() as stack:
            with running(FakeEngine(config=configured())) as server:
                talk = stack.enter_context(talking(server, headers={}))
                assert talk.ask("hello")[1]["turn"] == 0
            assert talk.closed()[0] == 1012

    def test_a_turn_is_told_that_the_server_ends(self):
        engine = HeldEngine(config=configured())
        with contextlib.ExitStack() as stack:
            with running(engine) as server:
                talk = stack.enter_context(talking(server, headers={}))
                talk.send("input.append", text="hello")
                talk.send("input.commit")
                wait_until(lambda: server.service.load.open)
            event = talk.next()
            assert event["error"]["code"] == "draining"
            assert talk.closed()[0] == 1012

    def test_an_engine_that_died_is_told_and_the_parts_stay(self):
        engine = FakeEngine(config=configured(), error=EngineDeadError("it is gone"))
        with running(engine) as server, talking(server, headers={}) as talk:
            assert talk.ask("hello")[1]["error"]["code"] == "engine_restarting"
            engine.error = None
            talk.send("input.commit")
            assert talk.turn()[0] == "Hello there , friend"
            assert engine.asked[-1][0]["prompt_token_ids"] == [1, *map(ord, "hello")]
