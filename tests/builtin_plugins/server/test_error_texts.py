"""Answers never repeat the text of a library: it may hold paths, addresses and data of others.

CVE-2026-22778: a message of an image library contained the address of a heap object.
"""

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.builtin_plugins.server.errors import for_clients
from hardpoint.builtin_plugins.server.routes.answers import LOAD_FAILED
from hardpoint.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineTimeoutError,
    PluginFaultError,
)
from hardpoint.plugins import HardpointError, ModelError, RequestError
from hardpoint.plugins.requests.stats import Health, StepFault
from hardpoint.plugins.server import Authenticator, Middleware, Route, Transform

SECRET = "/etc/secret/token"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def quoting(*_):
    raise OSError(2, "No such file", SECRET)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "plugin 'acme' (acme 1.0): its prepare failed: OSError: [Errno 2] '/etc/x'\nmore",
            "plugin 'acme' (acme 1.0): its prepare failed: OSError",
        ),
        (
            "plugin 'acme' (acme 1.0): ZeroDivisionError: division by zero",
            "plugin 'acme' (acme 1.0): ZeroDivisionError",
        ),
        (
            "messages: the chat template refuses them: it failed: UndefinedError: 'x' has no 'y'",
            "messages: the chat template refuses them: it failed: UndefinedError",
        ),
        (
            "messages: the chat template refuses them: Roles must alternate",
            "messages: the chat template refuses them: Roles must alternate",
        ),
        (
            "plugin 'acme' (acme 1.0), asked for by plugins.enable[0] (file /a b.toml): it failed",
            "plugin 'acme' (acme 1.0): it failed",
        ),
        (
            "it was killed, while apply() of plugin 'acme' (acme:X), asked for by plugins.enable[0]"
            " (file /a b.toml) ran",
            "it was killed, while apply() of plugin 'acme' (acme:X) ran",
        ),
        (
            "plugin 'acme' (acme:X), asked for by scheduler.use (argument LLM(config=...)): no",
            "plugin 'acme' (acme:X): no",
        ),
        *(
            (
                f"plugin 'acme' (acme:X), asked for by plugins.enable[0] (file {file}){rest}",
                f"plugin 'acme' (acme:X){rest}",
            )
            for file in ("/a(b/h.toml", "/a)b/h.toml", "/a)b(c/h.toml", "/((/h.toml", "/a (b)/h")
            for rest in (": it failed (twice)", "; and no more", ", and so on", " ran", "")
        ),
        ("got <io.BytesIO object at 0x7f9a364ea090>", "got <io.BytesIO object at (an address)>"),
        ("panicked at /root/.cargo/llg/src/lib.rs:5:9", "panicked at (a file)"),
        ("n: expected at most 3, got 4", "n: expected at most 3, got 4"),
        ("timeout: failed: too late", "timeout: failed: too late"),
    ],
)
def test_what_clients_see_of_a_message(message, expected):
    assert for_clients(message) == expected


class EndedByAnError(FakeEngine):
    """An engine that fails every request."""

    message = ""

    def _outputs(self, *args):
        for output in super()._outputs(*args):
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", self.message
            yield output


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_whose_blocks_could_not_be_loaded_may_be_sent_again(path):
    engine = EndedByAnError(config=configured())
    engine.message = f"{LOAD_FAILED}, for 2 of its blocks (kv_connector.on_load_failure)"
    with running(engine) as server:
        body = BODY if "chat" in path else {"prompt": "hi"}
        answer = server.post(path, body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
        assert answer.headers["retry-after"] == "1"
        error = {"message": engine.message, "type": "unavailable_error", "code": "kv_load_failed"}
        assert answer.json()["error"] == {**error, "param": None}
        engine.message = "plugin 'dry' (acme 1.0): its apply failed: ValueError: no"
        answer = server.post(path, body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")


FORGED = "0xabcdef12\n2026-01-01 hardpoint ERROR forged\x1b[2J"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_\n": 1},
        {"tags": {FORGED: 1}},
        {"seed": FORGED},
        {"seed": "a secret prompt: its prepare failed: OSError: no"},
        {"messages": [{"role": FORGED, "content": FORGED}]},
    ],
)
def test_what_a_client_did_wrong_is_not_logged(running_server, caplog, fields):
    caplog.clear()
    response = running_server.post("/v1/chat/completions", {**BODY, **fields})
    assert response.status_code == 400
    assert not caplog.records
    assert "\n" not in response.json()["error"]["message"]


def test_a_wrong_method_is_not_logged(running_server, caplog):
    caplog.clear()
    assert running_server.post("/health", {}).status_code == 405
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError(f"messages: the template failed: ValueError: {FORGED}"), 400),
        (EngineTimeoutError(f"plugin: its step failed: ValueError: {FORGED}"), 503),
        (KeyError(FORGED), 500),
        (ValueError(FORGED), 500),
    ],
)
def test_what_is_logged_has_no_lines_of_a_client(caplog, error, status):
    with running(FakeEngine(config=configured(), error=error)) as server:
        assert server.post("/v1/chat/completions", BODY).status_code == status
    (record,) = caplog.records
    lines = record.message.splitlines()
    assert "ValueError" in record.message or "KeyError" in record.message
    assert "forged" in record.message
    assert "\x1b" not in record.message
    assert not any(line.startswith("2026") for line in lines)
    if status == 500:
        assert any("fake_engine.py" in line for line in lines), "where it was raised"


def test_a_line_about_a_request_has_its_id(caplog):
    error = EngineTimeoutError("plugin: its step failed: ValueError: no")
    with running(FakeEngine(config=configured(), error=error)) as server:
        headers = {"x-request-id": "mine-1"}
        assert server.post("/v1/chat/completions", BODY, headers=headers).status_code == 503
        server.engine.error = KeyError("a")
        assert server.post("/v1/chat/completions", BODY, headers=headers).status_code == 500
    first, second = [record.message for record in caplog.records]
    assert first.startswith("request mine-1 was answered with 503: plugin: its step failed")
    assert second.startswith("request mine-1 failed: 'a'")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", ", got an incomplete value"),
        (b'{"a": 1', ", got an incomplete value"),
        (b"{'a': 1}", ", got a name without double quotes at byte 1"),
        (b'{"a": NaN}', ", got an unexpected character at byte 6"),
        (b'{"a": [1,]}', ", got a comma at the end of an array at byte 9"),
        (b'{"a": 1,}', ", got a comma at the end of an object at byte 8"),
        (b"{} {}", ", got more than one value at byte 4"),
        (b'{"a": 01}', ", got a malformed number at byte 7"),
        (b'{"a": 1e999}', ", got a number that is too large"),
        (b'{"a": "\\q"}', ", got an unknown escape in a text at byte 9"),
        (b'{"a" 1}', ", got a name without a colon at byte 5"),
        (b'{"a": 1 "b"}', ", got an object without a comma or an end at byte 8"),
        (b'{"a": "\xff"}', " in UTF-8"),
    ],
)
def test_what_is_no_json_is_told_in_our_words(running_server, body, problem):
    headers = {"content-type": "application/json"}
    answer = running_server.client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"body: expected JSON{problem}"


def test_a_field_whose_name_has_lines_is_quoted():
    with running(FakeEngine(config=configured(unknown_fields="error"))) as server:
        response = server.post("/v1/chat/completions", {**BODY, "a\nb": 1})
    message = response.json()["error"]["message"]
    assert message.startswith("'a\\nb': unknown field; known here: ")


@pytest.fixture(scope="module")
def running_server():
    with running(FakeEngine(config=configured())) as server:
        yield server


@pytest.fixture
def server(running_server):
    yield running_server
    running_server.engine.error = None


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (OSError(2, "No such file", SECRET), 500, "the server failed; its log says why"),
        (KeyError(SECRET), 500, "the server failed; its log says why"),
        (RecursionError(SECRET), 500, "the server failed; its log says why"),
        (MemoryError(SECRET), 500, "the server failed; its log says why"),
        (HardpointError(f"chat templates: {SECRET}"), 500, "the server failed; its log says why"),
        (ModelError(f"{SECRET} is damaged"), 500, "the server failed; its log says why"),
        (
            EngineDeadError(f"the engine process (pid 5) failed: OSError: {SECRET}"),
            503,
            "the engine is being restarted; send the request again",
        ),
        (EngineClosedError("the engine was closed"), 503, "the engine was closed"),
        (EngineTimeoutError("no answer in 5 s"), 503, "no answer in 5 s"),
        (
            PluginFaultError(f"plugin 'acme': its rows failed: OSError: {SECRET}"),
            500,
            "plugin 'acme': its rows failed: OSError",
        ),
        (
            RequestError(f"plugin_args: plugin 'acme': its prepare failed: OSError: {SECRET}"),
            400,
            "plugin_args: plugin 'acme': its prepare failed: OSError",
        ),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_errors_of_the_engine(server, error, status, expected, streamed, caplog):
    server.engine.error = error
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {**BODY} if "chat" in path else {"prompt": "hi"}
        response = server.post(path, {**body, "stream": streamed})
        assert response.status_code == status
        assert response.json()["error"]["message"] == expected
        assert SECRET not in response.text
        assert SECRET not in str(response.headers)
    if SECRET in str(error):
        assert SECRET in caplog.text  # the operator sees it


def test_an_error_within_a_stream():
    error = PluginFaultError(f"plugin 'acme': its rows failed: OSError: {SECRET}")
    engine = FakeEngine(config=configured(), error=error, fails_after=2)
    with running(engine) as server:
        events = server.events("/v1/chat/completions", {**BODY, "stream": True})
    assert events[-1]["error"]["message"] == "plugin 'acme': its rows failed: OSError"


def middleware(_):
    async def app(*_):
        quoting()

    return app


async def failing(*_):
    quoting()


@pytest.mark.parametrize(
    ("extension", "part"),
    [
        (Transform(request=failing), "transform"),
        (Middleware(wrap=middleware), "middleware"),
        (Authenticator(authenticate=failing), "authenticator"),
        (Route(path="/acme", endpoint=failing), "route /acme"),
    ],
)
def test_errors_of_extensions(extension, part):
    engine = FakeEngine(config=configured(), extensions=(("acme", extension),))
    with running(engine) as server:
        is_route = isinstance(extension, Route)
        path = "/acme" if is_route else "/v1/chat/completions"
        response = server.client.get(path) if is_route else server.post(path, BODY)
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert message.startswith("plugin 'acme': its ")
    assert message.endswith(f"{part} failed: FileNotFoundError")
    assert SECRET not in response.text


def test_health_names_plugins_without_their_messages():
    quoted = f"plugin 'acme': its observe failed: OSError: {SECRET}"
    health = Health(
        faults={"acme": 1},
        quarantined={"acme": quoted},
        fallbacks={"acme": StepFault(1, quoted)},
        slow={},
    )
    with running(FakeEngine(config=configured(), health_now=health)) as server:
        response = server.client.get("/health")
    assert response.json()["status"] == "degraded"
    assert response.json()["quarantined"] == {"acme": "plugin 'acme': its observe failed: OSError"}
    assert SECRET not in response.text


def test_a_dead_engine_is_reported_without_its_message():
    dead = EngineDeadError(f"the engine process failed: OSError: {SECRET}")
    engine = FakeEngine(config=configured())
    with running(engine) as server:
        engine.is_running, engine.dead_error = False, dead
        responses = [server.client.get("/health"), server.post("/v1/chat/completions", BODY)]
    for response in responses:
        assert response.status_code == 503
        assert SECRET not in response.text


def test_lenient_fields_are_logged_in_one_line(caplog):
    """A field's name cannot forge a line of the log."""
    with running(FakeEngine(config=configured(unknown_fields="warn"))) as server:
        response = server.post("/v1/chat/completions", {**BODY, "x\nERROR forged\x1b[2J": 1})
    assert response.status_code == 200
    (record,) = [r for r in caplog.records if "unknown fields" in r.message]
    assert "\n" not in record.message
    assert "\x1b" not in record.message


@pytest.mark.parametrize("sent", ["a b", "x" * 129, "a\tb", "\xff"])
def test_request_ids_of_clients_are_plain(server, sent):
    raw = sent.encode("latin-1")
    response = server.client.get("/health", headers={b"x-request-id": raw})
    assert response.headers["x-request-id"].startswith("req-")
    response = server.client.get("/health", headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
